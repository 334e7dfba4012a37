"""Casts to 16 bits that compilers do not move or skip, and stochastic rounding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.core.base.types import DType


def round_to(x: jax.Array, dtype: DType) -> jax.Array:
    """Casts `x`, so that the compiler neither skips the rounding nor moves the cast past the next operation.

    Compilers may keep more precision than asked, and may swap a cast and a gather (jax issue 23543).
    """
    return x if x.dtype == dtype else _rounded_jit(x, dtype)


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


_rounded = jax.custom_jvp(round_without_derivative, nondiff_argnums=(1,))
_rounded_jit = jax.jit(_rounded, static_argnums=1)  # traced once per shape: jax traces a derivative rule at each use


@_rounded.defjvp
def _rounded_jvp(dtype: DType, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The bits of fp16 have no derivative; the cast does.
    return _rounded(*primals, dtype), tangents[0].astype(dtype)


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


Array: TypeAlias = jax.Array | np.ndarray


def describe_misfit(x: Array, dtype: DType) -> str:
    """Describes the numbers of an array, of any sharding, that a dtype cannot hold; returns "" if all fit.

    Integers must be in its range, numbers that become integers must be whole, and finite numbers must stay finite.
    Real numbers fit complex dtypes; booleans and keys are not numbers. Values of traced arrays are not checked.

    Example:
      >>> from jzero.core.layout.casts import describe_misfit
      >>> describe_misfit(np.array([3, 300]), np.dtype("int8"))
      'int64 numbers from 3 to 300, and int8 holds those from -128 to 127'
    """
    have, want = (next((i for i, kind in enumerate(KINDS) if _is(y, kind)), -1) for y in (x.dtype, dtype))
    if x.dtype == dtype:
        return ""
    if have < 0 or want < 0 or have > max(want, 1):  # integers may be written as 1.0
        return f"{x.dtype}, which is not cast to {dtype}"
    if not x.size or isinstance(x, jax.core.Tracer):
        return ""
    if want == 0:
        return _not_in_range(x, dtype)
    return _not_finite(x, dtype)


KINDS: tuple[type, ...] = (np.integer, np.floating, np.complexfloating)


def _is(dtype: DType, kind: type) -> bool:
    return bool(jnp.issubdtype(dtype, kind))


def _not_in_range(x: Array, dtype: DType) -> str:
    what = "numbers"
    if _is(x.dtype, np.floating):
        what = "whole numbers"
        if not bool(_are_whole(x)):
            return f"{x.dtype} numbers that are not whole, and {dtype} holds whole ones"
    low, high = (_number(y) for y in _bounds(x))
    info = jnp.iinfo(dtype)
    if info.min <= low and high <= info.max:
        return ""
    return f"{x.dtype} {what} from {low} to {high}, and {dtype} holds those from {info.min} to {info.max}"


def _not_finite(x: Array, dtype: DType) -> str:
    if _largest(x.dtype) <= _largest(dtype):
        return ""
    largest = float(_largest_lost(x, dtype))
    return f"{x.dtype} numbers such as {largest:g}, which {dtype} does not hold" if largest > 0 else ""


def _largest(dtype: DType) -> float:
    return float(jnp.iinfo(dtype).max if _is(dtype, np.integer) else jnp.finfo(dtype).max)


def _number(x: Array) -> int:
    return int(np.asarray(x).item())


def _are_whole(x: Array) -> Array | np.bool:
    return _whole_on_device(x) if isinstance(x, jax.Array) else np.all(np.isfinite(x) & (np.floor(x) == x))


def _bounds(x: Array) -> tuple[Array, Array]:
    return _bounds_on_device(x) if isinstance(x, jax.Array) else (x.min(), x.max())


def _largest_lost(x: Array, dtype: DType) -> Array:
    """Returns the largest number that a cast would make infinite; 0 if there is none."""
    if isinstance(x, jax.Array):
        return _largest_lost_on_device(x, dtype)
    with np.errstate(all="ignore"):
        lost = np.isfinite(x) & ~np.isfinite(x.astype(dtype))
        return np.max(np.where(lost, np.abs(x), 0), initial=0)


@jax.jit
def _whole_on_device(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x) & (jnp.floor(x) == x))


@jax.jit
def _bounds_on_device(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.int8) if _is(x.dtype, np.integer) and jnp.iinfo(x.dtype).bits < 8 else x
    return x.min(), x.max()


@functools.partial(jax.jit, static_argnums=1)
def _largest_lost_on_device(x: jax.Array, dtype: DType) -> jax.Array:
    x = x.astype(jnp.float32) if _is(x.dtype, np.integer) else x
    lost = jnp.isfinite(x) & ~jnp.isfinite(round_without_derivative(x, dtype))
    return jnp.max(jnp.where(lost, jnp.abs(x).astype(jnp.float32), 0))
