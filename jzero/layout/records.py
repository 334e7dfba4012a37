"""How the state of a parameter is split into records on disk.

A *record* holds one rectangle of one device's part of a parameter: all its fields on disk (master, moments), one after
the other, each padded to whole pages, so that one request reads or writes it. A rectangle is contiguous in the part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jzero._types import DType
from jzero.disk.files import PAGE


class Rectangle(NamedTuple):
    """A contiguous range of an array.

    Attributes:
      start: Index of its first element, per dimension.
      shape: Its shape.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its place in the array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


def rectangles(shape: Sequence[int], bytes_per_element: int, chunk_bytes: int) -> list[Rectangle]:
    """Splits a part of a leaf into rectangles of about equal size, of at most `chunk_bytes` or one element.

    Cuts the first dimension whose slices are small enough into ranges, and takes those before it index by index.
    """
    shape = tuple(shape)
    most = max(1, chunk_bytes // bytes_per_element)
    if math.prod(shape) <= most:
        return [Rectangle((0,) * len(shape), shape)]
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most)
    rows, tail = shape[dim], shape[dim + 1 :]
    count = -(-rows // min(rows, most // math.prod(tail)))
    length = -(-rows // count)
    return [
        Rectangle((*lead, first, *(0 for _ in tail)), (*(1 for _ in lead), min(length, rows - first), *tail))
        for lead in itertools.product(*map(range, shape[:dim]))
        for first in range(0, rows, length)
    ]


def field_offsets(dtypes: Sequence[DType], size: int) -> list[int]:
    """Returns where the fields of a record begin, and where it ends, in bytes; `size` is the number of elements."""
    pages = (-(-size * dtype.itemsize // PAGE) * PAGE for dtype in dtypes)
    return list(itertools.accumulate(pages, initial=0))
