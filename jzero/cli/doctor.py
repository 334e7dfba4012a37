"""Reports this machine's devices, and runs checks on them against known results."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import platform
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jzero
from jzero.core.base.text import Part, Report, Table
from jzero.core.config.offload import Offload
from jzero.core.config.settings import check, number
from jzero.core.config.zero import ZeroConfig
from jzero.core.disk.files import check_folder, file_system, free_bytes
from jzero.core.disk.rates import DiskRates, measure_rates
from jzero.core.layout.mesh import make_mesh
from jzero.core.plan.table import format_bytes
from jzero.core.state.shard import plan_train_state
from jzero.core.state.train_state import TrainState
from jzero.debug.equivalence import check_equivalence
from jzero.machines.topologies import missing_compiler

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
AXIS = "data"
HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
      name: The name of the check.
      status: `not available` if the machine lacks something that the check needs.
      detail: The outcome, or the missing requirement.
    """

    name: str
    status: Literal["ok", "failed", "not available"]
    detail: str


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """All devices of one kind.

    Attributes:
      kind: Their name, e.g. `NVIDIA H200`.
      platform: `cpu`, `gpu` or `tpu`.
      count: Number of devices, including those of other processes.
      memory_kinds: The kinds of memory that can hold arrays.
      default_memory: The kind that holds arrays by default.
      memory_bytes: Bytes of it that programs may use; `None` if the platform does not report them.
    """

    kind: str
    platform: str
    count: int
    memory_kinds: tuple[str, ...]
    default_memory: str
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class DoctorReport(Report):
    """The report of `examine`. `print` it for a table.

    Attributes:
      versions: Versions of Python and of the relevant packages; `None` for packages that are not installed.
      devices: The devices by kind.
      compilers: For `gpu` and `tpu`: the package needed to compile for such machines, or `None` if nothing is missing.
      checks: The result of each check.
      disk: The measured disk, if any.
    """

    derived = ("ok",)

    versions: dict[str, str | None]
    devices: tuple[DeviceGroup, ...]
    compilers: dict[str, str | None]
    checks: tuple[Check, ...]
    disk: DiskReport | None = None

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "failed" for check in self.checks)

    def parts(self) -> list[Part]:
        """Returns a table of each kind."""
        lines = ["versions", *_rows([(name, version or "not installed") for name, version in self.versions.items()])]
        lines += ["", "devices", *_rows([_device_row(group) for group in self.devices])]
        compilers = [(kind, f"needs {missing}" if missing else "installed") for kind, missing in self.compilers.items()]
        lines += ["", "compilers for other machines", *_rows(compilers)]
        lines += ["", "checks", *_rows([dataclasses.astuple(check) for check in self.checks])]
        if self.disk is not None:
            lines += ["", "disk", *_rows(self.disk.rows())]
        return lines


def examine(disk: str | None = None, disk_bytes: float = 2**31) -> DoctorReport:
    """Lists this machine's devices and runs the checks on all of them.

    Args:
      disk: A folder; its disk is measured, too.
      disk_bytes: Space to use there for it.

    Returns:
      A `DoctorReport`.

    Example:
      >>> from jzero.cli.doctor import examine
      >>> report = examine()  # doctest: +SKIP
      >>> report.ok, report.devices[0].count  # doctest: +SKIP
      (True, 8)
    """
    check("disk_bytes", disk_bytes, number("a number of bytes, from 1 to 2^50", lambda x: 1 <= x <= 2**50))
    measured = None if disk is None else examine_disk(disk, int(disk_bytes))
    versions: dict[str, str | None] = {"python": platform.python_version(), "jzero": jzero.__version__}
    versions |= {name: _version(name) for name in PACKAGES}
    compilers = {"gpu": missing_compiler("gpu"), "tpu": missing_compiler("tpu")}
    devices: tuple[DeviceGroup, ...] = ()

    def look() -> str:
        nonlocal devices
        devices = _device_groups(jax.devices())
        return f"{jax.device_count()} on platform {jax.default_backend()}, {jax.process_count()} process(es)"

    checks = [_run("devices", look)]
    if devices:
        mesh = make_mesh(data=-1)
        checks += [_run(name, functools.partial(check, mesh)) for name, check in CHECKS.items()]
    return DoctorReport(versions, devices, compilers, tuple(checks), measured)


class _NotAvailableError(Exception):
    """The machine lacks something that this check needs."""


class _WrongResultError(Exception):
    """A check ran and its result is wrong."""


def _run(name: str, check: Callable[[], str]) -> Check:
    try:
        logging.getLogger("jzero").info("Checking %s.", name)
        return Check(name, "ok", check())
    except _NotAvailableError as error:
        return Check(name, "not available", str(error))
    except _WrongResultError as error:
        return Check(name, "failed", str(error))
    except Exception as error:  # any other error is a finding, too; the other checks still run
        return Check(name, "failed", f"{type(error).__name__}: {_first(error)}")


