"""Equations that run on shards of reduced gradients: they add, place or relabel.

    GRADIENT_RULES[name](def_use, eqn, reduction) -> Passed | None

A rule says how the inputs of an equation leave whose result leaves with a `Reduction`, and makes the shard of the
result. The equations are the transposes of those that `shard_rules` apply to parameters. For a slice `w[i]`, [L, D, F]
-> [D, F], the gradient is

    d:f32[L,D,F] = dynamic_update_slice zeros c i

On shards, this makes [L, D/N, F] from [D/N, F].

    DefUse(jaxpr, reductions)

`gradient_rules` ask it before they let an equation run on shards; `reductions` are of the inputs that are shards.

    GradientExit = Reduction | Unreduced

A whole gradient of one device's rows, [D, F], leaves with a `Reduction` as this device's shard of the sum over all
devices, [D/N, F]; with an `Unreduced` it leaves as it is, to be reduced later.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.base.types import DType
from jzero.core.engine.placed import reduce_p
from jzero.core.engine.shard_rules import widens
from jzero.core.jaxpr.equations import equations_in
from jzero.core.jaxpr.lookups import lookup_of
from jzero.core.jaxpr.primitives import CALLS, REMAT
from jzero.core.jaxpr.sizes import mixes
from jzero.core.layout.cut import Cut
from jzero.core.layout.lookups import hop_of_rows
from jzero.core.layout.route import Route, Sums


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


def _add_rows(def_use: DefUse, eqn: JaxprEqn, reduction: Reduction) -> Passed | None:
    """The gradients of rows that were looked up, which are added on the shard."""
    lookup = lookup_of(eqn) if reduction.by_rows and def_use.is_zero(eqn.invars[0]) else None
    if lookup is None or hop_of_rows(reduction.cut, reduction.route, reduces=True) is None:
        return None
    how = reduction
    params = {"path": how.path, "is_awaited": how.is_awaited, "cut": how.cut, "dtype": how.dtype, "lookup": lookup}
    # [V, D/N] or [V/N, D]. Nothing reads the whole zeros any more.
    return Passed({}, lambda xs: reduce_p.bind(xs[2], xs[1], **params, route=how.route, sums=how.sums))


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
    if reduction.by_rows and any(lookup_of(x) for x in equations_in(eqn) if x.primitive.name == "scatter-add"):
        return True
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
    "scatter-add": _add_rows,
    "sharding_constraint": _constraint,
    "transpose": _transpose,
}


RELABELS = frozenset(
    ["broadcast_in_dim", "convert_element_type", "copy", "reshard", "sharding_constraint", "transpose"]
)


class DefUse:
    """The values of a program, with the equations that make and read them.

    Attributes:
      reductions: The inputs that are shards of gradients, each with its reduction.
    """

    def __init__(self, jaxpr: Jaxpr, reductions: Mapping[Var, Reduction]) -> None:
        atoms = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
        # An output is a use, too: a value that is returned and read elsewhere cannot be a shard.
        self._uses = collections.Counter(v for v in atoms if not isinstance(v, Literal))
        self._definitions = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._first: dict[Var, int] = {}  # caches `_find_first_definition`
        self.eqns, self.reductions = jaxpr.eqns, reductions

    def is_free(self, atom: Atom) -> bool:
        """Whether nothing else reads a value, so that it can be a shard."""
        return (
            not isinstance(atom, Literal)
            and self._uses[atom] == 1
            and (atom in self._definitions or atom in self.reductions)
        )

    def find(self, atom: Atom) -> JaxprEqn | None:
        """Returns the equation that made a value; `None` for literals and inputs."""
        return (
            None if isinstance(atom, Literal) or atom not in self._definitions else self.eqns[self._definitions[atom]]
        )

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero."""
        if isinstance(atom, Literal):
            return not compat.type_of(atom).shape and bool(compat.value_of(atom) == 0)
        maker = self.find(atom)
        return maker is not None and maker.primitive.name == "broadcast_in_dim" and self.is_zero(maker.invars[0])

    @functools.cached_property
    def _loops(self) -> list[int]:
        nested = ((i, equations_in(eqn)) for i, eqn in enumerate(self.eqns) if any(compat.contained_jaxprs(eqn)))
        return [i for i, eqns in nested if any(x.primitive.name == "scan" and mixes(x) for x in eqns)]

    def is_loop_between(self, x: Atom, y: Atom) -> bool:
        """Whether a loop with products stands between the equations that made two gradients, or makes the second."""
        first, second = sorted(map(self._find_first_definition, (x, y)))
        return any(first < i <= second for i in self._loops)  # `<=`: the second may come out of the loop

    def _find_first_definition(self, atom: Atom) -> int:
        """Returns the index of the first equation that made a summand of a gradient; -1 for inputs and literals."""
        if isinstance(atom, Literal) or atom not in self._definitions:
            return -1
        if atom not in self._first:
            eqn = self.eqns[self._definitions[atom]]
            relabels = eqn.primitive.name in RELABELS or eqn.primitive.name == "add_any"
            self._first[atom] = (
                min(map(self._find_first_definition, eqn.invars)) if relabels else self._definitions[atom]
            )
        return self._first[atom]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A gradient that is reduced where it is made.

    Attributes:
      path: The key path of its parameter; inside a function that layers share, which result it is.
      route: How it travels.
      dtype: The dtype of its shards.
      by_use: Whether to reduce for each use if a loop stands between the uses.
      by_rows: Whether gradients of rows that were looked up travel, not the whole gradient.
      to_host: Whether shards move to host memory at once.
      is_awaited: Whether a loop, or the first block, waits for it if it is made outside blocks.
    """

    path: str
    cut: Cut
    route: Route
    sums: Sums
    dtype: DType
    by_use: bool
    by_rows: bool = False
    to_host: bool = False
    is_awaited: bool = True

    def place(self, shard: jax.Array) -> jax.Array:
        """Returns a shard in its destination memory."""
        return jax.device_put(shard, jax.memory.Space.Host) if self.to_host else shard

    def on_device(self) -> Reduction:
        """Returns the reduction to device memory, for shards that equations still compute on: hosts only copy."""
        return dataclasses.replace(self, to_host=False)

    def shard_type(self) -> jax.core.ShapedArray:
        """Returns the type of its shards. [D/N, F]."""
        memory = jax.memory.Space.Host if self.to_host else jax.memory.Space.Device
        return compat.array_type(self.cut.shard_shape, self.dtype, memory)

    def zeros(self) -> jax.Array:
        """Returns the shard of a gradient that is zero."""
        return jnp.zeros(self.cut.shard_shape, self.dtype)  # [D/N, F]

    def for_row(self) -> Reduction | None:
        """Returns the reduction of one row of a stack; `None` if the rows are cut."""
        # An iteration makes one row, [D, F]. If the stack is cut over its rows, [L/N, D, F], one device holds that row.
        return None if self.cut.dim == 0 else dataclasses.replace(self, cut=self.cut.drop_leading())

    def for_shape(self, shape: Sequence[int], dims: Sequence[int] | None = None) -> Reduction:
        """Returns the reduction of an array of another shape, whose dimension `i` was `dims[i]` here."""
        cut = self.cut.for_shape(shape, range(len(shape)) if dims is None else dims)
        return dataclasses.replace(self, cut=cut)


@dataclasses.dataclass(frozen=True)
class Unreduced:
    """A whole gradient, or a summand of one, that is reduced later.

    Attributes:
      path: The key path of its parameter; inside a function that layers share, which result it is.
      is_awaited: Whether a loop, or the first block, waits for it if it is made outside blocks.
    """

    path: str
    is_awaited: bool = True


GradientExit: TypeAlias = Reduction | Unreduced
