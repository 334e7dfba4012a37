"""Blocks of integers or of 4-bit codes: arrays of floating-point numbers as bytes, rounded.

    pack(x, dim, num_stacked, kind) -> jax.Array     [*stacked, ..., C, ...] -> bytes [*stacked, C, K]

Row `c` has all elements at index `c` of the cut dimension: n blocks of b integers, then n scales in fp32. So no block
crosses a shard, whatever their number, and a row of a stack has the blocks of a layer by itself. Integers and scales
are one array, so each hop is one collective, and whatever can slice an array can slice this one.

[Note: Rounding]
    s = max|x| · fp32(1/q), to 16 bits   q = 127, or 7 for int4; NaN if any x is not finite
    z = clip(round(x · (1/s)), -q, q)    to nearest, half to even; x̂ = z · s

Both x and s enter z as quarters, which changes no bit: of the largest numbers, 1/s itself would be below the least
normal number, which devices may take for zero.

A product by fp32(1/q), since XLA divides by a constant, or multiplies by its inverse, depending on the array's size:
one bit of the scale would depend on the number of devices. A block with max|x| <= 1e-30 is zero: 1/s would overflow.
A scale has 16 bits, so that 127 · s is exact: rounding what was rounded before, in fp32 or 16 bits, gives the same
integers and scales. So frozen parameters keep their bits when they move to another layout in natural shape.

`nf4` has no even steps: q = 1, and z is the nearest of 16 levels, quantiles of a normal distribution of which -1, 0 and
1 are some. Its blocks are shorter, as in QLoRA (Dettmers et al., 2023), which has the levels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.core.base.types import DType

BLOCK = {"int8": 256, "int4": 256, "nf4": 64}
"""Most elements of a block."""
LEAST = 32
"""Fewest elements beside the cut dimension that are rounded: below, scales cost as much as the integers save."""
_LARGEST = {"int8": 127.0, "int4": 7.0, "nf4": 1.0}
_LARGEST_SCALE = np.float32(2.0**128 - 2.0**112)
"""The largest number of 16 bits. That of fp32 would be rounded to infinity."""
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


class Blocks(NamedTuple):
    """How a leaf is packed.

    Attributes:
      kind: `int8`, `int4` or `nf4`.
      dtype: The dtype of the array that the bytes stand for.
      offset: The dimension whose indices are packed one by one, counted from the first one that is not of a stack.
      parts: How many devices along other mesh axes each pack a part of the same rows.
    """

    kind: str
    dtype: DType
    offset: int
    parts: int = 1


def packed_size(size: int, kind: str) -> int:
    """Returns K, the bytes of `size` elements at one index of the cut dimension."""
    n, b = _blocks_of(size, kind)
    return n * (b // (1 if kind == "int8" else 2) + 4)


def pack(x: jax.Array, dim: int, num_stacked: int, kind: str) -> jax.Array:
    """Rounds an array. [*stacked, ..., C, ...] -> bytes [*stacked, C, K], see [Note: Rounding]."""
    y = jnp.moveaxis(x.astype(jnp.float32), dim, num_stacked)
    y = y.reshape(*y.shape[: num_stacked + 1], -1)  # [*stacked, C, S]
    n, b = _blocks_of(y.shape[-1], kind)
    y = jnp.pad(y, [(0, 0)] * (num_stacked + 1) + [(0, n * b - y.shape[-1])]).reshape(*y.shape[:-1], n, b)
    top = _LARGEST[kind]
    most = jnp.max(jnp.abs(y), axis=-1)
    scale = lax.reduce_precision(most * np.float32(1 / top), exponent_bits=8, mantissa_bits=15)
    scale = jnp.where(most > 1e-30, jnp.minimum(scale, _LARGEST_SCALE), 0)
    scale = jnp.where(jnp.isfinite(y).all(axis=-1), scale, jnp.nan)  # a maximum may drop NaN
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale / 4, 1), 0)[..., None]
    z = jnp.where(jnp.isfinite(y), y / 4, 0) * inverse
    z = _nearest_level(z) if kind == "nf4" else jnp.clip(jnp.round(z), -top, top).astype(jnp.int8)
    if kind != "int8":  # two to a byte, by hand: compilers differ in how they pack
        z = (z[..., : b // 2] & 15) | (z[..., b // 2 :] << 4)
    values, scales = z, lax.bitcast_convert_type(scale, jnp.int8)  # [*stacked, C, n, b or b/2], [*stacked, C, n, 4]
    rows = [part.reshape(*part.shape[:-2], -1) for part in (values, scales)]
    return jnp.concatenate(rows, axis=-1)


def unpack(packed: jax.Array, size: int, kind: str) -> jax.Array:
    """Returns the rounded elements of each row, in fp32. Bytes [..., K] -> [..., S]."""
    n, b = _blocks_of(size, kind)
    scales = packed[..., -4 * n :].reshape(*packed.shape[:-1], n, 4)
    z = packed[..., : -4 * n].reshape(*packed.shape[:-1], n, -1)
    if kind != "int8":
        z = jnp.concatenate([(z << 4) >> 4, z >> 4], axis=-1)  # arithmetic shifts keep the sign
    y = _levels(z) if kind == "nf4" else z.astype(jnp.float32)
    y = y * lax.bitcast_convert_type(scales, jnp.float32)[..., None]  # [..., n, b]
    return y.reshape(*packed.shape[:-1], n * b)[..., :size]


def _nearest_level(x: jax.Array) -> jax.Array:
    """Returns the numbers of the levels of nf4, from -8 to 7."""
    levels = np.array(NF4, np.float32)
    return sum((x > between).astype(jnp.int8) for between in (levels[1:] + levels[:-1]) / 2) - jnp.int8(8)


def _levels(z: jax.Array) -> jax.Array:
    """Returns the levels of nf4 by their numbers. By selects, since an equation that travels has no constants."""
    levels = jnp.zeros(z.shape, jnp.float32)
    for i, level in enumerate(NF4):
        levels = jnp.where(z == i - 8, np.float32(level), levels)
    return levels


def _blocks_of(size: int, kind: str) -> tuple[int, int]:
    """Returns the number of blocks and their even size."""
    n = max(-(-size // BLOCK[kind]), 1)
    b = max(-(-size // n), 1)
    return n, b + b % 2