def _first(error: Exception) -> str:
    """Returns the first paragraph of a message on one line."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


def _collectives(mesh: Mesh) -> str:
    """Gathers, sums and scatters small integers, whose sums are exact in fp32."""
    count = mesh.size
    if count == 1:
        raise _NotAvailableError("needs at least two devices, found one")
    sent = (31 * np.arange(count)[:, None] + 17 * np.arange(count)) % 251  # [N, N], one row per device

    def exchange(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # [1, N]
        gathered = lax.all_gather(x[0], AXIS)
        return gathered[None], lax.psum(x, AXIS), lax.psum_scatter(x[0], AXIS, tiled=True)

    cut = PartitionSpec(AXIS)
    exchange = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    received = jax.device_get(exchange(_place(sent.astype(np.float32), mesh)))
    total = sent.sum(axis=0)
    expected = {
        "all-gather": np.broadcast_to(sent, (count, count, count)),
        "all-reduce": np.broadcast_to(total, (count, count)),
        "reduce-scatter": total,
    }
    wrong = [name for (name, x), y in zip(expected.items(), received, strict=True) if not np.array_equal(x, y)]
    if wrong:
        raise _WrongResultError(f"{', '.join(wrong)} over {count} devices: wrong result")
    return f"{', '.join(expected)} over {count} devices, exact"


def _donation(mesh: Mesh) -> str:
    x = _place(np.arange(1024.0 * mesh.size, dtype=np.float32), mesh)
    expected = np.asarray(x) + 1
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    stats = compiled.memory_analysis()
    reused, donated = int(getattr(stats, "alias_size_in_bytes", 0)), x.nbytes // mesh.size
    result = compiled(x)
    if not np.array_equal(result, expected):
        raise _WrongResultError("the result of a call with a donated argument is wrong")
    if reused < donated or not x.is_deleted():
        fate = "was deleted" if x.is_deleted() else "still exists"
        raise _WrongResultError(f"{reused} of {donated} donated bytes per device are reused, and the argument {fate}")
    return "the memory of a donated argument is reused"


def _host_memory(mesh: Mesh) -> str:
    _need_host_memory(mesh)
    values = np.random.default_rng(0).normal(size=(mesh.size, 2**18)).astype(np.float32)
    x = _place(values, mesh)
    before = _bytes_in_use(mesh)
    on_host = jax.block_until_ready(jax.device_put(x, x.sharding.with_memory_kind(HOST)))
    after = _bytes_in_use(mesh)
    if on_host.sharding.memory_kind != HOST:
        raise _WrongResultError(f"an array moved to {HOST} is in {on_host.sharding.memory_kind}")
    back = jax.device_put(on_host, x.sharding)
    if not (np.array_equal(on_host, values) and np.array_equal(back, values)):
        raise _WrongResultError(f"an array moved to {HOST} and back has changed")
    if before is not None and after is not None and after - before >= x.nbytes // mesh.size:
        raise _WrongResultError(f"an array in {HOST} takes {format_bytes(after - before)} of device memory")
    return f"{format_bytes(values.nbytes)} to {HOST} and back, unchanged"


def _need_host_memory(mesh: Mesh) -> None:
    kinds = sorted(memory.kind for memory in mesh.local_devices[0].addressable_memories())
    if HOST not in kinds:
        raise _NotAvailableError(f"the devices have no memory of kind {HOST}, only {', '.join(kinds)}")


def _bytes_in_use(mesh: Mesh) -> int | None:
    stats = mesh.local_devices[0].memory_stats() or {}
    in_use = stats.get("bytes_in_use")
    return None if in_use is None else int(in_use)


def _offload(mesh: Mesh) -> str:
    """Runs the train step with the optimizer state on the host, in chunks."""
    _need_host_memory(mesh)
    return _train_step(mesh, Offload(optimizer="host", chunk_bytes=2048)) + ", optimizer state on the host"


def _update_on_host(mesh: Mesh) -> str:
    """Runs the train step with the optimizer state on the host, updated by the host's CPU."""
    _need_host_memory(mesh)
    return _train_step(mesh, Offload(optimizer="host", compute="host")) + ", updated on the host"


