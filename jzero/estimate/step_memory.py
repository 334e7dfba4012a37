"""Estimates the memory of a training step from its trace, without a compiler or a device."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jzero.core.base import compat
from jzero.core.base.text import Part, Report, Table
from jzero.core.base.types import PyTree, State
from jzero.core.layout.mesh import AnyMesh, platform_of
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.planned_bytes import BytesPerDevice, sum_bytes
from jzero.core.plan.table import format_bytes
from jzero.core.step.train_step import TrainStep
from jzero.estimate.buffers import Buffer, Transfer, bytes_of
from jzero.estimate.footprint import footprint, update_at_peak
from jzero.estimate.step_time import CollectiveTraffic, StepTime, step_time, traffic_of
from jzero.estimate.traced import trace_program
from jzero.estimate.traced_collectives import traced_lookups
from jzero.machines.machine import Machine

GATHERS_WORTH_A_NOTE = 1.05
"""A step that gathers more than this times the plan gets a note that says why."""

GPU_SCHEDULER_SHARE = 0.8
"""The share of a GPU's memory that XLA's scheduler plans with (as its log says if a program does not fit)."""


@dataclasses.dataclass(frozen=True)
class ActivationRow:
    """The activations that one layer saves for the backward pass.

    Attributes:
      layer: Its path by name scopes, such as `Decoder/blocks`, and the operation.
      times: How often the layer runs: the trip count of its scan, or 1.
      num_bytes: The bytes on one device, over all runs.
    """

    layer: str
    times: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class StepMemory(Report):
    """The memory of a training step on one device, in bytes, as estimated from its trace.

    Attributes:
      params: Parameters as stored.
      grads: Gradients at their maximum, as the plan counts them; `at_peak` has those at the peak.
      opt_state: The optimizer's state, including masters.
      other: The rest of the state, and the device's part of the batch.
      activations: The activations that the forward pass saves for the backward pass, by layer; the largest first.
      at_peak: The temporaries at their peak, by purpose: saved activations, gradients, gathered parameters, and
        working memory.
      temporaries: Their sum: the most that the step needs beside its arguments.
      gathered_bytes: Parameters that a step gathers on one device in all micro-batches, including padding.
      planned_bytes: The part of these that `plan.gathered_bytes` counts: without additional gathers for the loss's own
        `jax.checkpoint`s and for further uses of a parameter.
      sent_by_axes: The bytes that one device sends per step, in rings, by the mesh axes that these run over, such as
        `"data"` or `"data+context"`.
      nic_bytes: The part of these on the network port of one device; 0 on one node, or without a machine.
      communication_seconds: The time that these take at the machine's rates if nothing else slows them; `None`
        without a machine.
      flops: Operations of one device's products per step, including recomputation.
      time: The seconds of the step at the machine's rates; `None` without a machine.
      unknown_kernels: Names of kernels whose operations are unknown, which `flops` and `time` leave out.
      host: The state's bytes in the memory of the device's host. Not part of the other figures.
      disk: The state's bytes on disk, both copies. Likewise.
      course: The temporaries at each operation, by purpose, for pictures; of a loop, those of one iteration.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> memory = jzero.estimate_step_memory(step, state, jnp.ones((8, 512)))
      >>> memory.params == jzero.plan_of(state).bytes_per_device.params
      True
    """

    derived = ("arguments", "peak", "activation_bytes", "sent_bytes")

    params: int
    grads: int
    opt_state: int
    other: int
    activations: tuple[ActivationRow, ...]
    at_peak: dict[str, int] = dataclasses.field(hash=False)
    temporaries: int
    gathered_bytes: int
    planned_bytes: int
    sent_by_axes: dict[str, int] = dataclasses.field(hash=False)
    nic_bytes: int
    communication_seconds: float | None
    flops: float
    time: StepTime | None = None
    unknown_kernels: tuple[str, ...] = ()
    host: int = 0
    disk: int = 0
    course: tuple[Mapping[Any, int], ...] = dataclasses.field(default=(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures but the course as plain data."""
        return {name: x for name, x in super().to_dict().items() if name != "course"}

    @property
    def arguments(self) -> int:
        """State and batch, which exist before and after the step."""
        return self.params + self.opt_state + self.other

    @property
    def states(self) -> BytesPerDevice:
        """Parameters, gradients and optimizer state, as the plan has them."""
        return BytesPerDevice(self.params, self.grads, self.opt_state)

    @property
    def peak(self) -> int:
        """The most memory that the step needs."""
        return self.arguments + self.temporaries

    @property
    def sent_bytes(self) -> int:
        """The bytes that one device sends per step, over all axes."""
        return sum(self.sent_by_axes.values())

    @property
    def seconds(self) -> float | None:
        """The step's estimated time; `None` without a machine."""
        return None if self.time is None else self.time.seconds

    @property
    def activation_bytes(self) -> int:
        """The bytes that the forward pass saves for the backward pass."""
        return sum(row.num_bytes for row in self.activations)

    def parts(self) -> list[Part]:
        """Returns the terms, what moves, and the activations."""
        terms = {
            "parameters": self.params,
            "optimizer state": self.opt_state,
            "other state, batch": self.other,
            **{f"  {name} at the peak": num_bytes for name, num_bytes in self.at_peak.items()},
            "temporaries": self.temporaries,
            "peak": self.peak,
            **({"on the host": self.host} if self.host else {}),
            **({"on disk, two copies": self.disk} if self.disk else {}),
        }
        lines: list[Part] = [
            "estimated per device",
            Table(zip(terms, map(format_bytes, terms.values()), strict=True), left=1, indent=2),
        ]
        planned = f"planned: {format_bytes(self.planned_bytes)}"
        lines += ["", f"gathered per step: {format_bytes(self.gathered_bytes)} ({planned})"]
        lines += gathers_more(self.gathered_bytes, self.planned_bytes)
        if len(self.sent_by_axes) > 1:
            lines.append(f"sent per step: {', '.join(sent_over(self.sent_by_axes))}")
        if self.time is not None:
            lines += ["", f"time of a step: {self.time}"]
        if self.unknown_kernels:
            names = ", ".join(self.unknown_kernels)
            lines.append(f"kernels of unknown arithmetic, which count by their bytes: {names}")
        return [*lines, "", activation_table(self.activations)]


