"""Packs unlike arrays into one buffer per dtype, so that one exchange moves them all.

Arrays are one row, or one row per device, [N, ...]; a buffer has the rows side by side, [N, size]:

    f32[8, 5, 3], bf16[8, 7], f32[8, 2]    is    {"float32": [8, 17], "bfloat16": [8, 7]}
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jzero.core.base.types import DType

Buffers: TypeAlias = dict[str, jax.Array]


def pack_rows(arrays: Sequence[jax.Array]) -> Buffers:
    """Returns arrays with the same number of rows, side by side."""
    parts: dict[str, list[jax.Array]] = collections.defaultdict(list)
    for x in arrays:
        parts[x.dtype.name].append(x.reshape(len(x), -1))
    return {dtype: jnp.concatenate(xs, 1) for dtype, xs in parts.items()}


def unpack_rows(buffers: Buffers, shapes: Sequence[tuple[Sequence[int], DType]]) -> list[jax.Array]:
    """Returns the arrays that were packed, each with as many rows as the buffers; drops padding.

    Args:
      buffers: The buffers.
      shapes: The shape of a row of each array, and its dtype.
    """
    offsets: dict[str, int] = collections.defaultdict(int)
    arrays = []
    for shape, dtype in shapes:
        name, size = jnp.dtype(dtype).name, math.prod(shape)
        part = buffers[name][:, offsets[name] : offsets[name] + size]
        arrays.append(part.reshape(-1, *shape))
        offsets[name] += size
    return arrays


def widest(buffers: Sequence[Mapping[str, jax.Array | jax.ShapeDtypeStruct]]) -> dict[str, int]:
    """Returns for each dtype the width of the widest buffer."""
    widths: dict[str, int] = collections.defaultdict(int)
    for dtype, x in itertools.chain.from_iterable(x.items() for x in buffers):
        widths[dtype] = max(widths[dtype], x.shape[1])
    return dict(sorted(widths.items()))


def widened(buffers: Buffers, widths: Mapping[str, int], num_rows: int) -> Buffers:
    """Returns buffers of these dtypes and widths, padded with zeros."""

    def wide(dtype: str, width: int) -> jax.Array:
        x = buffers.get(dtype, jnp.zeros((num_rows, 0), dtype))
        return jnp.pad(x, ((0, 0), (0, width - x.shape[1])))

    return {dtype: wide(dtype, width) for dtype, width in widths.items()}


def rows_below(buffers: Sequence[Buffers]) -> Buffers:
    """Returns buffers of one row each, one below the other, padded to the widest."""
    widths = widest(buffers)
    wide = [widened(x, widths, 1) for x in buffers]
    return {dtype: jnp.concatenate([x[dtype] for x in wide]) for dtype in widths}


def exchanged(buffers: Sequence[Buffers], swap: Callable[[jax.Array], jax.Array]) -> list[Buffers]:
    """Returns buffers after `swap`, which is called once per dtype."""
    results: list[Buffers] = [{} for _ in buffers]
    for dtype in sorted(set().union(*buffers)):
        having = [i for i, x in enumerate(buffers) if dtype in x]
        parts = [buffers[i][dtype] for i in having]
        ends = list(itertools.accumulate(x.shape[1] for x in parts))
        for i, x in zip(having, jnp.split(swap(jnp.concatenate(parts, 1)), ends[:-1], axis=1), strict=True):
            results[i][dtype] = x
    return results