def _train_step(mesh: Mesh, offload: Offload | None = None) -> str:
    """Trains at stage 3 on all devices, and with optax on one. Prime sizes make jzero pad the shards."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(61, 97)).astype(np.float32) / 8, "v": rng.normal(size=97).astype(np.float32) / 8}
    state = TrainState.create(params=jax.tree.map(jnp.asarray, params), tx=optax.adam(1e-2))
    batches = [rng.normal(size=(2 * mesh.size, 61)).astype(np.float32) for _ in range(3)]
    config = ZeroConfig(stage=3, axis=AXIS, persistence_threshold=0, offload=offload or Offload())
    unsharded = [
        leaf.path for leaf in plan_train_state(state, config=config, mesh=mesh).leaves if leaf.param.cut is None
    ]
    if 1 < mesh.size <= params["v"].size and unsharded:
        raise _WrongResultError(f"stage 3 over {mesh.size} devices leaves parameters whole: {', '.join(unsharded)}")
    with jax.default_matmul_precision("highest"):  # by default, some accelerators multiply in lower precision
        report = check_equivalence(_loss, state, batches, config=config, mesh=mesh)
    try:
        report.check()
    except AssertionError as error:
        raise _WrongResultError(
            f"stage 3 over {mesh.size} device(s) differs from optax on one: {_first(error)}"
        ) from error
    deviation = max(report.loss, report.grad_norm, report.params)
    cut = "" if mesh.size > 1 else " (nothing is partitioned)"
    return f"{len(batches)} steps at stage 3 over {mesh.size} device(s){cut}: within {deviation:.0e} of optax on one"


def _loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"] - 1).mean()


CHECKS: dict[str, Callable[[Mesh], str]] = {
    "collectives": _collectives,
    "donation": _donation,
    "host memory": _host_memory,
    "train step": _train_step,
    "offload": _offload,
    "update on the host": _update_on_host,
}


def _place(x: np.ndarray, mesh: Mesh) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(AXIS)))


def _device_groups(devices: Sequence[jax.Device]) -> tuple[DeviceGroup, ...]:
    groups: dict[tuple[str, str], list[jax.Device]] = {}
    for device in devices:
        groups.setdefault((device.device_kind, device.platform), []).append(device)
    return tuple(_device_group(kind, platform, members) for (kind, platform), members in groups.items())


def _device_group(kind: str, platform: str, devices: Sequence[jax.Device]) -> DeviceGroup:
    device = next((d for d in devices if d.process_index == jax.process_index()), devices[0])
    stats = device.memory_stats() or {}
    return DeviceGroup(
        kind=kind,
        platform=platform,
        count=len(devices),
        memory_kinds=tuple(sorted(memory.kind for memory in device.addressable_memories())),
        default_memory=device.default_memory().kind,
        memory_bytes=stats.get("bytes_limit"),
    )


def _device_row(group: DeviceGroup) -> tuple[str, ...]:
    size = "size unknown" if group.memory_bytes is None else format_bytes(group.memory_bytes)
    kinds = ", ".join(f"{kind} (default)" if kind == group.default_memory else kind for kind in group.memory_kinds)
    return f"{group.count} × {group.kind}", f"platform {group.platform}", size, f"memories: {kinds}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _rows(rows: Sequence[Sequence[str]]) -> list[Part]:
    return [Table(rows, left=len(rows[0]), indent=2)] if rows else []


BYTES_PER_PARAMETER = 12
"""Bytes that an update reads, and writes, per 16-bit parameter: master, mean and variance of Adam in fp32."""


@dataclasses.dataclass(frozen=True)
class DiskReport:
    """A folder for `Offload.path`.

    Attributes:
      folder: Its absolute path.
      file_system: The type, e.g. `ext4`.
      free_bytes: Bytes that an ordinary user may still allocate.
      fallbacks: What jzero does if the file system lacks `O_TMPFILE` or `O_DIRECT`.
      rates: Bytes per second.
      seconds_per_billion: Seconds that the disk takes for an update of 10^9 16-bit parameters with Adam.
    """

    folder: str
    file_system: str
    free_bytes: int
    fallbacks: tuple[str, ...]
    rates: DiskRates
    seconds_per_billion: float

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and values, for a table."""
        fallbacks = [("file system", text) for text in self.fallbacks]
        return [
            ("folder", f"{self.folder} ({self.file_system}), {format_bytes(self.free_bytes)} free"),
            *(fallbacks or [("file system", "has O_TMPFILE and O_DIRECT")]),
            ("read", f"{format_bytes(self.rates.read)}/s"),
            ("write", f"{format_bytes(self.rates.write)}/s"),
            ("both at once", f"{format_bytes(self.rates.duplex)}/s each way"),
            ("update", f"{self.seconds_per_billion:.1f} s per 10^9 16-bit parameters with Adam"),
        ]


def examine_disk(path: str, num_bytes: int) -> DiskReport:
    """Measures a disk.

    Args:
      path: A folder on it.
      num_bytes: Space to use for it.

    Raises:
      ValueError: It is not a folder that this process may write to.
      DiskError: There is too little space, or the disk fails.
    """
    folder = check_folder(path, "--disk")
    free = free_bytes(folder)
    logging.getLogger("jzero").info("Measuring the disk of %s with %s.", folder, format_bytes(num_bytes))
    rates, fallbacks = measure_rates(folder, num_bytes)
    seconds = 1e9 * BYTES_PER_PARAMETER / rates.duplex
    return DiskReport(folder, file_system(folder), free, fallbacks, rates, seconds)
