"""The time of a traced step on a machine, estimated without a compiler.

    step_time(program, traffic, machine, micro_batches) -> StepTime

[Note: How time is estimated]
Rates are those of [Note: The model of the machine], for the operations of the trace instead of a compiled schedule. A
product takes its operations at the peak of its dtype or its bytes at the bandwidth of the device's memory, whichever is
longer; anything else its bytes. Readers of a fused value read its inputs. A reduction is fused, too, if its readers
also read its input, as in a softmax of which no parts are saved, and its gradient; what would be written for it alone,
such as exponentials, is not written then. On GPUs, those of a softmax's gradient are only if its rows fill the tiles of
a kernel. Results of a loop are copied into their stacks. Of a conditional in the loss the shortest branch counts, see
[Note: A usual step]; of one in the update the largest.

The passes hide the shorter of computation and communication behind the longer one, but not all of it: nothing overlaps
the first gather and the last reduction of a micro-batch, or what is reduced once after several micro-batches; and
layers differ. The update waits for the norm of all gradients, and new parameters are gathered during it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jzero.core.base.text import format_number
from jzero.core.base.types import DType
from jzero.core.layout.mesh import AnyMesh
from jzero.core.layout.route import bytes_on_port, sent_bytes
from jzero.estimate.buffers import NOTHING, UPDATE, BufferOperation, TracedProgram, Transfer
from jzero.machines.machine import Machine, rate_of

EXPOSED = 0.5
"""The exposed share of the shorter of computation and communication, if both take equally long."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The estimated seconds of a training step on one device.

    Attributes:
      compute: The device's own work, the update included.
      update: The part of it that belongs to the update.
      communication: Collectives of the forward and backward pass.
      after_update: Those of the update, most of all the gathers of new parameters; only the update hides them.
      seconds: The whole step.
    """

    compute: float
    update: float
    communication: float
    after_update: float
    seconds: float

    def __str__(self) -> str:
        seconds = self.seconds, self.compute, self.communication, self.after_update
        step, compute, communication, update = (format_number(1e3 * x, 3) for x in seconds)
        after = f", that of the update {update}" if self.after_update > 1e-3 * self.seconds else ""
        return f"{step} ms (by themselves: computation {compute}, communication {communication}{after})"


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """What a collective sends in all its runs.

    Attributes:
      sent_bytes: What one device sends in rings.
      port_bytes: The part of it on the network port of one device; 0 on one node, or without a machine.
      seconds: The time that it takes if nothing else slows it; 0 without a machine.
    """

    sent_bytes: float
    port_bytes: float = 0.0
    seconds: float = 0.0


def step_time(
    program: TracedProgram, traffic: Sequence[CollectiveTraffic], machine: Machine, micro_batches: int
) -> StepTime:
    """Returns the time of a step; see [Note: How time is estimated].

    Args:
      program: From `trace_program`.
      traffic: What each of its transfers sends.
      machine: The machine.
      micro_batches: The number of micro-batches per step.
    """
    compute, update = compute_seconds(program, machine), _update_seconds(program, machine)
    after = sum(x.seconds for t, x in zip(program.transfers, traffic, strict=True) if UPDATE in t.scope)
    communication = sum(x.seconds for x in traffic) - after
    longer, shorter = max(compute - update, communication), min(compute - update, communication)
    exposed = _exposed_at_ends(program, traffic, micro_batches)
    exposed = min(communication, exposed + (EXPOSED * shorter**2 / longer if longer else 0.0))
    return StepTime(compute, update, communication, after, longer + exposed + max(update, after))


def _exposed_at_ends(program: TracedProgram, traffic: Sequence[CollectiveTraffic], micro_batches: int) -> float:
    """Returns the seconds of collectives that nothing overlaps: each micro-batch's first gather and last reduction.

    With several micro-batches, also of those that run once after them.
    """
    passes = [(t, x.seconds) for t, x in zip(program.transfers, traffic, strict=True) if UPDATE not in t.scope]
    after_all = [seconds for t, seconds in passes if t.times < micro_batches]
    gathers = [(t, seconds) for t, seconds in passes if t.of_param]
    cut = [(t, seconds) for t, seconds in passes if t.kind == "reduce-scatter" and t.times >= micro_batches]
    ends = [min(1, micro_batches / t.times) * seconds for t, seconds in (*gathers[:1], *cut[-1:])]
    return sum(after_all) + sum(ends)


def traffic_of(x: Transfer, mesh: AnyMesh, machine: Machine | None) -> CollectiveTraffic:
    """Returns what a collective along axes of a mesh sends in a step."""
    size = math.prod(int(mesh.shape[axis]) for axis in x.axes if axis in mesh.shape)
    sent = x.times * sent_bytes(x.kind, x.num_bytes, size)
    if machine is None:
        return CollectiveTraffic(sent)
    on_port = _bytes_on_port(x, sent, mesh, machine.devices_per_node)
    network = machine.inter_link_bytes_per_s or math.inf
    return CollectiveTraffic(sent, on_port, max(sent / machine.intra_link_bytes_per_s, on_port / network))


def _bytes_on_port(x: Transfer, sent: float, mesh: AnyMesh, devices_per_node: int) -> float:
    """Returns the bytes that one network port sends for a collective along mesh axes."""
    sizes = {str(name): int(size) for name, size in mesh.shape.items()}
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    group = grid[tuple(slice(None) if name in x.axes else 0 for name in sizes)].ravel()
    return bytes_on_port(x.kind, sent, len(group), len({int(i) // devices_per_node for i in group}))


def compute_seconds(program: TracedProgram, machine: Machine) -> float:
    """Returns the seconds of a program's own work, without collectives."""
    fused = _find_fused(program)
    seconds = sum(_operation_seconds(x, machine) for t, x in enumerate(program.operations) if t not in fused)
    return seconds + program.result_bytes / machine.hbm_bytes_per_s


