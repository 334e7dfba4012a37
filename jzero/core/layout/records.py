"""How the state of a parameter is split into records on disk.

A *record* holds one box of one device's part of a parameter: all its fields on disk (master, moments), one after
the other, each padded to whole pages, so that one request reads or writes it. Its elements are consecutive in the part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jzero.core.base.types import DType
from jzero.core.disk.files import PAGE
from jzero.core.layout.box import Box


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
