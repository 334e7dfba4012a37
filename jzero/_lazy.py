"""Lazy parameters: a shard and how to make it whole, kept so through casts, slices and other cheap operations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jzero import _compat
from jzero._collectives import Wire, gather_param, view_param
from jzero._layout import Cut
from jzero._placement import is_on_host, on_device
from jzero._rounding import narrow

__all__ = [
    "Bundle",
    "Deferred",
    "Lazy",
    "after",
    "constrained",
    "defer",
    "fenced",
    "first_elements",
    "is_free",
    "is_lazy",
    "make_whole",
    "on_shard",
]

Equation = Any

CHEAP = frozenset(
    "abs add bitcast_convert_type broadcast_in_dim ceil clamp concatenate conj convert_element_type copy cos div "
    "dynamic_slice eq exp exp2 expand_dims expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt max "
    "min mul ne neg not pad pow real reduce_precision reshape rev round rsqrt select_n sign sin slice sqrt square "
    "squeeze stop_gradient sub tanh transpose".split()
)
"""Operations that cost little beside the gather of their operands: applied to parameters alone they are repeated at
each use rather than their (whole-sized) result being kept."""

MAX_DEFERRED = 16
"""Operations in one deferred value; longer chains (a recurrence over parameters, say) are computed once and kept."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Lazy:
    """A parameter that is made whole where it is used.

    Attributes:
      shard: This device's part, here or in host memory; `None` if every device holds the parameter whole.
      whole: The whole parameter, if every device holds it.
      slot: An array in the layout and dtype of the gradient, through which that leaves; `None` if there is none. One in
        host memory takes the gradient there.
      cut: How the part lies in the natural shape.
      wire: The axes to gather and reduce over.
      wire_dtype: What the value is cast to on the device that holds it, before it travels.
      dtype: What the whole value is cast to. Never narrower than `wire_dtype`.
    """

    shard: jax.Array | None
    whole: jax.Array | None
    slot: jax.Array | None
    cut: Cut
    wire: Wire
    wire_dtype: Any
    dtype: Any

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Splits into arrays and static layout."""
        return (self.shard, self.whole, self.slot), (self.cut, self.wire, self.wire_dtype, self.dtype)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> Lazy:
        """Joins what `tree_flatten` split."""
        return cls(*children, *aux)

    @property
    def shape(self) -> tuple[int, ...]:
        """Natural shape."""
        return self.cut.shape

    def drop_leading(self) -> Lazy:
        """Returns the layout of one slice; the arrays are already sliced (by a scan)."""
        return dataclasses.replace(self, cut=self.cut.drop_leading())

    def make_whole(self) -> jax.Array:
        """Returns the whole value."""
        if self.whole is not None:
            value = self.whole.astype(self.wire_dtype)
        else:
            assert self.shard is not None
            # A shard in host memory is brought here, where it is needed.
            value = gather_param(narrow(on_device(self.shard), self.wire_dtype), self.cut, self.wire)
        if self.slot is not None:
            value = view_param(value, landed(self.slot), self.cut, self.wire)
        return value.astype(self.dtype)

    def land(self) -> Lazy:
        """Returns the same with a slot on the device: gradients of all its uses are summed there, and moved once."""
        return self if self.slot is None else dataclasses.replace(self, slot=landed(self.slot))


def landed(slot: jax.Array) -> jax.Array:
    """Returns a slot on the device for one that may be in host memory; its gradient goes there."""
    return _land(slot) if is_on_host(slot) else slot


@jax.custom_vjp
def _land(slot: jax.Array) -> jax.Array:
    return jnp.zeros(slot.shape, slot.dtype)


_land.defvjp(lambda slot: (_land(slot), None), lambda _, grad: (jax.device_put(grad, jax.memory.Space.Host),))


class _Operation(NamedTuple):
    """An equation's operation as a static, comparable value."""

    key: Any
    eqn: Equation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Operation) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Deferred:
    """A cheap operation on lazy values alone, repeated at each use.

    Attributes:
      inputs: Lazy values, or arrays of one element.
      operation: The operation.
    """

    inputs: tuple[Any, ...]
    operation: _Operation

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Operation]:
        """Splits into inputs and static operation."""
        return self.inputs, self.operation

    @classmethod
    def tree_unflatten(cls, operation: _Operation, inputs: Sequence[Any]) -> Deferred:
        """Joins what `tree_flatten` split."""
        return cls(tuple(inputs), operation)

    @property
    def shape(self) -> tuple[int, ...]:
        """Natural shape."""
        return tuple(self.operation.eqn.outvars[0].aval.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self.operation.eqn.outvars[0].aval.dtype

    @property
    def num_operations(self) -> int:
        """Operations that one use repeats, those that it shares with itself counted each time."""
        return 1 + sum(x.num_operations for x in self.inputs if isinstance(x, Deferred))


def is_lazy(x: Any) -> bool:
    """Whether `x` is a lazy value."""
    return isinstance(x, Lazy | Deferred)


def make_whole(x: Any) -> Any:
    """Returns `x`, made whole if it is lazy."""
    return Bundle.of([x]).whole()[0]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Bundle:
    """Values and what they are made of, so that a parameter that occurs in two of them is one.

    Attributes:
      leaves: The distinct lazy parameters and arrays.
      template: What the values are made of: places among the leaves, or operations and what they are applied to.
    """

    leaves: tuple[Any, ...]
    template: tuple[Any, ...]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Splits into leaves and static template."""
        return self.leaves, self.template

    @classmethod
    def tree_unflatten(cls, template: tuple[Any, ...], leaves: Sequence[Any]) -> Bundle:
        """Joins what `tree_flatten` split."""
        return cls(tuple(leaves), template)

    @classmethod
    def of(cls, values: Sequence[Any]) -> Bundle:
        """Bundles arrays and lazy values; parameters that occur behind a `stop_gradient` alone lose their slot."""
        leaves: list[Any] = []
        index: dict[int, int] = {}
        moving: set[int] = set()

        def template(x: Any, *, moves: bool) -> Any:
            if isinstance(x, Deferred):
                moves = moves and x.operation.eqn.primitive.name != "stop_gradient"
                return x.operation, tuple(template(y, moves=moves) for y in x.inputs)
            i = index.setdefault(id(x), len(leaves))
            if i == len(leaves):
                leaves.append(x)
            if moves:
                moving.add(i)
            return i

        made = tuple(template(x, moves=True) for x in values)
        for i in set(range(len(leaves))) - moving:
            if isinstance(leaves[i], Lazy):
                leaves[i] = dataclasses.replace(leaves[i], slot=None)
        return cls(tuple(leaves), made)

    def of_leaves(self) -> Callable[[Sequence[Any]], Bundle]:
        """Returns what makes the same of other leaves; it holds none of these."""
        template = self.template
        return lambda leaves: Bundle(tuple(leaves), template)

    def map(self, fn: Callable[[Any], Any]) -> Bundle:
        """Returns the same of other leaves."""
        return Bundle(tuple(map(fn, self.leaves)), self.template)

    def values(self) -> list[Any]:
        """Returns the values; equal ones are one."""
        return self._made(lambda x: x, lambda operation, inputs: Deferred(tuple(inputs), operation))

    def whole(self) -> list[Any]:
        """Returns the values whole; what occurs more than once is made once."""
        return self._made(
            lambda x: x.make_whole() if isinstance(x, Lazy) else x,
            lambda operation, inputs: _compat.bind(operation.eqn, inputs)[0],
        )

    def _made(self, leaf: Callable[[Any], Any], apply: Callable[[_Operation, list[Any]], Any]) -> list[Any]:
        made: dict[Any, Any] = {}

        def value(x: Any) -> Any:
            if x not in made:
                made[x] = leaf(self.leaves[x]) if isinstance(x, int) else apply(x[0], [value(y) for y in x[1]])
            return made[x]

        return [value(x) for x in self.template]


def after(params: dict[int, Any], values: Sequence[jax.Array]) -> dict[int, Any]:
    """Returns lazy parameters, or shards, that are not gathered before `values` are there.

    See [Note: Holding gathers back].
    """
    never = _never(values)

    def held(shard: jax.Array) -> jax.Array:
        if never is None:
            return shard
        return lax.select(jnp.broadcast_to(never, shard.shape), jnp.zeros_like(shard), shard)

    return fenced(_map_shards(held, params), [])[0]


def fenced(params: dict[int, Any], cotangents: Sequence[jax.Array]) -> tuple[dict[int, Any], list[jax.Array]]:
    """Returns lazy parameters, or shards, and cotangents behind a barrier, so that no gather is merged with another."""
    params, cotangents = _map_shards(lambda x: x, params), list(cotangents)
    real = [i for i, x in enumerate(cotangents) if x.dtype != jax.dtypes.float0]
    params, beside = lax.optimization_barrier((params, [cotangents[i] for i in real]))
    for i, x in zip(real, beside, strict=True):
        cotangents[i] = x
    return params, cotangents


def _map_shards(fn: Callable[[jax.Array], jax.Array], params: dict[int, Any]) -> dict[int, Any]:
    """Maps shards on the device: XLA would take for the host's what is mixed with something that is there."""

    def one(x: Any) -> Any:
        if not isinstance(x, Lazy):
            return fn(on_device(x))
        return x if x.shard is None else dataclasses.replace(x, shard=fn(on_device(x.shard)))

    return {i: one(x) for i, x in params.items()}


def _never(values: Sequence[jax.Array]) -> jax.Array | None:
    """Returns a boolean that is always false, once the first elements of `values` are there."""
    firsts = [first.astype(jnp.float32) for first in first_elements(values)]
    if not firsts:
        return None
    bits = functools.reduce(lax.bitwise_or, [lax.bitcast_convert_type(x.reshape(()), jnp.uint32) for x in firsts])
    return lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(16)), jnp.uint32(16)) != 0


