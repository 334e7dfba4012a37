"""What a training step needs, reckoned from its trace: no compiler and no device is asked."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jzero import _compat
from jzero._text import format_rows
from jzero.analysis.footprint import footprint
from jzero.analysis.machines import Machine, machine
from jzero.analysis.placing import plan_of_argument, relaid
from jzero.analysis.sizes import bytes_of
from jzero.analysis.traced import Buffer, Transfer, trace_program
from jzero.config.zero import ZeroConfig
from jzero.plan.mesh import AnyMesh, platform_of
from jzero.plan.plan import ZeroPlan
from jzero.plan.table import format_bytes
from jzero.step.train_step import TrainStep

__all__ = ["ActivationRow", "StepMemory", "activation_lines", "estimate_step_memory", "gathers_more", "memory_of_trace"]

GATHERS_WORTH_A_NOTE = 1.05
"""How much more may be gathered than planned before it is said why."""

GPU_SCHEDULER_SHARE = 0.8
"""Of a GPU's memory: what XLA's scheduler plans with (its log says so where a program does not fit)."""


@dataclasses.dataclass(frozen=True)
class ActivationRow:
    """What one layer keeps for the backward pass.

    Attributes:
      layer: Its path by name scopes, such as `Decoder/blocks`, and the operation.
      times: How often the layer runs: the trip count of the loop that it is scanned by, or 1.
      num_bytes: On one device, of all of these together.
    """

    layer: str
    times: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What a training step needs on one device, in bytes, as reckoned from its trace.

    Attributes:
      params: Parameters as stored.
      opt_state: The optimizer's state, masters included.
      other: The rest of the state, and the device's part of the batch.
      activations: What the forward pass leaves to the backward pass, by layer; the largest first.
      at_peak: What the temporaries are for when they are at the most: kept activations, gradients, gathered
        parameters, and what is being worked on.
      temporaries: Their sum, the most that the step needs beside its arguments.
      gathered_bytes: Of parameters that a step gathers on one device, padding included, in all micro-batches.
      planned_bytes: What `plan.gathered_bytes` has of these: without what the loss's own `jax.checkpoint`s and further
        uses of a parameter add.
      sent_bytes: What one device sends per step, in rings.
      communication_seconds: How long that takes at the machine's rates if nothing else slows it, `None` without a
        machine.
      flops: Operations of one device's products per step, recomputation included.
      host: What the state takes of the memory of the device's host. Counts in none of the others.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> memory = jzero.estimate_step_memory(step, state, jnp.ones((8, 512)))
      >>> memory.params == jzero.plan_of(state).bytes_per_device.params
      True
    """

    params: int
    opt_state: int
    other: int
    activations: tuple[ActivationRow, ...]
    at_peak: dict[str, int] = dataclasses.field(hash=False)
    temporaries: int
    gathered_bytes: int
    planned_bytes: int
    sent_bytes: int
    communication_seconds: float | None
    flops: float
    host: int = 0

    @property
    def arguments(self) -> int:
        """State and batch: what is there before the step and after it."""
        return self.params + self.opt_state + self.other

    @property
    def peak(self) -> int:
        """The most that the step needs."""
        return self.arguments + self.temporaries

    @property
    def activation_bytes(self) -> int:
        """All that the forward pass leaves to the backward pass."""
        return sum(row.num_bytes for row in self.activations)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain data."""
        totals = {"arguments": self.arguments, "peak": self.peak, "activation_bytes": self.activation_bytes}
        return {**dataclasses.asdict(self), **totals}

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        terms = {
            "parameters": self.params,
            "optimizer state": self.opt_state,
            "other state, batch": self.other,
            **{f"  {name} at the peak": num_bytes for name, num_bytes in self.at_peak.items()},
            "temporaries": self.temporaries,
            "peak": self.peak,
            **({"on the host": self.host} if self.host else {}),
        }
        lines = ["reckoned per device"]
        lines += [f"  {name:28}{format_bytes(num_bytes):>12}" for name, num_bytes in terms.items()]
        planned = f"planned: {format_bytes(self.planned_bytes)}"
        lines += ["", f"gathered per step: {format_bytes(self.gathered_bytes)} ({planned})"]
        lines += gathers_more(self.gathered_bytes, self.planned_bytes)
        lines += ["", *activation_lines(self.activations)]
        return "\n".join(lines)


def gathers_more(gathered: int, planned: int) -> list[str]:
    """Returns a note if a step gathers more of the parameters than `plan.gathered_bytes` counts."""
    if not planned or gathered <= GATHERS_WORTH_A_NOTE * planned:
        return []
    return [
        f"The step gathers {gathered / planned:.2f} times what `plan.gathered_bytes` counts: a parameter is gathered "
        "once per use, and again where a `jax.checkpoint` around others, or around several uses, replays a forward "
        "pass. Put `jax.checkpoint` around single layers alone, or undo the loss's own by `remat=False`."
    ]


def activation_lines(rows: Iterable[ActivationRow], max_rows: int = 12) -> list[str]:
    """Returns the table of activations by layer."""
    rows = list(rows)
    cells = [(row.layer, str(row.times), format_bytes(row.num_bytes / row.times), format_bytes(row.num_bytes))
             for row in rows[:max_rows]]  # fmt: skip
    rest = sum(row.num_bytes for row in rows[max_rows:])
    if rest:
        cells.append((f"{len(rows) - max_rows} more", "", "", format_bytes(rest)))
    total = ("total", "", "", format_bytes(sum(row.num_bytes for row in rows)))
    header = ("kept for the backward pass", "layers", "per layer", "in all")
    return format_rows([header, *cells, total], left=1)


def estimate_step_memory(  # noqa: PLR0913  # a call of the step, and a machine
    step: TrainStep,
    state: Any,
    batch: Any,
    *,
    rng: Any = None,
    topology: str | None = None,
    mesh: AnyMesh | None = None,
    config: ZeroConfig | None = None,
) -> StepMemory:
    """Returns what a training step needs on one device, reckoned from its trace; nothing is compiled.

    The states are exact. The rest follows [Note: How memory is reckoned]; `analyze` has the compiler's own figure.

    Args:
      step: From `make_train_step`.
      state: What it is called with, concrete or abstract; sharded, or plain if `config` is given.
      batch: The global batch, concrete or abstract.
      rng: As the step is called with it.
      topology: A machine such as `"h200:8"`, for its number of devices and its rates. Its compiler is not needed.
      mesh: Over which devices; may be abstract, which without `topology` are taken for TPUs. By default that of the
        state, or all of `topology` on the ZeRO axis.
      config: What to partition, and how, where it is not what the state's plan says.

    Returns:
      A `StepMemory`; `print` it for tables.

    Raises:
      TypeError: `step` is not a training step of jzero, or the state is plain and there is no `config`.
      ValueError: There is no such machine, or the batch does not fit it.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> memory = jzero.estimate_step_memory(step, state, jnp.ones((64, 512)), topology="h200:64")
      >>> memory.params == 512 * 512 * 4 // 64
      True
    """
    if topology is not None and not isinstance(topology, str):
        raise TypeError(f"`topology` must name a machine, such as 'h200:8': got {topology!r}.")
    if config is not None and not isinstance(config, ZeroConfig):
        raise TypeError(f"`config` must be a `ZeroConfig`: got {config!r}.")
    if not isinstance(step, TrainStep):
        raise TypeError(f"`step` must be what `make_train_step` returned: got {type(step).__name__}.")
    hardware = None if topology is None else machine(topology)
    num_devices = None if hardware is None or mesh is not None else hardware.num_devices
    state = relaid(state, devices=num_devices, mesh=mesh, config=config)
    plan = plan_of_argument(state)
    if plan is None:
        raise TypeError("The state is not sharded by jzero: pass `config=jzero.ZeroConfig(stage=...)`, too.")
    traced, arguments = step.trace(state, batch, rng=rng), step.abstract_arguments(state, batch, rng=rng)
    return memory_of_trace(
        traced, arguments, plan, hardware, gpu=_is_gpu(plan, hardware), micro_batches=step.micro.steps
    )


def memory_of_trace(
    traced: Any, arguments: Any, plan: ZeroPlan, hardware: Machine | None, *, gpu: bool, micro_batches: int
) -> StepMemory:
    """Returns what a traced step needs.

    Args:
      traced: What `step.trace(...)` returned.
      arguments: What `step.abstract_arguments(...)` returned.
      plan: That of the state.
      hardware: For the rates of its links.
      gpu: Whether the compiler will be that for GPUs.
      micro_batches: Of the step.
    """
    opened, _ = _compat.open_jaxpr(traced.jaxpr)
    leaves = jax.tree.leaves(arguments)
    shardings = [None] * (len(opened.invars) - len(leaves)) + [x.sharding for x in leaves]  # constants come first
    parts = [_num_parts(v.aval, sharding) for v, sharding in zip(opened.invars, shardings, strict=True)]
    program = trace_program(traced.jaxpr, parts)
    host = plan.host_bytes_per_device.total
    num_bytes = sum(bytes_of(v.aval) // n for v, n in zip(opened.invars, parts, strict=True))
    if not plan.names_host_memory:  # then the trace takes what is on the host for the device's
        num_bytes -= host
    limit = math.inf if hardware is None else GPU_SCHEDULER_SHARE * hardware.hbm_bytes - num_bytes
    found = footprint(program, gpu=gpu, limit=limit)
    sizes = plan.bytes_per_device
    sent = [_sent_bytes(x, plan.mesh) * x.times for x in program.transfers]
    seconds = None
    if hardware is not None:
        rates = [_rate(x.axes, plan.mesh, hardware) for x in program.transfers]
        seconds = sum(amount / rate for amount, rate in zip(sent, rates, strict=True))
    return StepMemory(
        params=sizes.params,
        opt_state=sizes.opt_state,
        other=num_bytes - sizes.params - sizes.opt_state,
        host=host,
        activations=_rows(found.kept),
        at_peak={str(kind): num_bytes for kind, num_bytes in found.at_peak.items()},
        temporaries=found.peak,
        gathered_bytes=sum(x.times * x.num_bytes for x in program.transfers if x.of_param)
        + plan.bytes_gathered_in(micro_batches=0),
        planned_bytes=plan.bytes_gathered_in(micro_batches=micro_batches),
        sent_bytes=round(sum(sent)),
        communication_seconds=seconds,
        flops=program.flops,
    )


def _rows(kept: Iterable[Buffer]) -> tuple[ActivationRow, ...]:
    sums: dict[tuple[str, int], int] = {}
    for x in kept:
        key = (_layer(x.name), x.times)
        sums[key] = sums.get(key, 0) + x.num_bytes
    rows = [ActivationRow(layer, times, num_bytes) for (layer, times), num_bytes in sums.items() if num_bytes]
    return tuple(sorted(rows, key=lambda row: -row.num_bytes))


def _layer(name: str) -> str:
    """Returns a name stack without what transformations and a step write around it, and the operation."""
    stack, _, operation = name.rpartition(":")
    stack = re.sub(r"\b(jvp|transpose|vmap|checkpoint|rematted_computation|pmap|jit)\b(?=\()", "", stack)
    parts = [part for part in re.sub(r"[()]", "", stack).split("/") if part not in ("", "zero_compute")]
    return f"{'/'.join(parts) or '(no name)'}: {operation}"


def _num_parts(aval: Any, sharding: Any) -> int:
    if not isinstance(sharding, NamedSharding) or not aval.shape:
        return 1
    names = [n for n in jax.tree.leaves(tuple(sharding.spec)) if isinstance(n, str)]
    return math.prod(int(sharding.mesh.shape[n]) for n in names)


def _sent_bytes(x: Transfer, mesh: AnyMesh) -> float:
    """What one device sends in a ring."""
    size = math.prod(int(mesh.shape[axis]) for axis in x.axes if axis in mesh.shape)
    passes = 2 if x.kind == "all-reduce" else 1
    return passes * x.num_bytes * (size - 1) / size


def _rate(axes: tuple[str, ...], mesh: AnyMesh, hardware: Machine) -> float:
    """Bytes per second that a device sends along mesh axes: those of the slowest link on its way."""
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    group = grid[tuple(slice(None) if name in axes else 0 for name in sizes)].ravel()
    num_nodes = len({int(i) // hardware.devices_per_node for i in group})
    if num_nodes == 1 or hardware.inter_link_bytes_per_s is None:
        return hardware.intra_link_bytes_per_s
    return min(hardware.intra_link_bytes_per_s, hardware.inter_link_bytes_per_s * len(group) / num_nodes)


def _is_gpu(plan: ZeroPlan, hardware: Machine | None) -> bool:
    if hardware is not None:
        return hardware.kind == "gpu"
    return isinstance(plan.mesh, Mesh) and platform_of(plan.mesh.devices.flat[0]) == "gpu"
