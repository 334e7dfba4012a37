"""Where records on disk lie in the arrays of a checkpoint.

In: rectangles of an array as it is stored, with padding and perhaps flattened. Out: rectangles of the natural array,
and back; and the chunks in which a natural array is written, so that each takes few records.

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

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from jzero.layout.leaves import StateLeaf
from jzero.layout.records import Rectangle, rectangles
from jzero.plan.plan import ZeroPlan


class Piece(NamedTuple):
    """A rectangle of a natural array, and its place in a rectangle of the stored one."""

    natural: Rectangle
    inside: tuple[slice, ...]


def is_streamed(leaf: StateLeaf) -> bool:
    """Whether records of a leaf are written as they are, see [Note: Chunks of records]."""
    return jax.process_count() == 1 or leaf.cut is None or not leaf.cut.flat


def chunk_shape(plan: ZeroPlan, i: int) -> tuple[int, ...]:
    """Returns the shape of the chunks of all that is on disk of a parameter, see [Note: Chunks of records]."""
    leaf = plan.leaves[i].grad
    part, record = leaf.part_shape, plan.rectangles_of(i)[0].shape
    if leaf.cut is not None and leaf.cut.flat:
        dim = leaf.cut.dim
        return (*record[:dim], *rectangles(leaf.shape[dim:], 1, record[leaf.cut.stored_dim])[0].shape)
    several = jax.process_count() > 1
    return tuple(
        _largest_divisor(rows, most) if several and rows < stored else min(most, natural)
        for rows, most, stored, natural in zip(part, record, leaf.stored_shape, leaf.shape, strict=True)
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if number % n == 0)


def chunks_of(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Rectangle]:
    """Yields the chunks of an array in their order, those at its end cut off."""
    for start in itertools.product(*(range(0, n, step) for n, step in zip(shape, chunk, strict=True))):
        yield Rectangle(start, tuple(min(step, n - a) for a, step, n in zip(start, chunk, shape, strict=True)))


def in_stored(place: Rectangle, leaf: StateLeaf) -> Rectangle:
    """Returns the rectangle of the stored array that holds a chunk of the natural one."""
    if leaf.cut is None or not leaf.cut.flat:
        return place
    dim, inner = leaf.cut.dim, leaf.shape[leaf.cut.dim :]
    first = sum(a * math.prod(inner[d + 1 :]) for d, a in enumerate(place.start[dim:]))
    before = len(inner) - 1
    shape = (*place.shape[:dim], *[1] * before, math.prod(place.shape[dim:]))
    return Rectangle((*place.start[:dim], *[0] * before, first), shape)


def in_natural(place: Rectangle, leaf: StateLeaf) -> list[Piece]:
    """Returns the rectangles of the natural array that a rectangle of the stored one holds; padding has none."""
    cut = leaf.cut
    if cut is None:
        return [Piece(place, tuple(slice(0, n) for n in place.shape))]
    first = place.start[cut.stored_dim]
    stop = min(first + place.shape[cut.stored_dim], cut.natural_size)
    inner = leaf.shape[cut.dim :] if cut.flat else (cut.natural_size,)
    tail = slice(cut.stored_dim + 1, None)
    pieces, done = [], 0
    for rectangle in _ranges(first, stop, inner):
        start = (*place.start[: cut.dim], *rectangle.start, *place.start[tail])
        shape = (*place.shape[: cut.dim], *rectangle.shape, *place.shape[tail])
        inside = [slice(0, n) for n in place.shape]
        inside[cut.stored_dim] = slice(done, done + rectangle.size)
        pieces.append(Piece(Rectangle(start, shape), tuple(inside)))
        done += rectangle.size
    return pieces


def _ranges(first: int, stop: int, shape: Sequence[int]) -> list[Rectangle]:
    """Returns the rectangles, in order, that a range of the elements of an array consists of."""
    if first >= stop:
        return []
    per_row = math.prod(shape[1:])
    if per_row == 1:
        return [Rectangle((first, *(0 for _ in shape[1:])), (stop - first, *shape[1:]))]

    def in_row(row: int, a: int, b: int) -> list[Rectangle]:
        return [Rectangle((row, *x.start), (1, *x.shape)) for x in _ranges(a, b, shape[1:])]

    (row, begin), (last, end) = divmod(first, per_row), divmod(stop, per_row)
    if row == last:
        return in_row(row, begin, end)
    head = in_row(row, begin, per_row) if begin else []
    next_row = row + bool(begin)
    rows = [Rectangle((next_row, *(0 for _ in shape[1:])), (last - next_row, *shape[1:]))] if next_row < last else []
    return [*head, *rows, *in_row(last, 0, end)]


def overlap(a: Rectangle, b: Rectangle) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Returns where two rectangles overlap, as they do, seen from the first and from the second."""
    starts = [max(x, y) for x, y in zip(a.start, b.start, strict=True)]
    stops = [min(x + m, y + n) for x, m, y, n in zip(a.start, a.shape, b.start, b.shape, strict=True)]
    slices = [
        tuple(slice(p - origin, q - origin) for p, q, origin in zip(starts, stops, x.start, strict=True))
        for x in (a, b)
    ]
    return slices[0], slices[1]
