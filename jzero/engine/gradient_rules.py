"""Equations that run on shards of reduced gradients: they add, place or relabel.

In: an equation whose result is a gradient with a `Reduction`. Out: the reductions of its inputs, and a function that
makes the shard of the result. The equations are the transposes of those that `shard_rules` apply to parameters. For a
slice `w[i]`, [L, D, F] -> [D, F], the gradient is

    d:f32[L,D,F] = dynamic_update_slice zeros c i

On shards, this makes [L, D/N, F] from [D/N, F].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jzero.engine.gradient_exits import OnShards, Part, Reduction
from jzero.engine.shard_rules import widens
from jzero.jaxpr.primitives import CALLS, REMAT

if TYPE_CHECKING:
    from jzero.engine.reductions import Search

__all__ = ["GRADIENT_RULES", "PLACES", "RELABELS"]

Equation = Any


def _same(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    return OnShards({0: leaving}, lambda xs: xs[0]) if search.is_free(eqn.invars[0]) else None  # [D/N, F], as it is


def _cast(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    """A widening cast: the gradient is reduced before it, in the narrower dtype."""
    old, new = eqn.invars[0].aval.dtype, jnp.dtype(eqn.params["new_dtype"])
    are_floating = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    # After a narrowing cast less travels, so the gradient is reduced there and not followed further back.
    return _same(search, eqn, leaving) if are_floating and widens(old, new) else None


def _constraint(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    sharding = eqn.params["sharding"]
    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    if not isinstance(sharding, NamedSharding) or not set(jax.tree.leaves(tuple(sharding.spec))) <= set(mesh):
        return None
    axes = {n: 1 if n in leaving.wire.batch_axes else size for n, size in mesh.items()}  # ZeRO's are manual here
    cut = leaving.cut.with_other_axes(sharding.spec, axes)
    return _same(search, eqn, dataclasses.replace(leaving, cut=cut) if cut.other_axes else leaving)


def _transpose(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    (x,), order = eqn.invars, tuple(eqn.params["permutation"])
    maker = search.find_maker(x)
    # A transpose right after a product belongs to it: reducing before it would change the layout of a loop's stacks.
    is_apart = maker is not None and maker.primitive.name in {"scan"} | CALLS | REMAT
    # A flat cut runs over several dimensions, which a transpose would interleave.
    if not search.is_free(x) or leaving.cut.flat or not is_apart:
        return None
    inverse = [order.index(d) for d in range(len(order))]  # where each dimension of `x` is in the result
    return OnShards({0: leaving.for_shape(x.aval.shape, inverse)}, lambda xs: lax.transpose(xs[0], order))


def _broadcast(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    """A gradient of zeros, or one that gets new dimensions of size one."""
    x, shape = eqn.invars[0], eqn.outvars[0].aval.shape
    if search.is_zero(x):
        return OnShards({}, lambda xs: leaving.zeros())  # [D/N, F]: the zeros never exist whole
    dims = tuple(eqn.params["broadcast_dimensions"])
    added = [d for d in range(len(shape)) if d not in dims]
    is_relabelled = math.prod(x.aval.shape) == math.prod(shape)  # no element is repeated
    if not search.is_free(x) or not is_relabelled or any(map(leaving.cut.cuts, added)):
        return None
    return OnShards({0: leaving.for_shape(x.aval.shape, dims)}, lambda xs: lax.expand_dims(xs[0], added))


def _pad(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    (x, value), widths = eqn.invars, [tuple(map(int, w)) for w in eqn.params["padding_config"]]
    grows = all(low >= 0 and high >= 0 for low, high, _ in widths)  # a negative width drops elements
    pads_cut = any(any(w) and leaving.cut.cuts(d) for d, w in enumerate(widths))
    if not search.is_free(x) or not search.is_zero(value) or not grows or pads_cut:
        return None
    own = leaving.cut.for_shard(widths, (0, 0, 0))
    return OnShards({0: leaving.for_shape(x.aval.shape)}, lambda xs: lax.pad(xs[0], jnp.zeros((), xs[0].dtype), own))


def _update(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    whole, x, *_ = eqn.invars  # for `w[i]`: [L, D, F], [1, D, F], then the indices
    sizes = zip(x.aval.shape, whole.aval.shape, strict=True)
    is_partial = any(a != b and leaving.cut.cuts(d) for d, (a, b) in enumerate(sizes))  # a part of the cut dimension
    if not search.is_free(x) or not search.is_zero(whole) or is_partial:
        return None

    def apply(inputs: list[Any]) -> jax.Array:
        _, shard, *index = inputs  # [1, D/N, F], then the indices
        # [L, D/N, F]. Nothing reads the whole zeros, inputs[0], any more.
        return lax.dynamic_update_slice(leaving.zeros(), shard, leaving.cut.for_shard(index, jnp.zeros_like(index[0])))

    return OnShards({1: leaving.for_shape(x.aval.shape)}, apply)


def _add(search: Search, eqn: Equation, leaving: Reduction) -> OnShards | None:
    """See [Note: Several uses]."""
    x, y = eqn.invars
    given = [search.given[v] for v in (x, y) if v in search.given]
    if not search.is_free(x) or not search.is_free(y) or any(g != leaving for g in given):
        return None
    are_parts = search.is_part(x, leaving) or search.is_part(y, leaving)
    # Each summand is reduced by itself; then shards are added, [D/N, F].
    if given or are_parts or (leaving.by_use and search.is_loop_between(x, y)):
        return OnShards({0: leaving, 1: leaving}, lambda xs: lax.add(*xs))
    search.leaving |= dict.fromkeys((x, y), Part(leaving.is_awaited))  # whole, until their sum is reduced
    return None


PLACES = frozenset(["dynamic_update_slice", "pad"])
RELABELS = frozenset(["broadcast_in_dim", "convert_element_type", "copy", "sharding_constraint", "transpose"])
GRADIENT_RULES: dict[str, Callable[[Search, Equation, Reduction], OnShards | None]] = {
    "add_any": _add,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _cast,
    "copy": _same,
    "dynamic_update_slice": _update,
    "pad": _pad,
    "sharding_constraint": _constraint,
    "transpose": _transpose,
}
