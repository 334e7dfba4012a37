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

from jzero.core.arrays.chunks import Chunk, for_each_chunk, read_chunk, split
from jzero.core.config.precision import cast, scale_by, wide_dtype
from jzero.core.layout.mesh import shard_axes
from jzero.core.layout.placement import memory_of, on_device
from jzero.core.layout.platform import platform_facts
from jzero.core.layout.route import sum_along
from jzero.core.plan.plan import ZeroPlan


def grad_norm(reduced: list[jax.Array], factors: list[jax.Array | None], plan: ZeroPlan) -> tuple[jax.Array, jax.Array]:
    """Returns the global norm of reduced gradients times factors, and, if the policy asks, which are not finite."""
    zero, counts = jnp.zeros((), jnp.float32), plan.config.policy.skips
    pairs = list(zip(reduced, plan.leaves, strict=True)) if reduced else []
    inexact = [x if leaf.trained and jnp.issubdtype(x.dtype, jnp.inexact) else None for x, leaf in pairs]
    sums = [
        [zero] * (1 + counts) if x is None else _squares_and_not_finite(x, [] if factor is None else [factor], plan)
        for x, factor in zip(inexact, factors, strict=True)
    ]
    dtype = functools.reduce(np.promote_types, (square.dtype for square, *_ in sums), zero.dtype)
    sharded = replicated = zero.astype(dtype)  # sums of squares: of shards, and of whole leaves
    for (square, *_), (_, leaf) in zip(sums, pairs, strict=True):
        if leaf.grad.cut is None:
            replicated = lax.add(replicated, cast(square, dtype))  # equal on all devices, so it counts once
        else:
            sharded = lax.add(sharded, cast(square, dtype))  # of this device's [D/N, F]
    if not counts or not reduced:
        return jnp.sqrt(sum_along(sharded, *shard_axes(plan.config)) + replicated), jnp.zeros((0,), jnp.bool_)
    # Leaves that every device holds whole are counted N times, which does not change whether the count is 0.
    not_finite = jnp.stack([count for _, count in sums])
    sharded, totals = sum_along((sharded, not_finite), *shard_axes(plan.config))  # one `psum` for both
    return jnp.sqrt(sharded + replicated), totals > 0


@functools.partial(jax.jit, static_argnames="counts")  # traced once per shape, by `lax`, three times as fast as `jnp`
def _sums(x: jax.Array, factors: list[jax.Array], *, counts: bool) -> list[jax.Array]:
    x = scale_by(x, *factors)
    parts = [lax.real(x), lax.imag(x)] if jnp.issubdtype(x.dtype, jnp.complexfloating) else [x]
    axes = tuple(range(x.ndim))
    squares = lax.reduce_sum(functools.reduce(lax.add, map(lax.square, parts)), axes)
    if not counts:
        return [squares]
    is_finite = functools.reduce(lax.bitwise_and, map(lax.is_finite, parts))
    return [squares, lax.reduce_sum(lax.convert_element_type(lax.bitwise_not(is_finite), jnp.float32), axes)]


def _squares_and_not_finite(x: jax.Array, factors: list[jax.Array], plan: ZeroPlan) -> list[jax.Array]:
    """Returns the sum of squares of a gradient times factors and, if the policy asks, how many are not finite."""
    counts = plan.config.policy.skips
    if memory_of(x) == "device":
        return _sums(x, factors, counts=counts)
    is_tiled = platform_facts(plan.mesh).is_tiled
    chunking = split(x.shape, x.dtype.itemsize, plan.config.offload.chunk_bytes, tiled=is_tiled)
    # Chunk by chunk: a device need not have room for all of a gradient that is on the host.
    x = x.reshape(chunking.view)

    def step(chunk: Chunk, total: list[jax.Array]) -> list[jax.Array]:
        return list(map(lax.add, total, _sums(on_device(read_chunk(x, chunk, chunking)), factors, counts=counts)))

    dtype = wide_dtype(jnp.real(jnp.zeros((), x.dtype)).dtype)
    return for_each_chunk(step, [jnp.zeros((), dtype), jnp.zeros((), jnp.float32)][: 1 + counts], chunking)
