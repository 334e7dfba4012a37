"""Checksums of arrays that do not depend on how the arrays are cut.

[Note: Checksums]
The file formats detect a truncated file, but a bit that flips inside a chunk of numbers may pass. So each leaf has a
checksum, computed on the devices before it is copied, and again after it is read: the sum modulo 2^32 of its words,
each mixed with its position in the natural array by the finalizer of MurmurHash3. The finalizer is a bijection of
words, so one wrong word always shows; any other change, such as flipped signs or swapped parts, goes unnoticed once in
2^32. Sums do not depend on the order, so each device sums its own part, whatever the layout, and padding adds nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jzero._types import DType
from jzero.layout.cut import Cut
from jzero.layout.placement import on_device

FACTOR = 0x9E3779B1
CHUNK = 1 << 16
"""Words that `host_checksum` mixes at once, in a core's cache."""
ROW = 1 << 10
"""Elements that a CPU mixes at once: with more, XLA may divide each row among threads."""


def checksums(arrays: Sequence[jax.Array], cuts: Sequence[Cut | None]) -> list[int]:
    """Returns the checksum of each array. With several processes, each must call it, and gets the same.

    Args:
      arrays: Arrays placed by `NamedSharding`s, as stored.
      cuts: How each is cut and padded; `None` if it has its natural shape.
    """
    if not arrays:
        return []
    partial = []
    for x, cut in zip(arrays, cuts, strict=True):
        there = on_device(x)
        partial.append(_partial_sums(_key_data(there), cut, there.sharding))
        if there is not x:  # at most one copy at a time
            jax.block_until_ready(partial[-1])
    sums = np.zeros(len(arrays), np.uint32)
    for i, x in enumerate(partial):
        for shard in x.addressable_shards:
            sums[i : i + 1] += np.asarray(shard.data)  # arrays wrap around silently; NumPy's scalars warn
    return over_processes(sums)


def over_processes(sums: np.ndarray) -> list[int]:
    """Returns checksums from the shares of all processes, each of which must call it: uint32 `[leaves]`."""
    if jax.process_count() > 1 and len(sums):
        sums = np.asarray(multihost_utils.process_allgather(sums)).sum(axis=0, dtype=np.uint32)
    return [int(x) for x in sums]


def _key_data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@functools.partial(jax.jit, static_argnums=(1, 2))
def _partial_sums(x: jax.Array, cut: Cut | None, sharding: NamedSharding) -> jax.Array:
    """Returns one sum per device, of its part; of devices with the same part, all but one return zero."""
    mesh, names = sharding.mesh, tuple(sharding.mesh.axis_names)
    spec = (*sharding.spec, *([None] * (x.ndim - len(sharding.spec))))
    natural = x.shape if cut is None else cut.unpadded_shape
    used = set(jax.tree.leaves(tuple(spec)))

    def local(part: jax.Array) -> jax.Array:
        start = [0 if entry is None else lax.axis_index(entry) * part.shape[d] for d, entry in enumerate(spec)]
        total = sum_of_part(part, start, natural)
        is_first = jnp.ones((), jnp.bool_)
        for name in names:
            is_first = is_first if name in used else is_first & (lax.axis_index(name) == 0)
        return jnp.where(is_first, total, jnp.uint32(0))[None]

    return jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec(*spec), out_specs=PartitionSpec(names), check_vma=False
    )(x)


def sum_of_part(part: jax.Array, start: Sequence[int | jax.Array] | jax.Array, natural: Sequence[int]) -> jax.Array:
    """Returns the share of a rectangle of a stored array in its checksum, a uint32. Inside `jit`.

    Args:
      part: The rectangle.
      start: The index of its first element, per dimension.
      natural: The sizes of the stored array without padding.
    """
    first, sizes = jnp.asarray(start, jnp.int32), tuple(natural)
    at_once = functools.partial(_sum_at_once, natural=sizes)
    # What has one index in the dimensions before the cut one lies in one piece, in the natural array too: a line.
    dim = next((d for d, (size, n) in enumerate(zip(part.shape, sizes, strict=True)) if size != n), 0)
    if part.shape[dim + 1 :] != sizes[dim + 1 :] or not ROW <= math.prod(part.shape[dim:]) < 1 << 31:
        return at_once(part, first)
    by_rows = functools.partial(_sum_by_rows, natural=sizes, dim=dim)
    return lax.platform_dependent(part, first, cpu=by_rows, default=at_once)


