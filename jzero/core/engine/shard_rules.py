"""Operations that run on a parameter's shard, so that gathers move fewer or narrower elements.

    apply_on_shard(eqn, inputs) -> ShardedParam | None

A slice of a stack of layers, `w[i]` with shards of [L, D/N, F], slices the shards: one layer is gathered, not the
stack. An operation that touches the cut dimension cannot run on shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from jzero.core.base import compat
from jzero.core.base.types import DType
from jzero.core.engine.lazy import Deferred, Operand, ShardedParam, SharedLeaves, is_constant, is_lazy
from jzero.core.layout.placement import memory_of

T = TypeVar("T")
ShardRule: TypeAlias = Callable[[ShardedParam, JaxprEqn, Sequence[jax.Array]], ShardedParam | None]


class OwnPart(Protocol):
    """Adapts values, one per dimension of a whole parameter, to an array that may be a shard."""

    def __call__(self, values: Sequence[T], of_cut: Callable[[int], T]) -> Sequence[T]:
        """Returns the values; for a shard, `of_cut(d)` of each dimension that is cut."""


def apply_on_shard(eqn: JaxprEqn, inputs: Sequence[Operand]) -> ShardedParam | None:
    """Returns the equation's result as a lazy parameter, if the operation can run on the shard itself."""
    lazy = inputs[0] if inputs else None
    rule = _RULES.get(eqn.primitive.name)
    if rule is None or not isinstance(lazy, ShardedParam):
        return None
    # Indices made of literals count as literals.
    operands = [
        SharedLeaves.of([x]).compute()[0] if isinstance(x, Deferred) and is_constant(x) else x for x in inputs[1:]
    ]
    others = [x for x in operands if not is_lazy(x)]
    return rule(lazy, eqn, others) if len(others) == len(operands) else None


def constrain_lazy(x: ShardedParam | Deferred, spec: PartitionSpec) -> ShardedParam | Deferred:
    """Returns a lazy value whose arrays are sharded over other mesh axes by `spec`, which is for its natural shape.

    Arrays in host memory, blocks and deferred values stay as they are; so does everything if `spec` names no axis for a
    dimension that is not cut.
    """
    if (
        not isinstance(x, ShardedParam)
        or memory_of(x.shard) == "host"
        or x.cut.blocks is not None
        or x.on_disk is not None
    ):
        return x
    before = [*x.cut.other_axes, *[None] * len(x.shape)]
    entries = [b if names is PartitionSpec.UNCONSTRAINED else names for names, b in zip(spec, before, strict=False)]
    cut = x.cut.with_other_axes(entries, dict(jax.sharding.get_abstract_mesh().shape))
    if not cut.other_axes or cut == x.cut:
        return x
    shard = lax.with_sharding_constraint(x.shard, PartitionSpec(*cut.other_axes[: x.shard.ndim]))  # [D/N, F]
    unsharded = None if x.unsharded is None else lax.with_sharding_constraint(x.unsharded, spec)
    return dataclasses.replace(x, shard=shard, unsharded=unsharded, cut=cut)


def widens(old: DType, new: DType) -> bool:
    """Whether floating-point dtype `new` holds all numbers of `old`."""
    of_old, of_new = jnp.finfo(old), jnp.finfo(new)
    return bool(of_old.nmant <= of_new.nmant and of_old.minexp >= of_new.minexp and of_old.maxexp <= of_new.maxexp)


def _same(lazy: ShardedParam, eqn: JaxprEqn, others: Sequence[jax.Array]) -> ShardedParam:
    return lazy


def _cast(lazy: ShardedParam, eqn: JaxprEqn, others: Sequence[jax.Array]) -> ShardedParam | None:
    """The first narrowing cast runs before the gather, widening casts after it; a second narrowing cast is deferred."""
    new, old = jnp.dtype(eqn.params["new_dtype"]), jnp.dtype(lazy.dtype)
    if not (jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)):
        return None
    if widens(old, new):
        return dataclasses.replace(lazy, dtype=new)  # after the gather: the narrower dtype travels
    # After another cast the shard would be rounded once where the loss rounds twice.
    stored = lazy.cut.blocks.dtype if lazy.cut.blocks else lazy.on_disk or lazy.shard.dtype
    is_as_stored = old == lazy.wire_dtype == stored
    return dataclasses.replace(lazy, wire_dtype=new, dtype=new) if is_as_stored else None


