"""The arrays of a checkpoint part by part: in order, while the next parts are on their way.

TensorStore reads and decodes in threads of its own, so a reader that asks for several parts before it needs them waits
for none. Requested parts count against a limit of bytes until they are used.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.core.layout.box import Box

PART_BYTES = 1 << 22
"""Least bytes of a part that `boxes_in_parts` reads, if the leaf has as many."""
LEAVES_BYTES = 3 << 23
"""Most bytes that `boxes_in_parts` holds, if no two parts are larger."""


class ArrayPart(NamedTuple):
    """A box of an array.

    Attributes:
      array: The array, open.
      box: Where in it.
    """

    array: Any
    box: Box

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.box.size * int(self.array.dtype.numpy_dtype.itemsize)


def read_parts(contents: Contents, parts: Iterable[ArrayPart], limit: int) -> Iterator[np.ndarray]:
    """Yields parts of arrays in order; while one is in use, the next is under way.

    Args:
      contents: The checkpoint, for errors.
      parts: The parts.
      limit: Most bytes that are under way or in use, unless two parts have more.

    Raises:
      CheckpointError: A part cannot be read.
    """
    under_way: collections.deque[tuple[Any, int]] = collections.deque()
    held = 0

    def first() -> Iterator[np.ndarray]:
        future, _ = under_way[0]
        with contents.errors():
            values = np.asarray(future.result())
        yield values

    for part in itertools.chain(parts, [None]):  # after the last one, whatever is left
        while len(under_way) > (part is not None) and (part is None or held + part.num_bytes > limit):
            yield from first()
            held -= under_way.popleft()[1]
        if part is not None:
            with contents.errors():
                under_way.append((part.array[part.box.slices].read(), part.num_bytes))
            held += part.num_bytes


def boxes_in_parts(contents: Contents, boxes: Sequence[tuple[StoredLeaf, Box]]) -> Iterator[Iterator[np.ndarray]]:
    """Yields boxes of leaves, each as an iterator of its parts, in memory order. Exhaust one before the next.

    Args:
      contents: The checkpoint.
      boxes: The boxes, in order.

    Raises:
      CheckpointError: A leaf cannot be read.
    """
    opened = contents.open({leaf.keys: () if box.shape == leaf.shape else box.shape for leaf, box in boxes})
    parts = [_consecutive(opened[leaf.keys], box) for leaf, box in boxes]
    values = read_parts(contents, itertools.chain.from_iterable(parts), LEAVES_BYTES)
    for own in parts:
        yield itertools.islice(values, len(own))


def _consecutive(array: Any, box: Box) -> list[ArrayPart]:
    """Returns parts that divide a box along its first dimension, where chunks do, so that none is read twice."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        return [ArrayPart(array, box)]
    row_bytes = math.prod(box.shape[dim + 1 :]) * int(array.dtype.numpy_dtype.itemsize)
    chunk = array.chunk_layout.read_chunk.shape[dim]
    rows = -(-PART_BYTES // (chunk * row_bytes)) * chunk
    return [ArrayPart(array, x) for x in box.split((*box.shape[:dim], rows, *box.shape[dim + 1 :]))]
