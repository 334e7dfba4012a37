"""The order in which compilers for GPUs run a traced program.

[Note: Postponed gradients]
A weight's gradient has no reader in the rest of the backward pass. The operation that makes it is a product, or a
reduction, such as that of the cotangents of a bias that all layers add to their scores. XLA's scheduler for GPUs goes
from the results back to the arguments, so it runs such operations late, and their operands stay in memory until then:
before the next barrier if a later part of the backward pass waits for the gradient, else after the backward pass.
"""

from __future__ import annotations

import bisect
import copy

from jzero.estimate.buffers import TracedProgram


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