def _sum_at_once(part: jax.Array, start: jax.Array, natural: tuple[int, ...]) -> jax.Array:
    places = jnp.zeros((), jnp.uint32)
    inside = jnp.ones((), jnp.bool_)
    for dim in range(part.ndim):
        index = start[dim] + lax.broadcasted_iota(jnp.int32, part.shape, dim)
        stride = math.prod(natural[dim + 1 :]) % (1 << 32)
        places = places + index.astype(jnp.uint32) * jnp.uint32(stride)
        inside = inside & (index < natural[dim])
    return _mixed(part, places, inside).sum(dtype=jnp.uint32)


def _sum_by_rows(part: jax.Array, start: jax.Array, natural: tuple[int, ...], dim: int) -> jax.Array:
    """As `_sum_at_once`, by a loop: XLA's CPU compiler would write all mixed words to memory before it adds them."""
    line_size = math.prod(part.shape[dim:])
    lines = part.reshape(-1, line_size)
    stride = line_size // part.shape[dim]
    limit = jnp.clip(natural[dim] - start[dim], 0, part.shape[dim]) * stride
    offset = start[dim].astype(jnp.uint32) * jnp.uint32(stride % (1 << 32))
    natural_line = jnp.uint32(natural[dim] * stride % (1 << 32))

    def mixed(piece: jax.Array, line: Any, at: Any) -> jax.Array:
        line = (line + lax.broadcasted_iota(jnp.int32, piece.shape, 0)).astype(jnp.uint32)
        column = at + lax.broadcasted_iota(jnp.int32, piece.shape, 1)
        return _mixed(piece, line * natural_line + offset + column.astype(jnp.uint32), column < limit)

    per_line = jnp.int32(line_size // ROW)

    def add_row(i: jax.Array, total: jax.Array) -> jax.Array:
        line, at = lax.div(i, per_line), lax.rem(i, per_line) * ROW
        return total + mixed(lax.dynamic_slice(lines, (line, at), (1, ROW)), line, at)

    total = lax.fori_loop(0, lines.shape[0] * (line_size // ROW), add_row, jnp.zeros((1, ROW), jnp.uint32))
    left = mixed(lines[:, line_size // ROW * ROW :], 0, line_size // ROW * ROW)
    return total.sum(dtype=jnp.uint32) + left.sum(dtype=jnp.uint32)


def _mixed(x: jax.Array, places: jax.Array, inside: jax.Array) -> jax.Array:
    """Returns the share of each element, given its place in the flat natural array; zero unless it is inside."""
    words = _words(x)
    per_item = math.prod(words.shape[x.ndim :])
    words = words.reshape(*x.shape, per_item)
    item = lax.broadcasted_iota(jnp.uint32, words.shape, x.ndim)
    mixed = _mix(words ^ ((places[..., None] * jnp.uint32(per_item) + item) * jnp.uint32(FACTOR)))
    return jnp.where(inside[..., None], mixed, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)


def _mix(words: jax.Array) -> jax.Array:
    """Returns 32-bit words after the finalizer of MurmurHash3 (A. Appleby)."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of `x` as uint32: in its shape, with more dimensions for wide numbers."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)], axis=x.ndim)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = _num_bits(x.dtype)
    if bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _num_bits(dtype: DType) -> int:
    return int(jax.dtypes.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits)


def host_checksum(x: np.ndarray, *, first: int = 0) -> int:
    """Returns the share of consecutive elements of a natural array, on the host, in its checksum.

    Args:
      x: The elements, all of them by default.
      first: The index of the first in the flat array.
    """
    bits = 8 if x.dtype == np.bool_ else 32 if np.iscomplexobj(x) else min(_num_bits(x.dtype), 32)
    words = np.ascontiguousarray(x).reshape(-1).view(f"uint{max(bits, 8)}")
    start = first * (x.dtype.itemsize // words.dtype.itemsize)
    places = np.arange(CHUNK, dtype=np.uint32) * np.uint32(FACTOR)
    buffers = np.empty((2, CHUNK), np.uint32)  # memory of its own for each step would cost more than the arithmetic
    total = 0
    for at in range(0, len(words), CHUNK):
        part = words[at : at + CHUNK]
        mixed, shifted = buffers[:, : len(part)]
        np.add(places[: len(part)], np.uint32((start + at) * FACTOR % 2**32), out=mixed)
        np.bitwise_xor(mixed, part if bits >= 8 else part & ((1 << bits) - 1), out=mixed)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # as `_mix`, in place
            mixed ^= np.right_shift(mixed, shift, out=shifted)
            mixed *= np.uint32(factor)
        mixed ^= np.right_shift(mixed, 16, out=shifted)
        total += int(mixed.sum(dtype=np.uint32))
    return total % 2**32
