"""Checksums of arrays that do not depend on how the arrays are cut.

[Note: Checksums]
The file formats detect a truncated file, but a bit that flips inside a chunk of numbers may pass. So each leaf has a
checksum, computed where it lies before it is copied, and again after it is read: the sum modulo 2^32 of its words,
each mixed with its position in the natural array by the finalizer of MurmurHash3. The finalizer is a bijection of
words, so one wrong word always shows; any other change, such as flipped signs or swapped parts, goes unnoticed once in
2^32. Sums do not depend on the order, so each part is summed by itself, whatever the layout, and padding adds nothing:
by the accelerator that has it, or on the host by NumPy, where XLA would compile a program for each shape.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jzero.core.base.types import DType
from jzero.core.layout.box import Box
from jzero.core.layout.placement import copy_array, is_on_cpu, on_device

FACTOR = 0x9E3779B1
CHUNK = 1 << 16
"""Words that the host mixes at once, in a core's cache."""


class RunningChecksums(contextlib.ExitStack):
    """Checksums that are computed while other arrays are on their way. A context, which waits for them at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = self.enter_context(ThreadPoolExecutor())  # NumPy computes without the interpreter's lock
        self._sums: list[Future[int] | jax.Array] = []

    def add(self, x: jax.Array, shape: tuple[int, ...]) -> None:
        """Starts to compute the checksum of an array.

        Args:
          x: An array placed by a `NamedSharding`, as stored.
          shape: Its shape without its padding; of PRNG keys, that of the keys.
        """
        x = _key_data(x)
        natural = (*shape, *x.shape[len(shape) :])
        if is_on_cpu(x):
            self._sums.append(self._threads.submit(_host_sum, x, natural))
            return
        there = on_device(x)
        self._sums.append(_partial_sums(there, natural, there.sharding))
        if there is not x:  # at most one copy at a time
            jax.block_until_ready(self._sums[-1])

    def result(self) -> list[int]:
        """Returns the checksums in order. With several processes, each must call it, and gets the same."""
        sums = np.zeros(len(self._sums), np.uint32)
        for i, x in enumerate(self._sums):
            parts = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x.result()]
            for part in parts:
                sums[i : i + 1] += np.asarray(part, np.uint32)  # arrays wrap around silently; NumPy's scalars warn
        return over_processes(sums)


def checksums(arrays: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns the checksum of each array, see `RunningChecksums`."""
    with RunningChecksums() as running:
        for x, shape in zip(arrays, shapes, strict=True):
            running.add(x, shape)
        return running.result()


def over_processes(sums: np.ndarray) -> list[int]:
    """Returns checksums from the shares of all processes, each of which must call it: uint32 `[leaves]`."""
    if jax.process_count() > 1 and len(sums):
        sums = np.asarray(multihost_utils.process_allgather(sums)).sum(axis=0, dtype=np.uint32)
    return [int(x) for x in sums]


def _key_data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _host_sum(x: jax.Array, natural: tuple[int, ...]) -> int:
    """Returns the share of this process's parts of an array on CPU devices."""
    parts = ((_numbers(s.data), Box.of(s.index, x.shape).start) for s in x.addressable_shards if s.replica_id == 0)
    return sum(host_sum_of_part(part, start, natural) for part, start in parts) % 2**32


def _numbers(x: jax.Array) -> np.ndarray:
    """Returns the numbers of an array on a CPU, which must not change: where they lie, if DLPack has their dtype.

    What `np.asarray` returns stays with the array that it was given, and no step could reuse the memory of that.
    """
    is_known = x.dtype.isbuiltin == 1
    return np.from_dlpack(x) if is_known else np.asarray(copy_array(x))  # type: ignore[arg-type]  # jax lacks keywords


@functools.partial(jax.jit, static_argnums=(1, 2))
def _partial_sums(x: jax.Array, natural: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Returns one sum per device, of its part; of devices with the same part, all but one return zero."""
    mesh, names = sharding.mesh, tuple(sharding.mesh.axis_names)
    spec = (*sharding.spec, *([None] * (x.ndim - len(sharding.spec))))
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
    """Returns the share of a box of a stored array in its checksum, a uint32. Inside `jit`.

    Args:
      part: The box.
      start: The index of its first element, per dimension.
      natural: The sizes of the stored array without padding.
    """
    first = jnp.asarray(start, jnp.int32)
    places = jnp.zeros((), jnp.uint32)
    inside = jnp.ones((), jnp.bool_)
    for dim in range(part.ndim):
        index = first[dim] + lax.broadcasted_iota(jnp.int32, part.shape, dim)
        stride = math.prod(natural[dim + 1 :]) % (1 << 32)
        places = places + index.astype(jnp.uint32) * jnp.uint32(stride)
        inside = inside & (index < natural[dim])
    return _mixed(part, places, inside).sum(dtype=jnp.uint32)


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


def host_sum_of_part(part: np.ndarray, start: Sequence[int], natural: Sequence[int]) -> int:
    """As `sum_of_part`, of an array on the host."""
    box = Box(tuple(start), part.shape)
    inside = box & Box.whole(natural)
    if inside is None:
        return 0
    first = inside.lines(natural)
    return _sum_of_lines(part[inside.within(box).slices].reshape(len(first), -1), first)


def _sum_of_lines(x: np.ndarray, first: np.ndarray) -> int:
    """Returns the share of lines of consecutive elements, [lines, elements], whose first have these flat indices."""
    bits = 8 if x.dtype == np.bool_ else 32 if np.iscomplexobj(x) else min(_num_bits(x.dtype), 32)
    words = np.ascontiguousarray(x).view(f"uint{max(bits, 8)}")
    start = (first * (x.dtype.itemsize // words.dtype.itemsize)).astype(np.uint32)[:, None] * np.uint32(FACTOR)
    columns = min(CHUNK, words.shape[1])
    places = np.arange(columns, dtype=np.uint32) * np.uint32(FACTOR)
    buffers = np.empty((2, CHUNK), np.uint32)  # memory of its own for each step would cost more than the arithmetic
    total = 0
    rows = CHUNK // max(1, columns)
    for row in range(0, len(words), rows):
        for at in range(0, words.shape[1], CHUNK):
            part = words[row : row + rows, at : at + CHUNK]
            mixed, shifted = buffers[:, : part.size].reshape(2, *part.shape)
            offset = start[row : row + len(part)] + np.uint32(at * FACTOR % 2**32)
            np.add(places[: part.shape[1]], offset, out=mixed)
            np.bitwise_xor(mixed, part if bits >= 8 else part & ((1 << bits) - 1), out=mixed)
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # as `_mix`, in place
                mixed ^= np.right_shift(mixed, shift, out=shifted)
                mixed *= np.uint32(factor)
            mixed ^= np.right_shift(mixed, 16, out=shifted)
            total += int(mixed.sum(dtype=np.uint32))
    return total % 2**32
