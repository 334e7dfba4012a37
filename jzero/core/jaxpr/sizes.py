"""Bytes of arrays by size and dtype; compilers keep numbers of 4 bits in pairs."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jzero.core.base.types import DType


def array_bytes(size: int, dtype: DType) -> int:
    """Returns the bytes of `size` elements of a dtype, extended dtypes (PRNG keys) included."""
    return -(-size * _bits(dtype) // 8)


def itemsize(dtype: DType) -> int:
    """Bytes of one element by itself, extended dtypes (PRNG keys) included."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(key.shape) * int(key.dtype.itemsize)
    return int(dtype.itemsize)


@functools.cache  # asked for every variable of a program
def _bits(dtype: DType) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return 8 * itemsize(dtype)
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    return int(jnp.finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.floating) else 8 * int(dtype.itemsize)
