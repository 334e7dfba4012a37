"""Where records on disk lie in the arrays of a checkpoint.

    in_natural(place, leaf) -> list[PlacedBox]

Stored arrays have padding and may be flattened; `in_stored` goes the other way. `chunk_shape` gives the chunks in which
a natural array is written, so that each takes few records.

[Note: Chunks of records]
A chunk of a checkpoint is what one write makes, and what a reader must decode at once. So it should be a record, or as
large, and no two processes may write to one. Chunks form a regular grid from the array's first element; records begin
anew in each device's part, and the part of a flattened leaf may begin in the middle of a row. With one process, chunks
have the shape of a record (for a flattened leaf: as many whole rows of the natural array as a record has elements for),
and one that crosses the border of two records is put together from both. With several, the length of a chunk divides
that of a part. The part of a flattened leaf has no such chunks: the leaf is then brought to memory and cut along one
dimension, as in a state that has all in memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jzero.core.layout.box import Box, Index, record_boxes, runs
from jzero.core.layout.leaves import StateLeaf
from jzero.core.plan.plan import ZeroPlan


class PlacedBox(NamedTuple):
    """A box of a natural array, and its place in a box of the stored one."""

    natural: Box
    inside: Index


def is_streamed(leaf: StateLeaf) -> bool:
    """Whether records of a leaf are written as they are, see [Note: Chunks of records]."""
    return jax.process_count() == 1 or leaf.cut is None or not leaf.cut.flat


def chunk_shape(plan: ZeroPlan, i: int) -> tuple[int, ...]:
    """Returns the shape of the chunks of all that is on disk of a parameter, see [Note: Chunks of records]."""
    leaf = plan.leaves[i].grad
    part, record = leaf.part_shape, plan.record_boxes(i)[0].shape
    if leaf.cut is not None and leaf.cut.flat:
        dim = leaf.cut.dim
        return (*record[:dim], *record_boxes(leaf.shape[dim:], 1, record[leaf.cut.stored_dim])[0].shape)
    several = jax.process_count() > 1
    return tuple(
        _largest_divisor(rows, most) if several and rows < stored else min(most, natural)
        for rows, most, stored, natural in zip(part, record, leaf.stored_shape, leaf.shape, strict=True)
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if number % n == 0)


def in_stored(place: Box, leaf: StateLeaf) -> Box:
    """Returns the box of the stored array that holds a chunk of the natural one."""
    if leaf.cut is None or not leaf.cut.flat:
        return place
    dim, inner = leaf.cut.dim, leaf.shape[leaf.cut.dim :]
    first = sum(a * math.prod(inner[d + 1 :]) for d, a in enumerate(place.start[dim:]))
    before = len(inner) - 1
    shape = (*place.shape[:dim], *[1] * before, math.prod(place.shape[dim:]))
    return Box((*place.start[:dim], *[0] * before, first), shape)


def in_natural(place: Box, leaf: StateLeaf) -> list[PlacedBox]:
    """Returns the boxes of the natural array that a box of the stored one holds; padding has none."""
    cut = leaf.cut
    if cut is None:
        return [PlacedBox(place, Box.whole(place.shape).slices)]
    first = place.start[cut.stored_dim]
    stop = min(first + place.shape[cut.stored_dim], cut.natural_size)
    inner = leaf.shape[cut.dim :] if cut.flat else (cut.natural_size,)
    tail = slice(cut.stored_dim + 1, None)
    pieces, done = [], 0
    for box in runs(first, stop, inner):
        start = (*place.start[: cut.dim], *box.start, *place.start[tail])
        shape = (*place.shape[: cut.dim], *box.shape, *place.shape[tail])
        inside = [*Box.whole(place.shape).slices]
        inside[cut.stored_dim] = slice(done, done + box.size)
        pieces.append(PlacedBox(Box(start, shape), tuple(inside)))
        done += box.size
    return pieces