def sent_over(sent_by_axes: Mapping[str, int]) -> list[str]:
    """Returns what is sent over mesh axes, in words."""
    return [f"{format_bytes(num_bytes)} over {axes}" for axes, num_bytes in sent_by_axes.items()]


def gathers_more(gathered: int, planned: int) -> list[str]:
    """Returns a note if a step gathers more of the parameters than `plan.gathered_bytes` counts."""
    if not planned or gathered <= GATHERS_WORTH_A_NOTE * planned:
        return []
    return [
        f"The step gathers {gathered / planned:.2f} times what `plan.gathered_bytes` counts: a parameter is gathered "
        "once per use, and again where a `jax.checkpoint` around others, or around several uses, replays a forward "
        "pass. Put `jax.checkpoint` around single layers alone, or undo the loss's own by `remat=False`."
    ]


def activation_table(rows: Iterable[ActivationRow], max_rows: int = 12) -> Table:
    """Returns the table of activations by layer."""
    rows = list(rows)
    cells = [(row.layer, str(row.times), format_bytes(row.num_bytes / row.times), format_bytes(row.num_bytes))
             for row in rows[:max_rows]]  # fmt: skip
    rest = sum(row.num_bytes for row in rows[max_rows:])
    if rest:
        cells.append((f"{len(rows) - max_rows} more", "", "", format_bytes(rest)))
    total = ("total", "", "", format_bytes(sum(row.num_bytes for row in rows)))
    header = ("kept for the backward pass", "layers", "per layer", "in all")
    return Table([header, *cells, total], left=1)


def memory_of_step(
    step: TrainStep,
    arguments: tuple[State, PyTree, PyTree],
    hardware: Machine | None,
    traced: jax.stages.Traced | None = None,
) -> StepMemory:
    """Returns the memory of a step, given its state, batch and key; traces it, unless that was done."""
    state, batch, rng = arguments
    step = step.resolved(state, batch, rng=rng, hardware=hardware)
    traced = step.trace(state, batch, rng=rng) if traced is None else traced
    shapes = step.abstract_arguments(state, batch, rng=rng)
    plan: ZeroPlan = shapes[0].tx.plan
    gpu = _is_gpu(plan, hardware)
    return memory_of_trace(traced, shapes, plan, hardware, gpu=gpu, micro_batches=step.micro.steps)


