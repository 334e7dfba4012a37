"""Checks that numbers fit the dtype of their leaf, where a cast would silently wrap or lose them."""

from __future__ import annotations

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.base.types import DType
from jzero.core.layout.casts import round_without_derivative

Array: TypeAlias = jax.Array | np.ndarray


def describe_misfit(x: Array, dtype: DType) -> str:
    """Describes the numbers of an array that a dtype cannot hold; returns an empty string if all fit.

    Integers must be in its range, numbers that become integers must be whole, and finite numbers must stay finite.
    Real numbers fit complex dtypes; booleans and keys are not numbers. Values of traced arrays are not checked.

    Args:
      x: A NumPy or jax array, of any sharding.
      dtype: The dtype of the cast.

    Example:
      >>> from jzero.core.layout.dtype_range import describe_misfit
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
