"""Equations that run on shards of reduced gradients: they add, place or relabel.

    GRADIENT_RULES[name](def_use, eqn, reduction) -> Passed | None

A rule says how the inputs of an equation leave whose result leaves with a `Reduction`, and makes the shard of the
result. The equations are the transposes of those that `shard_rules` apply to parameters. For a slice `w[i]`, [L, D, F]
-> [D, F], the gradient is

    d:f32[L,D,F] = dynamic_update_slice zeros c i

On shards, this makes [L, D/N, F] from [D/N, F].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.engine.def_use import DefUse
from jzero.core.engine.gradient_exits import GradientExit, Reduction, Unreduced
from jzero.core.engine.shard_rules import widens
from jzero.core.jaxpr.primitives import CALLS, REMAT


class Passed(NamedTuple):
    """An equation that a gradient passes on its way back to where it was made.

    Attributes:
      inputs: For each input that is a gradient, by index, how it leaves.
      apply: From all inputs, shards among them, to the shard of the result; `None` if the equation stays as it is, on
        whole inputs, and its result is reduced.
    """

    inputs: Mapping[int, GradientExit]
    apply: Callable[[list[jax.Array]], jax.Array] | None


def _same(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    return Passed({0: reduction}, lambda xs: xs[0]) if def_use.is_free(eqn.invars[0]) else None  # [D/N, F], as it is


def _cast(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    """A widening cast: the gradient is reduced before it, in the narrower dtype."""
    old, new = compat.type_of(eqn.invars[0]).dtype, jnp.dtype(eqn.params["new_dtype"])
    are_floating = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    # After a narrowing cast less travels, so the gradient is reduced there and not followed further back.
    return _same(def_use, eqn, reduction) if are_floating and widens(old, new) else None


def _constraint(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    sharding = compat.sharding_said(eqn)
    if not isinstance(sharding, NamedSharding):
        return None
    # ZeRO's axes are manual here.
    axes = dict(sharding.mesh.shape) | {axis: 1 for hop in reduction.route.hops for axis in hop.axes}
    cut = reduction.cut.with_other_axes(sharding.spec, axes)
    return _same(def_use, eqn, dataclasses.replace(reduction, cut=cut) if cut.other_axes else reduction)


def _transpose(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    (x,), order = eqn.invars, tuple(eqn.params["permutation"])
    maker = def_use.find(x)
    # A transpose right after a product belongs to it: reducing before it would change the layout of a loop's stacks.
    is_apart = maker is not None and maker.primitive.name in {"scan"} | CALLS | REMAT
    # A flat cut runs over several dimensions, which a transpose would interleave.
    if not def_use.is_free(x) or reduction.cut.flat or not is_apart:
        return None
    inverse = [order.index(d) for d in range(len(order))]  # where each dimension of `x` is in the result
    return Passed({0: reduction.for_shape(compat.type_of(x).shape, inverse)}, lambda xs: lax.transpose(xs[0], order))


def _broadcast(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    """A gradient of zeros, or one that gets new dimensions of size one."""
    x, shape = eqn.invars[0], compat.type_of(eqn.outvars[0]).shape
    if def_use.is_zero(x):
        return Passed({}, lambda xs: reduction.zeros())  # [D/N, F]: the zeros never exist whole
    dims = tuple(eqn.params["broadcast_dimensions"])
    added = [d for d in range(len(shape)) if d not in dims]
    is_relabelled = math.prod(compat.type_of(x).shape) == math.prod(shape)  # no element is repeated
    if not def_use.is_free(x) or not is_relabelled or any(map(reduction.cut.cuts, added)):
        return None
    return Passed({0: reduction.for_shape(compat.type_of(x).shape, dims)}, lambda xs: lax.expand_dims(xs[0], added))


def _pad(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    (x, value), widths = eqn.invars, [(int(a), int(b), int(c)) for a, b, c in eqn.params["padding_config"]]
    grows = all(low >= 0 and high >= 0 for low, high, _ in widths)  # a negative width drops elements
    pads_cut = any(any(w) and reduction.cut.cuts(d) for d, w in enumerate(widths))
    if not def_use.is_free(x) or not def_use.is_zero(value) or not grows or pads_cut:
        return None
    own = reduction.cut.for_shard(widths, lambda _: (0, 0, 0))
    return Passed(
        {0: reduction.for_shape(compat.type_of(x).shape)}, lambda xs: lax.pad(xs[0], jnp.zeros((), xs[0].dtype), own)
    )


def _update(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    zeros, x, *_ = eqn.invars  # for `w[i]`: [L, D, F], [1, D, F], then the indices
    sizes = zip(compat.type_of(x).shape, compat.type_of(zeros).shape, strict=True)
    is_partial = any(a != b and reduction.cut.cuts(d) for d, (a, b) in enumerate(sizes))  # a part of the cut dimension
    if not def_use.is_free(x) or not def_use.is_zero(zeros) or is_partial:
        return None

    def apply(inputs: list[jax.Array]) -> jax.Array:
        _, shard, *index = inputs  # [1, D/N, F], then the indices
        # [L, D/N, F]. Nothing reads the whole zeros, inputs[0], any more.
        return lax.dynamic_update_slice(
            reduction.zeros(), shard, reduction.cut.for_shard(index, lambda _: jnp.zeros_like(index[0]))
        )

    return Passed({1: reduction.for_shape(compat.type_of(x).shape)}, apply)


def _add(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    """See [Note: Several uses]."""
    x, y = eqn.invars
    reductions = [how for v, how in def_use.reductions.items() if v is x or v is y]
    if not def_use.is_free(x) or not def_use.is_free(y) or any(other != reduction for other in reductions):
        return None
    are_parts = _is_part(def_use, x, reduction) or _is_part(def_use, y, reduction)
    # Each summand is reduced by itself; then shards are added, [D/N, F].
    if reductions or are_parts or (reduction.by_use and def_use.is_loop_between(x, y)):
        return Passed({0: reduction, 1: reduction}, lambda xs: lax.add(*xs))
    return Passed(
        dict.fromkeys((0, 1), Unreduced(reduction.path, reduction.is_awaited)), None
    )  # whole: their sum is reduced


def _is_part(def_use: DefUse, atom: Atom, reduction: Reduction) -> bool:
    """Whether a gradient is that of a part of a parameter, padded with zeros, and can be cut into shards."""
    eqn = def_use.find(atom)
    if eqn is None:
        return False
    if eqn.primitive.name == "add_any":
        return any(_is_part(def_use, v, reduction) for v in eqn.invars)
    return eqn.primitive.name in PLACES and GRADIENT_RULES[eqn.primitive.name](def_use, eqn, reduction) is not None


PLACES = frozenset(["dynamic_update_slice", "pad"])
GRADIENT_RULES: dict[str, Callable[[DefUse, JaxprEqn, Reduction], Passed | None]] = {
    "add_any": _add,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _cast,
    "copy": _same,
    "dynamic_update_slice": _update,
    "pad": _pad,
    "reshard": _constraint,
    "sharding_constraint": _constraint,
    "transpose": _transpose,
}
