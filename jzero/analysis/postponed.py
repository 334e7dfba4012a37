"""The order in which compilers for GPUs run a traced program.

[Note: Postponed products]
A product that makes the gradient of a weight is read by nothing in the backward pass. XLA's scheduler for GPUs starts
from the results and goes back, so such products come as late as possible: before the next barrier, or before their
first reader. Their operands stay in memory until then. Reductions of gradients move with them.
"""

from __future__ import annotations

import bisect
import copy

from jzero.analysis.traced import Operation, TracedProgram

__all__ = ["postpone_products"]


def postpone_products(program: TracedProgram) -> TracedProgram:
    """Returns a program whose backward products run as late as they may, see [Note: Postponed products].

    Args:
      program: One body of code.
    """
    operations = program.operations
    place: dict[int, float] = {}
    first_read: dict[int, float] = {}
    for t in range(len(operations) - 1, -1, -1):
        op = operations[t]
        place[t] = t
        if _may_wait(op):
            nearest = min((first_read.get(i, len(operations)) for i in op.writes), default=t)
            barrier = bisect.bisect_left(program.barriers, t + 1)
            if barrier < len(program.barriers):
                nearest = min(nearest, program.barriers[barrier])
            place[t] = max(t, nearest - 0.5)
        for i in op.reads:
            first_read[i] = min(place[t], first_read.get(i, len(operations)))
    order = sorted(range(len(operations)), key=lambda t: (place[t], t))
    late = copy.copy(program)
    late.operations = [operations[t] for t in order]
    return late


def _may_wait(op: Operation) -> bool:
    return op.backward and (op.is_product or (op.is_transfer and not op.gathers))