def _update_seconds(program: TracedProgram, machine: Machine) -> float:
    """Returns the seconds of the update, which writes a step's results."""
    operations = [x for x in program.operations if any(UPDATE in program.buffers[i].name for i in x.writes)]
    return sum(_operation_seconds(x, machine) for x in operations) + program.result_bytes / machine.hbm_bytes_per_s


def _find_fused(program: TracedProgram) -> set[int]:
    """Returns the reductions that are fused with their readers, and what is written for them alone, which is not.

    What the other pass reads, or an operation that is no fusion, is stored all the same.
    """
    operations = program.operations
    pass_of = {i: x.backward for x in operations for i in x.writes}
    is_fusion = [x.inner is None and (x.in_place or x.reduces) for x in operations]
    stored = program.outputs.union(
        i for x, fuses in zip(operations, is_fusion, strict=True) for i in x.reads
        if not fuses or pass_of.get(i) == (not x.backward)
    )  # fmt: skip
    reductions = {t for _, x in program.normalizations() for t in x.reductions}
    fused = {t for t in reductions if stored.isdisjoint(operations[t].writes)}
    read = NOTHING.union(*(operations[t].reads for t in fused)) - stored
    return fused | {t for t, x in enumerate(operations) if is_fusion[t] and x.writes and read.issuperset(x.writes)}


def _operation_seconds(x: BufferOperation, machine: Machine) -> float:
    if x.inner is not None:
        return x.times * min(compute_seconds(body, machine) for body in x.branches or (x.inner,))
    moved = x.num_bytes / machine.hbm_bytes_per_s
    if x.product is None:
        return moved
    return max(moved, x.product.flops / rate_of(machine, hlo_name(x.product.dtype), x.product.highest))


def hlo_name(dtype: DType) -> str:
    """Returns HLO's name of a dtype, such as `bf16`, `f8e4m3fn` or `s8`."""
    return str(np.dtype(dtype)).replace("float", "f").replace("int", "s").replace("_", "")
