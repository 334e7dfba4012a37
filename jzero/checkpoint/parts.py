"""The arrays of a checkpoint part by part: in order, while the next parts are on their way.

TensorStore reads and decodes in threads of its own, so a reader that asks for several parts before it needs them waits
for none. Requested parts count against a limit of bytes until they are used.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero.checkpoint.checksum import host_sum_of_part
from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.damage import wrong_checksums
from jzero.core.layout.box import Box

PART_BYTES = 1 << 22
"""Least bytes of a part that `checked_boxes` reads, if the leaf has as many."""
LEAVES_BYTES = 3 << 23
"""Most bytes that `checked_boxes` holds, if no part is larger."""


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
    """Yields parts of arrays in order.

    Args:
      contents: The checkpoint, for errors.
      parts: The parts.
      limit: Most bytes that are under way or in use, unless a single part has more.

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
        while under_way and (part is None or held + part.num_bytes > limit):
            yield from first()
            held -= under_way.popleft()[1]
        if part is not None:
            with contents.errors():
                under_way.append((part.array[part.box.slices].read(), part.num_bytes))
            held += part.num_bytes


def checked_boxes(contents: Contents, boxes: Sequence[tuple[StoredLeaf, Box]]) -> Iterator[Iterator[np.ndarray]]:
    """Yields boxes of leaves, each as an iterator of its parts, in memory order. Exhaust one before the next.

    Args:
      contents: The checkpoint.
      boxes: The boxes, in order.

    Raises:
      CheckpointError: A leaf cannot be read; or, after its last part, its checksum differs.
    """
    opened = contents.open({leaf.keys: () if box.shape == leaf.shape else box.shape for leaf, box in boxes})
    parts = [_consecutive(opened[leaf.keys], box) for leaf, box in boxes]
    values = read_parts(contents, itertools.chain.from_iterable(parts), LEAVES_BYTES)
    sums = {leaf.keys: _Sum(math.prod(leaf.shape)) for leaf, _ in boxes}
    for (leaf, _), own in zip(boxes, parts, strict=True):
        yield _checked(contents, leaf, zip(own, values, strict=False), sums[leaf.keys])


@dataclasses.dataclass
class _Sum:
    """What was read of a leaf: how much is left, the checksum so far, and where the parts begin."""

    left: int
    total: int = 0
    seen: set[tuple[int, ...]] = dataclasses.field(default_factory=set)


def _consecutive(array: Any, box: Box) -> list[ArrayPart]:
    """Returns parts that divide a box along its first dimension, where chunks do, so that none is read twice."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        return [ArrayPart(array, box)]
    row_bytes = math.prod(box.shape[dim + 1 :]) * int(array.dtype.numpy_dtype.itemsize)
    chunk = array.chunk_layout.read_chunk.shape[dim]
    rows = -(-PART_BYTES // (chunk * row_bytes)) * chunk
    return [ArrayPart(array, x) for x in box.split((*box.shape[:dim], rows, *box.shape[dim + 1 :]))]


def _checked(
    contents: Contents, leaf: StoredLeaf, parts: Iterator[tuple[ArrayPart, np.ndarray]], sum_: _Sum
) -> Iterator[np.ndarray]:
    """Yields parts of a leaf; once each element was there, compares its checksum."""
    for (_, box), x in parts:
        if leaf.checksum is not None and box.start not in sum_.seen:
            sum_.seen.add(box.start)
            sum_.left -= box.size
            sum_.total += host_sum_of_part(x, box.start, leaf.shape)
        yield x
    if leaf.checksum is not None and not sum_.left and sum_.total % 2**32 != leaf.checksum:
        raise wrong_checksums(contents.state_directory, [leaf.path])
