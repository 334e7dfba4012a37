"""Which parameters a loop gathers one turn ahead.

In: what a turn gathers, in its order, and how many turns there are. Out: the stacks whose next row a turn gathers
beside its computation, and the dtype that travels.

[Note: Gathering one turn ahead]
A loop over layers that gathers where it computes leaves it to the compiler to overlap the two, and compilers do not
move a gather from one turn into the one before. Here the loop says so itself: it carries whole parameters of this turn
and gathers those of the next beside the computation. The last turn gathers some that nothing uses: were it to stand
after the loop, compilers would lay out its activations otherwise and copy stacks of them. Hence at most a 32nd of what
the loop gathers is gathered ahead. That is enough: the first parameters of a turn have nothing to hide behind, the
others have the turn itself. Where no bound is given, programs for GPUs do so with a third of a turn's.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.engine.lazy import Lazy, num_bytes

__all__ = ["MOST_IN_VAIN", "chosen_ahead"]

MOST_IN_VAIN = 1 / 32
"""The most that a loop gathers in vain in its last turn, as a share of all that it gathers."""


def chosen_ahead(found: Mapping[int, tuple[Lazy, Any]], length: int, limit: int | None) -> dict[int, Any]:
    """Returns which stacks are gathered one turn ahead, and the dtype in which.

    Those that a turn uses first come first: they have the least computation to hide behind.

    Args:
      found: What a turn gathers, in its order: by number the stack, and the dtype that travels.
      length: The number of turns.
      limit: The most, in bytes of whole parameters as they travel, that may be gathered ahead; `None`: a third of what
        a turn gathers, or its first parameter if that is more.
    """
    sizes = {
        j: num_bytes([dataclasses.replace(stack, cut=stack.cut.drop_leading(), wire_dtype=dtype)])
        for j, (stack, dtype) in found.items()
    }
    total = sum(sizes.values())
    bound = max([total // 3, *list(sizes.values())[:1]]) if limit is None else limit
    left = min(bound, int(total * length * MOST_IN_VAIN))
    chosen = {}
    for j, size in sizes.items():
        if size <= left:
            left -= size
            chosen[j] = found[j][1]
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
