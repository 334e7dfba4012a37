"""Loops over large arrays, chunk by chunk: splits arrays, and updates them in place.

[Note: Chunks]
A chunk is a range of one dimension, after leading dimensions may be merged into one. A loop that reads a chunk of an
array in host memory, and writes it back to the same place, compiles without a copy of the array. (A `scan` over the
array does not: it stacks its outputs in a new array.) On GPUs and CPUs every merge is free and chunks are contiguous.
TPUs lay out the last two dimensions in tiles of 128 lanes by 8 sublanes (16 or 32 for narrower dtypes), in the order
that wastes less; their compiler slices host memory along one dimension only, along lanes by whole tiles only, and
aborts on others. Chunks may not overlap, since the loop overwrites the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

LANES, SUBLANES = 128, 32
T = TypeVar("T")


class Chunking(NamedTuple):
    """How an array is split, see [Note: Chunks].

    Attributes:
      view: The shape to split, with leading dimensions possibly merged.
      dim: The dimension of the view to cut into ranges.
      length: Length of a range; the last one may be shorter.
    """

    view: tuple[int, ...]
    dim: int
    length: int


class Chunk(NamedTuple):
    """One chunk: `start` and `length` of the range along the dimension that is split, and its number."""

    start: int | jax.Array
    length: int
    number: int | jax.Array


def split(shape: Sequence[int], bytes_per_element: int, chunk_bytes: int, *, tiled: bool) -> Chunking:
    """Splits an array into chunks of at most `chunk_bytes`, or of the smallest size that tiles allow.

    Args:
      shape: Shape of the array.
      bytes_per_element: Bytes of one element, or of those of several arrays together.
      chunk_bytes: The limit.
      tiled: Whether the device is a TPU, see [Note: Chunks].
    """
    shape = tuple(shape)
    size = math.prod(shape) * bytes_per_element
    if size <= chunk_bytes or not shape:
        return Chunking(shape or (1,), 0, (shape or (1,))[0])
    ways = list(_tiled_ways(shape) if tiled else _ways(shape))

    def least(way: tuple[tuple[int, ...], int, int]) -> int:
        view, dim, tile = way
        return size // view[dim] * min(tile, view[dim])

    if not ways:  # one chunk
        return Chunking(shape, 0, shape[0])
    view, dim, tile = next((way for way in ways if least(way) <= chunk_bytes), min(ways, key=least))
    most = max(tile, chunk_bytes // (size // view[dim]) // tile * tile)
    equal = -(-view[dim] // -(-view[dim] // most))  # chunks of about equal length
    length = min(view[dim], -(-equal // tile) * tile)
    while length > tile and 0 < view[dim] % length < tile:  # the last chunk needs a whole tile
        length -= tile
    return Chunking(view, dim, length)


def _ways(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yields views, the dimension to split, and the divisor of lengths; the coarsest first."""
    for dim in range(len(shape)):
        yield (math.prod(shape[: dim + 1]), *shape[dim + 1 :]), 0, 1


def _tiled_ways(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    if len(shape) == 1:
        if shape[0] % LANES == 0:
            yield shape, 0, 8 * LANES
        return
    for dim in range(len(shape) - 2):
        yield shape, dim, 1
    *leading, rows, columns = shape
    if len(shape) > 2 and rows % SUBLANES == 0 and columns % LANES == 0:
        yield (math.prod(leading) * rows, columns), 0, SUBLANES
    is_transposed = _padded_size(columns, rows) < _padded_size(rows, columns)
    sublanes, lanes = (len(shape) - 1, len(shape) - 2) if is_transposed else (len(shape) - 2, len(shape) - 1)
    if shape[sublanes] % 8 == 0 or shape[lanes] > LANES:  # otherwise the last chunk could not be sliced
        yield shape, sublanes, SUBLANES
    if shape[lanes] % LANES == 0:
        yield shape, lanes, LANES


def _padded_size(sublanes: int, lanes: int) -> int:
    return -(-sublanes // 8) * 8 * (-(-lanes // LANES) * LANES)


def for_each_chunk(body: Callable[[Chunk, T], T], carry: T, chunking: Chunking) -> T:
    """Returns `carry` after `carry = body(chunk, carry)` for each chunk, inside a trace."""
    size, length = chunking.view[chunking.dim], chunking.length
    count = size // length
    if count == 1:
        carry = body(Chunk(0, length, 0), carry)
    else:
        carry = lax.fori_loop(0, count, lambda i, carry: body(Chunk(i * length, length, i), carry), carry)
    if size % length:
        carry = body(Chunk(count * length, size % length, count), carry)
    return carry


def read_chunk(x: jax.Array, chunk: Chunk, chunking: Chunking) -> jax.Array:
    """Returns a chunk of an array in the view's shape, in the array's memory."""
    if chunk.length == chunking.view[chunking.dim]:
        return x
    return lax.dynamic_slice_in_dim(x, chunk.start, chunk.length, chunking.dim)


def write_chunk(x: jax.Array, new: jax.Array, chunk: Chunk, chunking: Chunking) -> jax.Array:
    """Returns an array in the view's shape with one chunk replaced; `new` is in the same memory."""
    if chunk.length == chunking.view[chunking.dim]:
        return new
    return lax.dynamic_update_slice_in_dim(x, new, chunk.start, chunking.dim)


def chunk_index(dim: int, shape: Sequence[int], chunk: Chunk, chunking: Chunking) -> jax.Array:
    """Returns for each element of a chunk its index in a dimension of the array, int32, in the chunk's shape.

    Args:
      dim: The dimension.
      shape: Shape of the array, before leading dimensions were merged.
      chunk: The chunk.
      chunking: How the array is split.
    """
    num_merged = len(shape) - len(chunking.view)
    axis = max(dim - num_merged, 0)
    chunk_shape = [chunk.length if d == chunking.dim else size for d, size in enumerate(chunking.view)]
    index = lax.broadcasted_iota(jnp.int32, chunk_shape, axis) + (chunk.start if axis == chunking.dim else 0)
    if dim > num_merged:
        return index
    return index // math.prod(shape[dim + 1 : num_merged + 1]) % shape[dim]
