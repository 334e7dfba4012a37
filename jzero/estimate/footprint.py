"""Computes the memory of a traced program on one device: each buffer counts from its write to its last use.

[Note: Postponed gradients]
A weight's gradient has no reader in the rest of the backward pass. The operation that makes it is a product, or a
reduction, such as that of the cotangents of a bias that all layers add to their scores. XLA's scheduler for GPUs goes
from the results back to the arguments, so it runs such operations late, and their operands stay in memory until then:
before the next barrier if a later part of the backward pass waits for the gradient, else after the backward pass.
In loops, that for TPUs does so, too: the gradients of a layer's weights wait until all of its layer is done.

If an update is a program of its own, `estimate_step_memory` takes the larger of its peak (`update_at_peak`) and that of
loss and gradients, whose program ends before. All reduced gradients are on the device, and the shards of new
parameters. Beside them either records pass through, or parameters that every device stores unsharded are gathered.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jzero.core.jaxpr.sizes import itemsize
from jzero.core.plan.plan import ZeroPlan
from jzero.estimate.buffers import NOTHING, Buffer, BufferKind, BufferOperation, TracedProgram


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A program's memory on one device, without its arguments.

    Attributes:
      peak: The peak in bytes.
      at_peak: The bytes at the peak, by purpose.
      residuals: The buffers that the forward pass saves for the backward pass.
      course: The bytes at each operation, by purpose; of a loop, those of one iteration.
    """

    peak: int
    at_peak: Mapping[BufferKind, int]
    residuals: tuple[Buffer, ...]
    course: tuple[Mapping[BufferKind, int], ...] = ()


def footprint(program: TracedProgram, *, gpu: bool, limit: float = math.inf, in_loop: bool = False) -> Footprint:
    """Returns a program's memory; see [Note: How memory is estimated].

    Args:
      program: From `trace_program`.
      gpu: Whether XLA compiles for GPUs, where it delays reductions of gradients.
      limit: The bytes that its scheduler plans with.
      in_loop: Whether it is the body of a loop or branch.
    """
    program = postpone_gradients(program) if gpu or in_loop else program
    inner = {t: op.inner for t, op in enumerate(program.operations) if op.inner is not None}
    bodies = {t: footprint(body, gpu=gpu, in_loop=True) for t, body in inner.items()}
    last = _last_uses(program, gpu=gpu)
    residuals = _find_residuals(program, last)
    kinds: list[BufferKind] = ["activations" if i in residuals else x.kind for i, x in enumerate(program.buffers)]
    sizes = [x.num_bytes for x in program.buffers]
    for i in () if gpu else program.regathered:
        sizes[i] = 0
    # A backward loop reduces the gradients of one iteration during the next.
    reduced = {t: _reduced_bytes(body) for t, body in _reducing_loops(program)} if gpu else {}

    normalized = {t: x.buffers for t, x in program.normalizations()} if gpu else {}
    ends: dict[int, list[int]] = {}
    for i, t in last.items():
        ends.setdefault(t, []).append(i)
    live: set[int] = set()
    held = _no_bytes()  # of what is live
    best, at_peak = -1, _no_bytes()
    course: list[Mapping[BufferKind, int]] = []
    for t, op in enumerate(program.operations):
        reused = _find_reused(op, live - normalized.get(t, NOTHING), sizes, last, t) if op.in_place else set()
        for i in reused:
            held[kinds[i]] -= sizes[i]
        live -= reused
        for i in set(op.writes) - live:
            held[kinds[i]] += sizes[i]
        live.update(op.writes)
        in_use = {**held, "working": held["working"] + reduced.get(t, 0)}
        inside = bodies[t].course if t in bodies else (_no_bytes(),)
        course += [{kind: in_use[kind] + x[kind] for kind in in_use} for x in inside]
        for kind, num_bytes in bodies[t].at_peak.items() if t in bodies else ():
            in_use[kind] += num_bytes
        if sum(in_use.values()) >= best:
            best, at_peak = sum(in_use.values()), in_use
        unread = (i for i in op.writes if last.get(i, -1) <= t)
        dead = live.intersection((*ends.get(t, ()), *unread))
        for i in dead:
            held[kinds[i]] -= sizes[i]
        live -= dead
    regathered = regathered_bytes([sizes[i] for i in program.regathered], limit)
    if regathered > best:
        at_peak = {**_no_bytes(), "gathered": regathered}
    within = [x for t, body in bodies.items() if not program.operations[t].backward for x in body.residuals]
    saved = (*(program.buffers[i] for i in sorted(residuals)), *within)
    return Footprint(sum(at_peak.values()), at_peak, saved, tuple(course))


def regathered_bytes(sizes: list[int], limit: float) -> int:
    """Returns the bytes gathered at the end of a step: together, or one by one if all would exceed the limit."""
    together = sum(sizes)
    return together if together <= limit else max(sizes, default=0)


def _no_bytes() -> dict[BufferKind, int]:
    return {"activations": 0, "gradients": 0, "gathered": 0, "working": 0}


def _last_uses(program: TracedProgram, *, gpu: bool) -> dict[int, int]:
    """Returns the last operation that reads each buffer."""
    operations = program.operations
    last = {i: t for t, op in enumerate(operations) for i in op.reads}
    last.update(dict.fromkeys(program.outputs, len(operations)))
    if not gpu:
        end = max((t for t, op in enumerate(operations) if op.backward), default=0)
        last.update({i: max(last[i], end) for op in _run_last(operations) for i in op.reads})
    # Gradients completed before a backward loop live until after it.
    loop = max((t for t, _ in _reducing_loops(program)), default=0)
    for op in operations[:loop]:
        if op.is_transfer and op.backward and not op.gathers:
            last.update({i: max(last[i], loop) for i in op.reads})
    return last


