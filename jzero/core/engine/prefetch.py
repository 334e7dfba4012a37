"""Chooses the parameters that a loop gathers one turn ahead; a turn is one iteration.

    choose_prefetched(gathers, length, limit) -> dict[int, DType]

A turn gathers the next row of these stacks beside its computation, each in its dtype.

[Note: Gathering one turn ahead]
If each turn of a loop over layers gathers its own parameters, only the compiler can overlap gathers and computation,
and compilers do not move a gather into the turn before. So the loop carries whole parameters of this turn, and gathers
those of the next beside the computation. The last turn gathers parameters that nothing uses. It stays in the loop all
the same: compilers would lay out the activations of a separate last turn differently, and copy stacks of them. To limit
the waste, a turn gathers ahead so little that the last turn wastes at most a 32nd of all gathers of the loop. That is
enough: only the first parameters of a turn have nothing to hide behind, and the turn itself hides the gathers of the
others. Without a given bound, programs for GPUs gather a third of a turn's parameters ahead.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence

from jzero.core.base.types import DType
from jzero.core.engine.lazy import ShardedParam, num_bytes

MOST_IN_VAIN = 1 / 32
"""Upper bound on the wasted gathers of the last turn, as a share of all gathers of the loop."""


def choose_prefetched(
    gathers: Mapping[int, tuple[ShardedParam, DType]], length: int, limit: int | None
) -> dict[int, DType]:
    """Returns the stacks to gather one turn ahead, by number, with the dtype of each gather.

    The stacks that a turn uses first come first: they have the least computation to hide behind.

    Args:
      gathers: Those of a turn, in their order: by number, the stack and the dtype of the gather.
      length: The number of turns.
      limit: Most bytes to gather ahead, counted in whole parameters and the dtypes of their gathers; `None`: a third
        of a turn's gathers, or its first parameter if that is larger.
    """
    # Counted in the dtype that travels, which may be narrower than the stack's.
    sizes = {
        j: num_bytes([dataclasses.replace(stack, cut=stack.cut.drop_leading(), wire_dtype=dtype)])  # [D, F], whole
        for j, (stack, dtype) in gathers.items()
    }
    total = sum(sizes.values())  # bytes of one turn's gathers
    bound = max([total // 3, *list(sizes.values())[:1]]) if limit is None else limit
    spare = min(bound, int(total * length * MOST_IN_VAIN))  # the last turn gathers in vain
    chosen = {}
    for j, size in sizes.items():
        if size <= spare:  # a later, smaller one may still fit
            spare -= size
            chosen[j] = gathers[j][1]
    # A bound that the user did not give needs no warning; 0 asks for no gather ahead.
    if limit and sizes and not chosen:
        _warn_of_no_effect([*sizes.values()], limit, length)
    return chosen


def _warn_of_no_effect(sizes: Sequence[int], limit: int, length: int) -> None:
    smallest, total = min(sizes), sum(sizes)
    if limit < smallest:
        why = f"its smallest parameter to gather has {smallest} bytes. Give so many or more"
    else:
        why = (
            f"its {length} turns may gather {int(total * length * MOST_IN_VAIN)} bytes ahead, a 32nd of all that they "
            f"gather, since the last does so in vain, and its smallest parameter has {smallest}. Scan "
            f"{math.ceil(smallest / total / MOST_IN_VAIN)} layers or more, or call them one by one"
        )
    warnings.warn(f"`prefetch_bytes={limit}` has no effect on a scan in the loss: {why}.", stacklevel=2)