def _transpose(lazy: ShardedParam, eqn: JaxprEqn, others: Sequence[jax.Array]) -> ShardedParam | None:
    if lazy.cut.flat or memory_of(lazy.shard) == "host" or lazy.on_disk is not None:  # hosts only copy
        return None
    if lazy.stays:  # see [Note: Parameters that stay]
        return None
    order = tuple(eqn.params["permutation"])
    return _map_arrays(lazy, eqn, lambda x, _: lax.transpose(x, order), order)  # [D/N, F] -> [F, D/N]


def _stop(lazy: ShardedParam, eqn: JaxprEqn, others: Sequence[jax.Array]) -> ShardedParam | None:
    if memory_of(lazy.shard) == "host" or lazy.on_disk is not None:  # hosts only copy
        return None
    return _map_arrays(lazy, eqn, lambda x, _: lax.stop_gradient(x), range(len(lazy.shape)))


def _squeeze(lazy: ShardedParam, eqn: JaxprEqn, others: Sequence[jax.Array]) -> ShardedParam | None:
    dims = tuple(eqn.params["dimensions"])
    if any(lazy.cut.cuts(d) for d in dims) or not _can_change(lazy, dims):
        return None
    rest = [d for d in range(len(lazy.shape)) if d not in dims]
    return _map_arrays(lazy, eqn, lambda x, _: lax.squeeze(x, dims), rest)  # [1, D/N, F] -> [D/N, F]


def _slice(lazy: ShardedParam, eqn: JaxprEqn, others: Sequence[jax.Array]) -> ShardedParam | None:
    params, shape = eqn.params, compat.type_of(eqn.outvars[0]).shape
    strides = params["strides"] or (1,) * len(lazy.shape)
    start, limit = params["start_indices"], params["limit_indices"]
    for d, size in enumerate(lazy.shape):
        if lazy.cut.cuts(d) and (start[d], limit[d], strides[d]) != (0, size, 1):
            return None
    if not _can_change(lazy, [d for d, size in enumerate(lazy.shape) if shape[d] != size]):
        return None

    def cut_slice(x: jax.Array, own: OwnPart) -> jax.Array:
        return lax.slice(x, own(start, lambda _: 0), own(limit, x.shape.__getitem__), own(strides, lambda _: 1))

    return _map_arrays(lazy, eqn, cut_slice, range(len(lazy.shape)))


def _dynamic_slice(lazy: ShardedParam, eqn: JaxprEqn, others: Sequence[jax.Array]) -> ShardedParam | None:
    sizes = tuple(eqn.params["slice_sizes"])  # for `w[i]`: [1, D, F]
    if len(others) != len(lazy.shape):
        return None
    # A part of the cut dimension would be on some devices only.
    changed = [d for d, size in enumerate(lazy.shape) if sizes[d] != size]
    if any(map(lazy.cut.cuts, changed)) or not _can_change(lazy, changed):
        return None

    def cut_slice(x: jax.Array, own: OwnPart) -> jax.Array:
        return lax.dynamic_slice(x, own(others, lambda d: jnp.zeros_like(others[d])), own(sizes, x.shape.__getitem__))

    return _map_arrays(lazy, eqn, cut_slice, range(len(lazy.shape)))


def _can_change(lazy: ShardedParam, dims: Sequence[int]) -> bool:
    """Whether these dimensions can be sliced or dropped; the handles of a stack on disk have only its rows."""
    return lazy.on_disk is None or (lazy.shard.ndim > 1 and set(dims) <= {0})


def _map_arrays(
    lazy: ShardedParam, eqn: JaxprEqn, fn: Callable[[jax.Array, OwnPart], jax.Array], dims: Sequence[int]
) -> ShardedParam:
    """Applies `fn(array, own)` to the arrays of a lazy parameter; dimension `i` of the result was `dims[i]`."""
    # The handles of rows on disk are [L, 2].
    of_shard = lazy.cut.for_shard if lazy.on_disk is None else lambda values, of_cut: [values[0], of_cut(1)]
    return dataclasses.replace(
        lazy,
        # e.g. [L, D/N, F] -> [1, D/N, F], and [L, D, F] -> [1, D, F]
        shard=fn(lazy.shard, of_shard),
        unsharded=None if lazy.unsharded is None else fn(lazy.unsharded, lambda values, of_cut: values),
        cut=lazy.cut.for_shape(compat.type_of(eqn.outvars[0]).shape, dims),
    )


_RULES: dict[str, ShardRule] = {
    "convert_element_type": _cast,
    "copy": _same,
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "squeeze": _squeeze,
    "stop_gradient": _stop,
    "transpose": _transpose,
}