def memory_of_trace(
    traced: jax.stages.Traced,
    arguments: PyTree,
    plan: ZeroPlan,
    hardware: Machine | None,
    *,
    gpu: bool,
    micro_batches: int,
) -> StepMemory:
    """Returns the memory of a traced step.

    Args:
      traced: The result of `step.trace(...)`.
      arguments: The result of `step.abstract_arguments(...)`.
      plan: The plan of the state.
      hardware: The machine, for its memory and the rates of its links.
      gpu: Whether XLA will compile for GPUs.
      micro_batches: The number of micro-batches per step.
    """
    opened, _ = compat.open_jaxpr(traced.jaxpr)
    leaves = jax.tree.leaves(arguments)
    shardings = [None] * (len(opened.invars) - len(leaves)) + [x.sharding for x in leaves]  # constants come first
    parts = [_num_parts(compat.type_of(v), sharding) for v, sharding in zip(opened.invars, shardings, strict=True)]
    program = trace_program(traced.jaxpr, parts, fuses_products=hardware is not None and hardware.kind == "tpu")
    num_bytes = sum(bytes_of(v.aval) // n for v, n in zip(opened.invars, parts, strict=True))
    if not plan.names_host_memory:  # then the trace counts the host's arrays as the device's
        num_bytes -= arrays_on_host(plan)
    limit = math.inf if hardware is None else GPU_SCHEDULER_SHARE * hardware.hbm_bytes - num_bytes
    temporaries = footprint(program, gpu=gpu, limit=limit)
    after = update_at_peak(plan, gpu=gpu, limit=limit)
    if sum(after.values()) > temporaries.peak:
        temporaries = dataclasses.replace(temporaries, peak=sum(after.values()), at_peak=after)
    plan = dataclasses.replace(plan, lookups=traced_lookups(traced.jaxpr, max(1, micro_batches)))
    sizes = plan.bytes_per_device
    traffic = [traffic_of(x, plan.mesh, hardware) for x in program.transfers]
    return StepMemory(
        params=sizes.params,
        grads=sizes.grads,
        opt_state=sizes.opt_state,
        other=num_bytes - sizes.params - sizes.opt_state,
        host=plan.host_bytes_per_device.total,
        disk=plan.disk_bytes_per_device,
        activations=_rows(temporaries.residuals),
        at_peak={str(kind): num_bytes for kind, num_bytes in temporaries.at_peak.items()},
        temporaries=temporaries.peak,
        gathered_bytes=sum(x.times * x.num_bytes for x in program.transfers if x.of_param)
        + plan.traffic.bytes_gathered_in(micro_batches=0),
        planned_bytes=plan.traffic.bytes_gathered_in(micro_batches=micro_batches),
        sent_by_axes=_by_axes(program.transfers, traffic, plan.mesh),
        nic_bytes=round(sum(x.port_bytes for x in traffic)),
        communication_seconds=None if hardware is None else sum(x.seconds for x in traffic),
        flops=program.flops,
        unknown_kernels=tuple(sorted({name for (name, _), found in program.kernels.items() if None in found})),
        time=None if hardware is None else step_time(program, traffic, hardware, micro_batches),
        course=temporaries.course,
    )


def arrays_on_host(plan: ZeroPlan) -> int:
    """Returns the bytes of one device's arrays in host memory."""
    return sum_bytes(plan.view.leaves, "host")


def _by_axes(transfers: Iterable[Transfer], traffic: Iterable[CollectiveTraffic], mesh: AnyMesh) -> dict[str, int]:
    sent = collections.Counter[str]()
    for x, of_x in zip(transfers, traffic, strict=True):
        sent["+".join(axis for axis in x.axes if mesh.shape.get(axis, 1) > 1)] += round(of_x.sent_bytes)
    return {axes: num_bytes for axes, num_bytes in sent.items() if num_bytes}


def _rows(residuals: Iterable[Buffer]) -> tuple[ActivationRow, ...]:
    sums: dict[tuple[str, int], int] = {}
    for x in residuals:
        key = (_layer(x.name), x.times)
        sums[key] = sums.get(key, 0) + x.num_bytes
    rows = [ActivationRow(layer, times, num_bytes) for (layer, times), num_bytes in sums.items() if num_bytes]
    return tuple(sorted(rows, key=lambda row: -row.num_bytes))


def _layer(name: str) -> str:
    """Returns a name stack without the wrappers of transformations and jzero's step, and the operation."""
    stack, _, operation = name.rpartition(":")
    stack = re.sub(r"\b(jvp|transpose|vmap|checkpoint|rematted_computation|pmap|jit)\b(?=\()", "", stack)
    parts = [part for part in re.sub(r"[()]", "", stack).split("/") if part not in ("", "zero_compute")]
    return f"{'/'.join(parts) or '(no name)'}: {operation}"


def _num_parts(aval: jax.core.ShapedArray, sharding: jax.sharding.Sharding | None) -> int:
    if not isinstance(sharding, NamedSharding) or not aval.shape:
        return 1
    names = [n for n in jax.tree.leaves(tuple(sharding.spec)) if isinstance(n, str)]
    return math.prod(int(sharding.mesh.shape[n]) for n in names)


def _is_gpu(plan: ZeroPlan, hardware: Machine | None) -> bool:
    if hardware is not None:
        return hardware.kind == "gpu"
    return isinstance(plan.mesh, Mesh) and platform_of(plan.mesh.devices.flat[0]) == "gpu"
