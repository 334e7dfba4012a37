"""Boxes of arrays: intersections, places inside of each other, splits, and what reshapes make of them.

[Note: Boxes]
Whatever takes a part of an array names it by a `Box`: a shard with its padding, a record, a chunk of a checkpoint, a
section of a tensor in a file. A *natural* array ends where its padding begins, so what a shard holds of it is
`shard & Box.whole(natural)`, and where that lies in the shard is `.within(shard)`.

A *record* holds one box of one device's part of a parameter: its fields (master, moments), one after the other, each
padded to whole pages, so that one request reads or writes it. Its elements are consecutive in the part.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero.core.base.types import DType
from jzero.core.disk.files import PAGE

Index = tuple[slice, ...]


class Box(NamedTuple):
    """A contiguous range of an array along each dimension.

    Attributes:
      start: Index of its first element, per dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns all of an array."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of(cls, index: Index, shape: Sequence[int]) -> Box:
        """Returns the box of an index of slices, which may leave bounds out, into an array of a shape."""
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        return cls(tuple(a for a, _ in bounds), tuple(max(b - a, 0) for a, b in bounds))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """Index behind its last element, per dimension."""
        return tuple(map(operator.add, self.start, self.shape))

    @property
    def slices(self) -> Index:
        """Its place in the array."""
        return tuple(map(slice, self.start, self.stop))

    def take(self, x: np.ndarray) -> np.ndarray:
        """Returns its elements of an array, as a view."""
        index: Any = (*self.slices, ...)  # which makes a view of an array without dimensions, too
        return x[index]

    def __and__(self, other: Box) -> Box | None:
        """Returns what two boxes of one array have in common; `None` if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(map(operator.sub, map(min, self.stop, other.stop), start))
        return Box(start, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Box) -> Box:
        """Returns the same elements, counted from the start of another box."""
        return Box(tuple(map(operator.sub, self.start, outer.start)), self.shape)

    def beyond(self, start: Sequence[int]) -> Box:
        """Returns the same elements, if this box was counted from `start`: the reverse of `within`."""
        return Box(tuple(map(operator.add, self.start, start)), self.shape)

    def transposed(self, order: Sequence[int]) -> Box:
        """Returns the box in the array's transpose."""
        return Box(tuple(self.start[d] for d in order), tuple(self.shape[d] for d in order))

    def split(self, chunk: Sequence[int]) -> Iterator[Box]:
        """Yields chunks of a shape, those at its end cut off, in order."""
        for start in itertools.product(*(range(0, n, step) for n, step in zip(self.shape, chunk, strict=True))):
            shape = (min(step, n - a) for a, step, n in zip(start, chunk, self.shape, strict=True))
            yield Box(start, tuple(shape)).beyond(self.start)

    def lines(self, shape: Sequence[int]) -> np.ndarray:
        """Returns where its longest runs of consecutive elements begin in an array of a shape, as flat indices."""
        cut = [d for d, (n, size) in enumerate(zip(self.shape, shape, strict=True)) if n != size]
        dim = cut[-1] if cut else 0  # what has one index in the dimensions before lies in one piece
        first = np.zeros(1, np.int64)
        for d in range(min(dim + 1, len(shape))):
            index = self.start[d] + np.arange(self.shape[d] if d < dim else 1)
            first = (first[:, None] + index * math.prod(shape[d + 1 :])).reshape(-1)
        return first


def tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes make an array of a shape, each element once."""
    whole = Box.whole(shape)
    inside = all(box & whole == box for box in boxes if box.size)
    apart = not any(a & b for a, b in itertools.combinations(boxes, 2))
    return inside and apart and sum(box.size for box in boxes) == whole.size


def padded(read: Callable[[Box], np.ndarray], box: Box, natural: Sequence[int], dtype: DType) -> np.ndarray:
    """Returns a box of an array that is stored with padding, which is zero; `read` returns boxes of the natural one."""
    inside = box & Box.whole(natural)
    if inside == box:
        return read(box)
    out = np.zeros(box.shape, dtype)
    if inside is not None:
        out[inside.within(box).slices] = read(inside)
    return out


def runs(first: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Returns the boxes, in order, that a range of the elements of an array consists of."""
    if first >= stop:
        return []
    per_row = math.prod(shape[1:])
    if per_row == 1:
        return [Box((first, *(0 for _ in shape[1:])), (stop - first, *shape[1:]))]

    def in_row(row: int, a: int, b: int) -> list[Box]:
        return [Box((row, *x.start), (1, *x.shape)) for x in runs(a, b, shape[1:])]

    (row, begin), (last, end) = divmod(first, per_row), divmod(stop, per_row)
    if row == last:
        return in_row(row, begin, end)
    head = in_row(row, begin, per_row) if begin else []
    next_row = row + bool(begin)
    rows = [Box((next_row, *(0 for _ in shape[1:])), (last - next_row, *shape[1:]))] if next_row < last else []
    return [*head, *rows, *in_row(last, 0, end)]


@functools.lru_cache  # stacks of layers and experts ask the same of each
def before_reshape(box: Box, shape: tuple[int, ...], before: tuple[int, ...]) -> tuple[Box, tuple[int, ...], Box]:
    """Returns what is needed of an array that is reshaped from `before` to `shape`, for a box of the result.

    Returns:
      The smallest box before; the shape to give it; and the place of `box` in that.
    """
    start, sizes = [0] * len(before), list(before)
    cut: list[int] = []
    first: list[int] = []
    for dims, new in reshaped_dims(before, shape):
        lead = new[0]
        low, size = box.start[lead], shape[lead]
        if dims:  # along the first dimension, in units that are whole rows on both sides
            row, new_row = math.prod(before[d] for d in dims[1:]), math.prod(shape[d] for d in new[1:])
            unit = math.lcm(row, new_row)
            from_, to = low * new_row // unit * unit, -(-(low + box.shape[lead]) * new_row // unit) * unit
            start[dims[0]], sizes[dims[0]] = from_ // row, (to - from_) // row
            low, size = low - from_ // new_row, (to - from_) // new_row
        cut += [size, *(shape[d] for d in new[1:])]
        first += [low, *(box.start[d] for d in new[1:])]
    return Box(tuple(start), tuple(sizes)), tuple(cut), Box(tuple(first), box.shape)


def reshaped_dims(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns runs of dimensions of two shapes with the same number of elements, in order, for each dimension of `b`.

    Both shapes have as many elements; without elements there are no runs. A dimension of size 1 has none in `a`.
    """
    if 0 in a:
        return []
    left = [d for d, n in enumerate(a) if n > 1]
    found: list[tuple[list[int], list[int]]] = []
    dims: list[int] = []
    new: list[int] = []
    for d in range(len(b)):
        new.append(d)
        while math.prod(a[x] for x in dims) < math.prod(b[x] for x in new):
            dims.append(left.pop(0))
        if math.prod(a[x] for x in dims) == math.prod(b[x] for x in new):
            found.append((dims, new))
            dims, new = [], []
    return found


def record_boxes(shape: Sequence[int], bytes_per_element: int, chunk_bytes: int) -> list[Box]:
    """Splits a part of a leaf into boxes of about equal size, of at most `chunk_bytes` or one element.

    Cuts the first dimension whose slices are small enough into ranges, and takes those before it index by index.
    """
    shape = tuple(shape)
    most = max(1, chunk_bytes // bytes_per_element)
    if math.prod(shape) <= most:
        return [Box.whole(shape)]
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most)
    rows, tail = shape[dim], shape[dim + 1 :]
    count = -(-rows // min(rows, most // math.prod(tail)))
    length = -(-rows // count)
    return list(Box.whole(shape).split((*(1 for _ in shape[:dim]), length, *tail)))


def field_offsets(dtypes: Sequence[DType], size: int) -> list[int]:
    """Returns where the fields of a record begin, and where it ends, in bytes; `size` is the number of elements."""
    pages = (-(-size * dtype.itemsize // PAGE) * PAGE for dtype in dtypes)
    return list(itertools.accumulate(pages, initial=0))
