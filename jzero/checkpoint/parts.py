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

from jzero.checkpoint.checksum import host_checksum
from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.damage import wrong_checksums

PART_BYTES = 1 << 22
"""Least bytes of a part that `checked_leaves` reads, if the leaf has as many."""
LEAVES_BYTES = 3 << 23
"""Most bytes that `checked_leaves` holds, if no part is larger."""


class Part(NamedTuple):
    """A rectangle of an array.

    Attributes:
      array: The array, open.
      place: Where in it; a slice with bounds per dimension.
    """

    array: Any
    place: tuple[slice, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(s.stop - s.start for s in self.place) * int(self.array.dtype.numpy_dtype.itemsize)


def read_parts(contents: Contents, parts: Iterable[Part], limit: int) -> Iterator[np.ndarray]:
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
                under_way.append((part.array[part.place].read(), part.num_bytes))
            held += part.num_bytes


def checked_leaves(contents: Contents, leaves: Sequence[StoredLeaf]) -> Iterator[Iterator[np.ndarray]]:
    """Yields each leaf as an iterator of its parts, in memory order. Exhaust one before the next.

    Args:
      contents: The checkpoint.
      leaves: Which.

    Raises:
      CheckpointError: A leaf cannot be read; or, after its last part, its checksum differs.
    """
    opened = contents.open({leaf.keys: () for leaf in leaves})
    parts = [_consecutive(opened[leaf.keys]) for leaf in leaves]
    values = read_parts(contents, itertools.chain.from_iterable(parts), LEAVES_BYTES)
    for leaf, own in zip(leaves, parts, strict=True):
        yield _checked(contents, leaf, itertools.islice(values, len(own)))


def _consecutive(array: Any) -> list[Part]:
    """Returns parts that divide an array along its first dimension, where chunks do, so that none is read twice."""
    shape = array.shape
    if not shape:
        return [Part(array, ())]
    row_bytes = math.prod(shape[1:]) * int(array.dtype.numpy_dtype.itemsize)
    chunk = array.chunk_layout.read_chunk.shape[0]
    rows = -(-PART_BYTES // (chunk * row_bytes)) * chunk
    rest = [slice(0, size) for size in shape[1:]]
    return [Part(array, (slice(i, min(i + rows, shape[0])), *rest)) for i in range(0, shape[0], rows)]


def _checked(contents: Contents, leaf: StoredLeaf, values: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    size = total = 0
    for x in values:
        if leaf.checksum is not None:
            total += host_checksum(x, first=size)
        size += x.size
        yield x
    if leaf.checksum is not None and total % 2**32 != leaf.checksum:
        raise wrong_checksums(contents.state_directory, [leaf.path])
