"""The global norm of reduced gradients, and whether they are finite.

    grad_norm(reduced, factors, plan) -> tuple[jax.Array, jax.Array]

Gradients are shards or whole, each with its factor. One small sum over the devices that hold different shards suffices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.arrays.chunks import Chunk, for_each_chunk, read_chunk, split
from jzero.config.precision import cast, scale_by, wide_dtype
from jzero.layout.mesh import shard_axes
from jzero.layout.placement import memory_of, on_device
from jzero.layout.platform import platform_facts
from jzero.layout.sums import sum_along
from jzero.plan.plan import ZeroPlan


def grad_norm(reduced: list[jax.Array], factors: list[jax.Array | None], plan: ZeroPlan) -> tuple[jax.Array, jax.Array]:
    """Returns the global norm of reduced gradients times factors, and, if the policy asks, which are not finite."""
    zero = jnp.zeros((), jnp.float32)
    pairs = list(zip(reduced, plan.leaves, strict=True)) if reduced else []
    inexact = [x if leaf.trained and jnp.issubdtype(x.dtype, jnp.inexact) else None for x, leaf in pairs]
    sums = [
        (zero, zero) if x is None else _square_and_not_finite(x, [] if factor is None else [factor], plan)
        for x, factor in zip(inexact, factors, strict=True)
    ]
    dtype = functools.reduce(np.promote_types, (square.dtype for square, _ in sums), zero.dtype)
    sharded = replicated = zero.astype(dtype)  # sums of squares: of shards, and of whole leaves
    for (square, _), (_, leaf) in zip(sums, pairs, strict=True):
        if leaf.grad.cut is None:
            replicated = lax.add(replicated, cast(square, dtype))  # equal on all devices, so it counts once
        else:
            sharded = lax.add(sharded, cast(square, dtype))  # of this device's [D/N, F]
    if not plan.config.policy.skips or not reduced:
        return jnp.sqrt(sum_along(sharded, *shard_axes(plan.config)) + replicated), jnp.zeros((0,), jnp.bool_)
    # Leaves that every device holds whole are counted N times, which does not change whether the count is 0.
    counts = [count for _, count in sums]
    sharded, totals = sum_along((sharded, jnp.stack(counts)), *shard_axes(plan.config))  # one `psum` for both
    return jnp.sqrt(sharded + replicated), totals > 0


@jax.jit  # traced once per shape; uses `lax`, which traces three times as fast as `jnp`
def _sums(x: jax.Array, factors: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    x = scale_by(x, *factors)
    parts = [lax.real(x), lax.imag(x)] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]
    square = functools.reduce(lax.add, map(lax.square, parts))
    is_finite = functools.reduce(lax.bitwise_and, map(lax.is_finite, parts))
    count = lax.convert_element_type(lax.bitwise_not(is_finite), jnp.float32)
    axes = tuple(range(x.ndim))
    return lax.reduce_sum(square, axes), lax.reduce_sum(count, axes)


def _square_and_not_finite(x: jax.Array, factors: list[jax.Array], plan: ZeroPlan) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of squares of a reduced gradient times factors, and the number of its non-finite elements."""
    if memory_of(x) == "device":
        return _sums(x, factors)
    is_tiled = platform_facts(plan.mesh).is_tiled
    pieces = split(x.shape, x.dtype.itemsize, plan.config.offload.chunk_bytes, tiled=is_tiled)
    # Chunk by chunk: a device need not have room for all of a gradient that is on the host.
    x = x.reshape(pieces.view)

    def step(chunk: Chunk, total: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        square, count = _sums(on_device(read_chunk(x, chunk, pieces)), factors)
        return total[0] + square, total[1] + count

    dtype = wide_dtype(jnp.real(jnp.zeros((), x.dtype)).dtype)
    return for_each_chunk(step, (jnp.zeros((), dtype), jnp.zeros((), jnp.float32)), pieces)
