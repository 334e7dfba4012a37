"""Casts to 16 bits that compilers do not move or skip, and stochastic rounding."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.extend.random
import jax.numpy as jnp
from jax import lax

from jzero.core.base.types import DType


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: jax.Array, dtype: DType) -> jax.Array:
    """Casts `x`, so that the compiler neither skips the rounding nor moves the cast past the next operation.

    Compilers may keep more precision than asked, and may swap a cast and a gather (jax issue 23543).
    """
    return round_without_derivative(x, dtype)


def round_without_derivative(x: jax.Array, dtype: DType) -> jax.Array:
    """The same cast, for values that are not differentiated."""
    if x.dtype == dtype:
        return x
    if dtype == jnp.float16:  # `reduce_precision` would flush its subnormal numbers to zero
        bits = lax.bitcast_convert_type(x.astype(dtype), jnp.uint16)
        return lax.bitcast_convert_type(lax.optimization_barrier(bits), dtype)
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return lax.optimization_barrier(x.astype(dtype))


@round_to.defjvp
def _round_to_jvp(dtype: DType, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The bits of fp16 have no derivative; the cast does.
    return round_to(*primals, dtype), tangents[0].astype(dtype)


def _same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    """Whether elements of two floating-point arrays of one dtype have the same bits, or are both zero.

    Compares bits, since compilers may compare numbers with more precision than the dtype has.
    """
    size = 8 * x.dtype.itemsize
    unsigned = jnp.dtype(f"uint{size}")
    x, y = lax.bitcast_convert_type(x, unsigned), lax.bitcast_convert_type(y, unsigned)
    both = lax.bitwise_and(lax.bitwise_or(x, y), lax.full_like(x, (1 << (size - 1)) - 1))  # without the sign
    return lax.bitwise_or(lax.eq(x, y), lax.eq(both, lax.full_like(x, 0)))


@jax.jit  # traced once per shape; uses `lax`, which traces several times as fast as `jnp`
def apply_edits(master: jax.Array, param: jax.Array) -> jax.Array:
    """Returns `master`, with the elements of `param` that differ from the rounded master."""
    # A plain cast: its bits are compared, so no compiler can skip it, and it is one loop with the update.
    same = _same_bits(lax.convert_element_type(master, param.dtype), param)
    return lax.select(same, master, lax.convert_element_type(param, master.dtype))


def positions_of(shape: Sequence[int], index: Sequence[jax.Array] | None = None) -> jax.Array:
    """Returns each element's position in an array, row by row, as uint32: modulo 2^32.

    Args:
      shape: The shape of the array.
      index: For each dimension the index of each element of a part of the array; by default those of all of it.
    """
    index = [lax.broadcasted_iota(jnp.uint32, tuple(shape), d) for d in range(len(shape))] if index is None else index
    position = jnp.zeros(index[0].shape if index else (), jnp.uint32)
    for size, i in zip(shape, index, strict=True):
        position = position * jnp.uint32(size % 2**32) + i.astype(jnp.uint32)
    return position


def round_stochastically(x: jax.Array, key: jax.Array, positions: jax.Array) -> jax.Array:
    """Rounds fp32 to bf16, up or down at random, so that the expected value is `x`.

    Args:
      x: The values.
      key: A key of the `threefry2x32` generator.
      positions: A uint32 per element, which with the key decides its noise. Elements of equal position, 2^32 apart in
        an array, share it: each of them is still rounded fairly.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    words = jax.random.key_data(key)
    # bf16 is the upper half of fp32: adding a random lower half rounds by its carry.
    noise = jax.extend.random.threefry2x32_p.bind(words[0], words[1], positions, jnp.zeros_like(positions))[0] >> 16
    rounded = lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(rounded), rounded, x).astype(jnp.bfloat16)


def can_represent(dtype: DType, value_dtype: DType | type[complex]) -> bool:
    """Whether a dtype can take values of another one, or numbers of Python, without loss of range or kind."""
    if dtype == value_dtype:
        return True
    try:
        with jax.numpy_dtype_promotion("standard"):  # whatever the user set for arithmetic
            return bool(jnp.promote_types(dtype, value_dtype) == dtype)
    except (TypeError, ValueError):  # random keys, 8-bit floats
        return False