def first_elements(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns one element of each array of numbers: what waits for them waits for the arrays, or what makes them.

    Of complex numbers it is the real part; arrays of other types, or without elements, are left out.
    """
    numbers = [x for x in values if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    firsts = [lax.stop_gradient(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)) for x in numbers]
    return [lax.real(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x for x in firsts]


def is_free(x: Any) -> bool:
    """Whether making `x` whole costs no communication: every device holds it already."""
    if isinstance(x, Deferred):
        return all(is_free(y) for y in x.inputs)
    return not isinstance(x, Lazy) or x.whole is not None


def defer(eqn: Equation, inputs: Sequence[Any]) -> Deferred | None:
    """Returns the equation's result as a deferred value, if it is cheap and takes parameters alone."""
    if eqn.primitive.name not in CHEAP or len(eqn.outvars) != 1:
        return None
    if not all(is_lazy(x) or np.size(x) == 1 for x in inputs):
        return None
    if sum(x.num_operations for x in inputs if isinstance(x, Deferred)) >= MAX_DEFERRED:
        return None
    key: Any
    try:
        key = (eqn.primitive, tuple(sorted(eqn.params.items())), eqn.outvars[0].aval)
        hash(key)
    except TypeError:  # parameters without an order or a hash: the equation itself is the key
        key = id(eqn)
    return Deferred(tuple(inputs), _Operation(key, eqn))


def on_shard(eqn: Equation, inputs: Sequence[Any]) -> Lazy | None:
    """Returns the equation's result as a lazy parameter, if the operation can be done on the shard itself."""
    lazy, *others = inputs
    if not isinstance(lazy, Lazy) or any(is_lazy(x) for x in others):
        return None
    rule = _ON_SHARD.get(eqn.primitive.name)
    return None if rule is None else rule(lazy, others, eqn.params, tuple(eqn.outvars[0].aval.shape))


def constrained(x: Lazy | Deferred, spec: PartitionSpec) -> Lazy | Deferred:
    """Returns a lazy value whose arrays lie over further mesh axes by `spec`, of its natural shape.

    Those in host memory, and what is computed from parameters alone, lie as they did; so do all if `spec` names no axis
    for a dimension that is not cut.
    """
    if not isinstance(x, Lazy) or any(array is not None and is_on_host(array) for array in (x.shard, x.slot)):
        return x
    before = [*x.cut.further, *[None] * len(x.shape)]
    entries = [b if names is PartitionSpec.UNCONSTRAINED else names for names, b in zip(spec, before, strict=False)]
    cut = x.cut.beside(entries, dict(jax.sharding.get_abstract_mesh().shape))
    if not cut.further or cut == x.cut:
        return x

    def lie(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else lax.with_sharding_constraint(array, PartitionSpec(*cut.further[: array.ndim]))

    whole = None if x.whole is None else lax.with_sharding_constraint(x.whole, spec)
    return dataclasses.replace(x, shard=lie(x.shard), whole=whole, slot=lie(x.slot), cut=cut)


def _same(lazy: Lazy, others: Sequence[Any], params: Mapping[str, Any], shape: tuple[int, ...]) -> Lazy:
    return lazy


def _cast(lazy: Lazy, others: Sequence[Any], params: Mapping[str, Any], shape: tuple[int, ...]) -> Lazy | None:
    new, old = jnp.dtype(params["new_dtype"]), jnp.dtype(lazy.wire_dtype)
    if not (jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)):
        return None
    return dataclasses.replace(lazy, wire_dtype=new if new.itemsize < old.itemsize else old, dtype=new)


def _transpose(lazy: Lazy, others: Sequence[Any], params: Mapping[str, Any], shape: tuple[int, ...]) -> Lazy | None:
    if lazy.cut.flat or is_on_host(lazy.shard):  # hosts only copy
        return None
    order = tuple(params["permutation"])
    return _each(lazy, lambda x, _: lax.transpose(x, order), dims=order, shape=shape)


def _squeeze(lazy: Lazy, others: Sequence[Any], params: Mapping[str, Any], shape: tuple[int, ...]) -> Lazy | None:
    dims = tuple(params["dimensions"])
    if any(_is_cut(lazy.cut, d) for d in dims):
        return None
    rest = [d for d in range(len(lazy.shape)) if d not in dims]
    return _each(lazy, lambda x, _: lax.squeeze(x, dims), dims=rest, shape=shape)


def _slice(lazy: Lazy, others: Sequence[Any], params: Mapping[str, Any], shape: tuple[int, ...]) -> Lazy | None:
    strides = params["strides"] or (1,) * len(lazy.shape)
    start, limit = params["start_indices"], params["limit_indices"]
    for d, size in enumerate(lazy.shape):
        if _is_cut(lazy.cut, d) and (start[d], limit[d], strides[d]) != (0, size, 1):
            return None

    def cut_slice(x: jax.Array, own: Any) -> jax.Array:
        zeros, ones = (0,) * x.ndim, (1,) * x.ndim
        return lax.slice(x, own(start, zeros), own(limit, x.shape), own(strides, ones))

    return _each(lazy, cut_slice, dims=range(len(shape)), shape=shape)


def _dynamic_slice(lazy: Lazy, others: Sequence[Any], params: Mapping[str, Any], shape: tuple[int, ...]) -> Lazy | None:
    sizes = tuple(params["slice_sizes"])
    if len(others) != len(lazy.shape):
        return None
    if any(_is_cut(lazy.cut, d) and sizes[d] != size for d, size in enumerate(lazy.shape)):
        return None

    def cut_slice(x: jax.Array, own: Any) -> jax.Array:
        return lax.dynamic_slice(x, own(others, [jnp.zeros_like(others[0])] * x.ndim), own(sizes, x.shape))

    return _each(lazy, cut_slice, dims=range(len(shape)), shape=shape)


def _is_cut(cut: Cut, dim: int) -> bool:
    """Whether natural dimension `dim` does not lie whole in the shard."""
    return dim >= cut.dim if cut.flat else dim == cut.dim


def _each(lazy: Lazy, fn: Any, *, dims: Sequence[int], shape: tuple[int, ...]) -> Lazy:
    """Applies `fn(array, own)` to the arrays of a lazy parameter.

    `own(values, untouched)` takes the value of each dimension that the array holds whole, and
    `untouched` for the cut one. The result is of `shape`; `dims` are the dimensions that it had before.
    """
    old = lazy.cut
    further = [old.further[d] if old.further and shape[i] == old.shape[d] else None for i, d in enumerate(dims)]

    def for_shard(values: Sequence[Any], untouched: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(u if _is_cut(old, d) else values[d] for d, u in enumerate(untouched))

    def for_whole(values: Sequence[Any], untouched: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values)

    def apply(x: jax.Array | None, own: Any) -> Any:
        return None if x is None else fn(x, own)

    return dataclasses.replace(
        lazy,
        shard=apply(lazy.shard, for_shard),
        whole=apply(lazy.whole, for_whole),
        slot=apply(lazy.slot, for_whole if lazy.wire.reduce_last else for_shard),
        cut=Cut(list(dims).index(old.dim), shape, old.num_shards, old.flat, tuple(further) if any(further) else ()),
    )


_ON_SHARD: dict[str, Any] = {
    "convert_element_type": _cast,
    "copy": _same,
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