def _run_last(operations: Sequence[BufferOperation]) -> Iterator[BufferOperation]:
    """Yields the loops of the forward pass that no operation of the backward pass needs."""
    start = next((t for t, op in enumerate(operations) if op.backward), 0)
    needed: set[int] = set()
    for t, op in reversed([*enumerate(operations)]):
        if op.backward or not needed.isdisjoint(op.writes):
            needed |= op.reads
        elif t < start and op.inner is not None:
            yield op


def _find_reused(op: BufferOperation, live: set[int], sizes: list[int], last: Mapping[int, int], t: int) -> set[int]:
    """Returns the buffers that an operation reads last and whose memory its outputs of equal size take over."""
    dying = [i for i in op.reads if i in live and last[i] <= t]
    reused: set[int] = set()
    for i in op.writes:
        match = next((j for j in dying if j not in reused and sizes[j] == sizes[i]), None)
        if match is not None:
            reused.add(match)
    return reused


def _find_residuals(program: TracedProgram, last: Mapping[int, int]) -> set[int]:
    """Returns the buffers that the forward pass writes and the backward pass reads."""
    operations = program.operations
    start = next((t for t, op in enumerate(operations) if op.backward), len(operations))
    return {
        i
        for op in operations[:start]
        for i in op.writes
        if start <= last.get(i, -1) < len(operations) and program.buffers[i].kind == "working"
    }


def _reducing_loops(program: TracedProgram) -> Iterator[tuple[int, TracedProgram]]:
    """Yields the backward loops that reduce gradients: each one's position and body."""
    for t, op in enumerate(program.operations):
        if op.inner is not None and op.backward and _reduced_bytes(op.inner):
            yield t, op.inner


def _reduced_bytes(body: TracedProgram) -> int:
    return sum(x.num_bytes for x in body.transfers if x.kind == "reduce-scatter")


def postpone_gradients(program: TracedProgram) -> TracedProgram:
    """Returns one body of code that makes gradients as late as it may, see [Note: Postponed gradients]."""
    operations, end = program.operations, len(program.operations)
    starts = [x.start for x in program.barriers]
    awaited = {t for x in program.barriers for t in x}  # barriers, and what they wait for
    place: list[float] = [*range(end), end]
    reader: dict[int, int] = {}  # of each buffer, the first operation that reads it
    for t in reversed(range(end)):
        op = operations[t]
        if op.backward and op.may_wait:
            first = min((reader.get(i, end) for i in op.writes), key=place.__getitem__)
            place[t] = place[first] - 0.5
            following = bisect.bisect_right(starts, t)
            if first in awaited and following < len(starts):
                awaited.add(t)
                place[t] = min(place[t], starts[following] - 0.5)
        for i in op.reads:
            if place[t] < place[reader.get(i, end)]:
                reader[i] = t
    late = copy.copy(program)
    late.operations = [operations[t] for t in sorted(range(end), key=place.__getitem__)]
    return late


def update_at_peak(plan: ZeroPlan, *, gpu: bool, limit: float) -> Mapping[BufferKind, int]:
    """Returns the bytes at the peak of an update on records, by purpose; none if the step updates all by itself.

    Args:
      plan: The plan.
      gpu: Whether XLA compiles for GPUs, where it gathers new parameters together.
      limit: The bytes that its scheduler plans with.
    """
    if not plan.has_records:
        return {}
    on_device = [leaf.grad for leaf in plan.leaves if leaf.trained and leaf.param.memory != "host"]
    grads = sum(leaf.bytes_per_device for leaf in on_device)
    new = sum(math.prod(plan.leaves[i].grad.part_shape) * _result_bytes(plan, i) for i in plan.record_fields)
    unsharded = [leaf.param for leaf in plan.leaves if leaf.trained and not leaf.param.cut and leaf.grad.cut]
    sizes = [leaf.bytes_per_device for leaf in unsharded] if gpu else []
    gathered, moving = regathered_bytes(sizes, limit), _moving_bytes(plan)
    return {
        "activations": 0,
        "gradients": grads,
        "gathered": gathered if gathered > moving else 0,
        "working": new + (0 if gathered > moving else moving),
    }


def _moving_bytes(plan: ZeroPlan) -> int:
    """Returns the bytes of the records that pass through a device at a time."""
    offload = plan.config.offload
    if offload.compute == "host":
        return 0
    sizes = []
    for i, fields in plan.record_fields.items():
        leaf = plan.leaves[i]
        # Fields pass both ways; the gradient, and a parameter without a master, come in; the new parameter goes out.
        read = itemsize(leaf.grad.dtype) + (0 if leaf.master else itemsize(leaf.param.dtype))
        per_element = 2 * sum(itemsize(x.dtype) for x in fields) + read + _result_bytes(plan, i)
        sizes.append(per_element * max(record.size for record in plan.record_boxes(i)))
    return (2 * offload.disk_threads + 1) * max(sizes, default=0)


def _result_bytes(plan: ZeroPlan, i: int) -> int:
    """Returns the bytes of an element of a new parameter; one on the host is never complete on the device."""
    leaf = plan.leaves[i].param
    return 0 if leaf.memory == "host" else itemsize(leaf.dtype)
