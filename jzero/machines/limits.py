"""The machine to estimate for, and the memory that a step may use."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from jzero.machines.accelerators import GPUS
from jzero.machines.machine import Machine, machine
from jzero.machines.topologies import topology_devices

USABLE = 0.9
"""Share of a machine's memory that a step may use; runtime, collectives and fragmentation take the rest."""
_TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
ROUNDED = 256 * 2**20
"""Memory that is measured counts in whole steps of so many bytes: a choice does not hang on a few small arrays."""
NOT_COMPILED = "Nothing was compiled: the figures are estimated."
ABSTRACT = (
    "To compile, pass a mesh of devices, such as those of `jzero.machines.topologies.topology_devices(topology)`."
)


def hardware_of(
    topology: str | None, mesh: Mesh | AbstractMesh | None = None, *, confirm: bool
) -> tuple[Machine | None, list[jax.Device] | None, list[str]]:
    """Returns a machine's specifications, its devices if its compiler is installed, and notes.

    Raises:
      ValueError: There is no such machine, or it has another number of devices than the mesh.
    """
    hardware = None if topology is None else machine(topology)
    if hardware is not None and mesh is not None and mesh.size != hardware.num_devices:
        raise ValueError(
            f"`mesh` has {mesh.size} devices, and {topology!r} has {hardware.num_devices}: name a machine with as many."
        )
    if isinstance(mesh, AbstractMesh):
        return hardware, None, [f"{NOT_COMPILED} {ABSTRACT}" if confirm else NOT_COMPILED]
    if mesh is not None or topology is None:
        devices = jax.devices() if mesh is None else list(mesh.devices.flat)
        return hardware or this_machine(devices), devices, [] if confirm else [NOT_COMPILED]
    if not confirm:
        return hardware, None, [NOT_COMPILED]
    try:
        return hardware, topology_devices(topology), []
    except ImportError as error:
        return hardware, None, [f"{NOT_COMPILED} {error}"]


def this_machine(devices: Sequence[jax.Device]) -> Machine | None:
    """Returns the specifications of the devices' machine; `None` if it is unknown."""
    kind = devices[0].device_kind
    if kind in _TPU_KINDS:
        chip = _TPU_KINDS[kind]
        shape = f"{len(devices)}x1x1" if chip in ("v4", "v5p") else f"{len(devices)}x1"
    else:
        chip = next((name for name, facts in GPUS.items() if facts.name == kind), "")
        shape = str(len(devices))
    try:
        return machine(f"{chip}:{shape}")
    except ValueError:  # devices that are in no table: their rates are unknown
        return None


def usable_bytes(hardware: Machine | None) -> int | None:
    """Returns the memory of one device that a step may use; `None` if unknown."""
    return None if hardware is None else int(USABLE * hardware.hbm_bytes)


def limit_of(hbm_bytes: float | None, topology: str | None, hardware: Machine | None) -> int:
    """Returns the limit of a step on one device: `hbm_bytes`, else a share of its memory, at most what jax may take.

    Raises:
      ValueError: The memory of the devices is not known.
    """
    if hbm_bytes is not None:
        return int(hbm_bytes)
    limit = _least(hardware, None if topology is not None else jax.local_devices()[0])
    if limit is None:
        raise ValueError("The memory of these devices is not known: pass `hbm_bytes=`, or a `topology`.")
    return limit


def memory_to_spend(
    mesh: Mesh | AbstractMesh, hardware: Machine | None, own: int | None = None
) -> tuple[int | None, Machine | None]:
    """Returns the bytes of one device that a step may use without being asked, and the machine; `None` if unknown.

    Args:
      mesh: The mesh. If it is abstract, there are no devices to ask: only `hardware` tells.
      hardware: The machine, if the mesh is on none.
      own: What the step's own state takes of a device: all else that is there is left alone. If `None`, the devices are
        taken as empty.
    """
    if not isinstance(mesh, Mesh):
        return usable_bytes(hardware), hardware
    devices = list(mesh.devices.flat)
    hardware = this_machine(devices)
    local = [x for x in jax.local_devices() if x in devices]
    bounds = [x for device in local or [None] if (x := _least(hardware, device, own)) is not None]
    return min(bounds, default=None), hardware


def memory_figures(device: jax.Device) -> Mapping[str, int]:
    """Returns what jax's allocator says of a device: `bytes_limit`, which it can still have in all, and `bytes_in_use`.

    Nothing of virtual CPU devices: they share the memory of the machine with everything else, so a step there takes no
    more than it has to.
    """
    figures = {} if device.platform == "cpu" else device.memory_stats() or {}
    if "bytes_limit" in figures and "pool_bytes" in figures and (free := free_bytes(device)) is not None:
        figures["bytes_limit"] = min(figures["bytes_limit"], figures["pool_bytes"] + free)  # others may hold the rest
    return figures


def _least(hardware: Machine | None, device: jax.Device | None, own: int | None = None) -> int | None:
    """Returns a share of a machine's memory, or what jax may take of a device's if that is less, beside `own` bytes."""
    usable, figures = usable_bytes(hardware), {} if device is None else memory_figures(device)
    bounds = [] if usable is None else [usable]
    bounds += [int(figures["bytes_limit"]) // ROUNDED * ROUNDED] if "bytes_limit" in figures else []
    others = 0 if own is None else max(0, int(figures.get("bytes_in_use", 0)) - own)
    return max(0, min(bounds) - -(-others // ROUNDED) * ROUNDED) if bounds else None


def free_bytes(device: jax.Device) -> int | None:
    """Returns the bytes of a GPU that no process has taken; `None` if CUDA's driver does not say."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    gpu, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(gpu), device.local_hardware_id):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu):  # jax's own, which exists
        return None
    failed = cuda.cuCtxPushCurrent_v2(context)
    if not failed:
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    cuda.cuDevicePrimaryCtxRelease_v2(gpu)
    return None if failed else free.value
