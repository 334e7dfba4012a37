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
import tensorstore as ts

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

    def read(self, memory: np.ndarray) -> tuple[Any, np.ndarray]:
        """Begins to read it into memory of as many bytes; returns what tells when that is done, and the numbers."""
        values = memory.view(self.array.dtype.numpy_dtype).reshape(self.box.shape)
        place = ts.array(values, copy=False, write=True)[ts.d[:].translate_to[self.box.start]]
        return place.write(self.array[self.box.slices]), values


def read_parts(
    contents: Contents, parts: Iterable[ArrayPart], limit: int, *, reuse: bool = False
) -> Iterator[np.ndarray]:
    """Yields parts of arrays in order; while one is in use, the next is under way.

    Args:
      contents: The checkpoint, for errors.
      parts: The parts.
      limit: Most bytes that are under way or in use, unless two parts have more.
      reuse: Whether a part is no longer in use once the next is asked for. Its memory then takes another part: new
        memory costs a page fault for each of its pages.

    Raises:
      CheckpointError: A part cannot be read.
    """
    under_way: collections.deque[tuple[Any, np.ndarray, np.ndarray]] = collections.deque()
    held, spare = 0, (none := np.empty(0, np.uint8))
    for part in itertools.chain(parts, [None]):  # after the last one, whatever is left
        while len(under_way) > (part is not None) and (part is None or held + part.num_bytes > limit):
            done, values, memory = under_way.popleft()
            with contents.errors():
                done.result()
            yield values
            held -= memory.nbytes
            spare = memory if reuse else spare
            del done, values, memory
        if part is not None:
            size = part.num_bytes
            memory = spare if size <= spare.nbytes < 2 * size else np.empty(size, np.uint8)
            spare = none
            with contents.errors():
                under_way.append((*part.read(memory[:size]), memory))
            held += memory.nbytes


def boxes_in_parts(contents: Contents, boxes: Sequence[tuple[StoredLeaf, Box]]) -> Iterator[Iterator[np.ndarray]]:
    """Yields boxes of leaves, each as an iterator of its parts, in memory order. Exhaust one before the next.

    The memory of a part is used again once the next part is asked for, of this box or another.

    Args:
      contents: The checkpoint.
      boxes: The boxes, in order.

    Raises:
      CheckpointError: A leaf cannot be read.
    """
    opened = contents.open({leaf.keys: () if box.shape == leaf.shape else box.shape for leaf, box in boxes})
    parts = [_consecutive(opened[leaf.keys], box) for leaf, box in boxes]
    values = read_parts(contents, itertools.chain.from_iterable(parts), LEAVES_BYTES, reuse=True)
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
