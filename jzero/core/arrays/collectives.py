"""What is gathered and reduced in a step: parameters, gradients, and whatever all devices sum.

Shape legend: `D` is the natural size of the cut dimension, `P` the padded one, `N` the devices on
the ZeRO axis, `...` all other dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import AnyMesh, batch_axes
from jzero.core.layout.route import Route, Sums, sum_along
from jzero.core.plan.plan import ZeroPlan


def gather_param(shard: jax.Array, cut: Cut, route: Route) -> jax.Array:
    """Returns a whole parameter from its shards. [..., P/N] -> [..., D]."""
    with jax.named_scope("zero_gather"):
        # Collectives do not support booleans.
        bits = shard.astype(jnp.int8) if shard.dtype == jnp.bool_ else shard
        return cut.to_natural(route.gather(bits, cut).astype(shard.dtype))


def gather_leaf(x: jax.Array, leaf: StateLeaf, plan: ZeroPlan, *, onto: jax.Array | None = None) -> jax.Array:
    """Returns a leaf whole on every device, in its natural shape, by the hops of its gather. Inside `jit`.

    A gather along another dimension than the first moves what all devices sent. Compilers would rather transpose each
    shard, with all that was computed beside it: masters and moments would no longer be updated in place. With `onto`,
    shards arrive one behind the other and are moved then, those of a stack of matrices row by row: only a few rows are
    in memory twice.

    Args:
      x: The leaf, in its natural or its stored shape.
      leaf: Its layout.
      plan: The plan.
      onto: The array whose place the result takes, see `PlatformFacts.transposes_gathers`.
    """
    x, cut = leaf.store(x), leaf.cut_for_collectives
    if cut is None:
        return x
    return _gather_kind(x, onto, cut, plan.route, leaf.manual_spec, plan.mesh, frozenset(batch_axes(plan.config)))


@functools.partial(jax.jit, static_argnums=range(2, 7))  # traced and lowered once for all leaves of a kind
def _gather_kind(  # noqa: PLR0913  # the kind of a leaf
    x: jax.Array,
    onto: jax.Array | None,
    cut: Cut,
    route: Route,
    spec: PartitionSpec,
    mesh: AnyMesh,
    axes: frozenset[str],
) -> jax.Array:
    is_stack = cut.num_stacked == 1 and len(cut.shape) > 2 and not any(cut.other_axes[:1])

    def gather(shard: jax.Array, old: jax.Array | None) -> jax.Array:
        if old is None:
            return gather_param(shard, cut, route)
        if not is_stack:
            return _gather_parts(shard, cut, route)
        for i in range(len(shard)):
            row = _gather_parts(shard[i], cut.drop_leading(), route)  # [D/N, F] -> [D, F]
            old = lax.dynamic_update_index_in_dim(old, row, i, 0)
        return old

    gathered: jax.Array = jax.shard_map(
        gather,
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=False,
    )(x, onto)
    return gathered


def _gather_parts(shard: jax.Array, cut: Cut, route: Route) -> jax.Array:
    """Returns a whole parameter from its shards. [..., P/N, F] -> [..., D, F]."""
    if cut.stored_dim == 0:
        return gather_param(shard, cut, route)
    beside = (None, *cut.axes_beside()) if cut.other_axes else ()
    apart = Cut(0, (cut.num_shards, *shard.shape), cut.num_shards, other_axes=beside)
    parts = gather_param(shard[None], apart, route)  # [N, ..., P/N, F]
    return cut.join(parts)


def reduce_shard(x: jax.Array, cut: Cut, route: Route, sums: Sums) -> jax.Array:
    """Sums `x` over all devices with a part of the batch; returns this device's shard. [..., D] -> [..., P/N]."""
    with jax.named_scope("zero_reduce"):
        return route.reduce(cut.to_stored(sums.prepare(x)), cut)


def own_shard(x: jax.Array, cut: Cut, route: Route) -> jax.Array:
    """Returns this device's shard of a value that all devices hold. [..., D] -> [..., P/N]."""
    return route.own_part(cut.to_stored(x), cut)


def reduce_whole(x: jax.Array, sums: Sums) -> jax.Array:
    """Sums the gradient `x` over all devices with a part of the batch; every device gets all of it."""
    return sum_over(sums.prepare(x), sums)


def sum_over(x: jax.Array, sums: Sums) -> jax.Array:
    """Sums `x` over all devices that hold a part of the batch."""
    with jax.named_scope("zero_reduce"):
        return jnp.asarray(sum_along(sums.widen(x), *sums.axes), x.dtype)


def mean(x: jax.Array, sums: Sums) -> jax.Array:
    """Averages `x` over all devices that hold a part of the batch."""
    with jax.named_scope("zero_reduce"):
        axes = _shared_axes(sums)
        return jnp.asarray(lax.pmean(sums.widen(x), axes), x.dtype) if axes else x


def from_first(x: jax.Array, sums: Sums) -> jax.Array:
    """Returns the `x` of the first device that holds a part of the batch."""
    with jax.named_scope("zero_reduce"):
        axes = _shared_axes(sums)
        if not axes:
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # keys have no sum
            bits = from_first(jax.random.key_data(x), sums)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
        small = sums.widen(x.astype(jnp.int8) if x.dtype == jnp.bool_ else x)
        return lax.psum(jnp.where(lax.axis_index(axes) == 0, small, 0), axes).astype(x.dtype)


def gather_rows(x: jax.Array, sums: Sums) -> jax.Array:
    """Returns the rows of all devices, in the order of the batch. [B, ...] -> [n B, ...]."""
    with jax.named_scope("zero_reduce"):
        axes = _shared_axes(sums)
        bits = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
        return lax.all_gather(bits, axes, axis=0, tiled=True).astype(x.dtype) if axes else x


def extreme(x: jax.Array, sums: Sums, along: Callable[[jax.Array, tuple[str, ...]], jax.Array]) -> jax.Array:
    """Returns the largest or smallest `x` of all devices, element by element: `along` is `lax.pmax` or `lax.pmin`.

    As of `jnp.max`, the result is not a number if any is not; the collectives alone may lose that.
    """
    with jax.named_scope("zero_reduce"):
        axes = _shared_axes(sums)
        if not axes:
            return x
        found = along(sums.widen(x.astype(jnp.int8) if x.dtype == jnp.bool_ else x), axes).astype(x.dtype)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return found
        return jnp.where(lax.pmax(jnp.isnan(x).astype(jnp.int8), axes) > 0, jnp.asarray(jnp.nan, x.dtype), found)


def _shared_axes(sums: Sums) -> tuple[str, ...]:
    """Returns the axes of the batch with more than one device."""
    return tuple(axis for axis in sums.axes if lax.axis_size(axis) > 1)


def batch_index(sums: Sums) -> jax.Array:
    """Returns the index of this device among those that hold a part of the batch."""
    index = jnp.zeros((), jnp.int32)
    for name in sums.axes:
        index = index * lax.axis_size(name) + lax.axis_index(name)
    return index


def fold_keys(keys: jax.Array, index: ArrayLike) -> jax.Array:
    """Returns keys, of any shape, into which the index of a device is folded: devices draw different numbers."""
    flat = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.reshape(-1), index)
    return flat.reshape(keys.shape)
