"""The update of one parameter: its new value, its master and its optimizer state.

[Note: Masters]
If parameters are stored in 16 bits, the optimizer updates a wider master copy, cut like the gradient. Each device
rounds its shard of the new parameter, and the devices gather it in 16 bits. The wrapper returns the fp32 difference
between the new and the old parameter, so `optax.apply_updates` arrives at the rounded master to the bit (unless one
step makes an element 2^16 times smaller: then the fp32 sum itself rounds). If a parameter differs from its rounded
master, the user edited it (`state.replace(params=...)`); the master takes over the edit, element by element, before the
update.

[Note: Gathering new parameters]
To add an update to a parameter that every device stores whole, each device needs the whole update. In jzero's own
train step nobody else reads the updates, so each device adds its shard, and the devices gather the new parameter. No
whole update then takes memory beside the old and the new parameters: stage 2 of a 7B GPT on 8 H200 drops from 44.1 to
35.3 GiB. On TPUs optax adds: the compiler adds each gathered update as it arrives, whereas whole new parameters would
all wait for the old ones (1.4B on 8 v5p: 9.0 GiB instead of 6.8).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero import _compat
from jzero.arrays.casts import holds, round_stochastically, round_to
from jzero.arrays.collectives import gather_leaf
from jzero.arrays.placement import check_leaf_shape, is_on_host, natural_leaf, stored_leaf
from jzero.arrays.streamed import StreamedValue, Update, source, sources_of, stream
from jzero.config.precision import is_key, scale_by
from jzero.plan.leaves import LeafPlan, StateLeaf
from jzero.plan.plan import ZeroPlan
from jzero.plan.platform import platform_facts

__all__ = [
    "NO_ELEMENTS",
    "Grad",
    "LeafUpdate",
    "Moments",
    "add_update",
    "check_params_stored",
    "find_gathered_new",
    "new_param",
    "place_update",
    "round_inner",
    "streamed_source",
    "streamed_update",
    "update_leaf",
]


NO_ELEMENTS = np.zeros((0,), np.float32)
"""Replaces a random key and its update, which optax cannot add."""


class Grad(NamedTuple):
    """A gradient with factors to apply on reading: chunk by chunk for state on the host, which stores no product.

    Attributes:
      reduced: The reduced gradient, in its natural or its stored shape.
      factors: Its factors, applied one after the other.
    """

    reduced: jax.Array
    factors: tuple[jax.Array, ...] = ()

    def value(self) -> jax.Array:
        """Returns the product, in fp32 or wider."""
        return scale_by(self.reduced, *self.factors)


def check_params_stored(plan: ZeroPlan, params: Any) -> None:
    """Raises if parameters do not have the shape that the plan stores; optax could not add to them."""
    for i, x in enumerate([] if params is None else plan.flat_params(params)):
        leaf = plan.leaves[i].param
        if np.shape(x) != leaf.stored_shape and i not in plan.keys:
            raise ValueError(
                f"{leaf.path!r} is stored as {leaf.stored_shape}, but the parameters to be updated hold it as "
                f"{np.shape(x)}. Edit parameters with `jzero.update_params` or `.at[...]`; shard the state again "
                "(`jzero.shard_train_state`) if they come from another one."
            )


def streamed_source(x: Any, leaf: LeafPlan, plan: ZeroPlan) -> StreamedValue:
    """Returns a gradient or parameter as a streamed value. On the host it must have its stored shape."""
    if isinstance(x, StreamedValue):
        return x
    if not is_on_host(x):
        check_leaf_shape(x, leaf.grad)
        x = stored_leaf(x, leaf.grad, plan)
    return source(x, leaf.grad, leaf.param.shape)


class Moments(NamedTuple):
    """A leaf of the inner optimizer state on the host: its number, its stored array and its new value."""

    number: int
    old: jax.Array
    new: Any


class LeafUpdate(NamedTuple):
    """Inputs to one parameter's update. If its optimizer state is offloaded, all but the stored arrays is streamed.

    Attributes:
      number: The parameter's number.
      leaf: Its layout.
      grad: Its gradient.
      param: The parameter as stored, if known.
      master: The parameter as the optimizer saw it.
      old_master: Its master copy as stored, if it has one.
      update: The optimizer's update; `None` if it returned none.
      moments: Its optimizer state on the host.
    """

    number: int
    leaf: LeafPlan
    grad: Any
    param: Any
    master: Any
    old_master: Any
    update: Any
    moments: Sequence[Moments]

    @property
    def is_rounded(self) -> bool:
        """Whether the new parameter is a rounded sum, so that the update alone does not determine it."""
        known = self.update is not None and self.param is not None and self.master is not None
        return known and self.leaf.param.dtype != self.leaf.update_dtype

    @property
    def moves_on_host(self) -> bool:
        """Whether the new parameter overwrites the old one on the host."""
        return self.leaf.param.on_host and self.update is not None


def find_gathered_new(plan: ZeroPlan) -> frozenset[int]:
    """Returns the parameters whose new values, not updates, are gathered: stored whole, with cut updates.

    See [Note: Gathering new parameters].
    """
    if platform_facts(plan.mesh).adds_updates:
        return frozenset()
    found = {i for i, x in enumerate(plan.leaves) if x.trained and x.param.cut is None and x.grad.cut is not None}
    return frozenset(found - plan.offloaded)


def add_update(param: jax.Array, change: jax.Array, applied: jax.Array | None) -> jax.Array:
    """Returns a stored parameter plus its update, added as `optax.apply_updates` does."""
    with jax.numpy_dtype_promotion("standard"):  # whatever the user set for arithmetic
        new = (param + change).astype(param.dtype)
    return new if applied is None else jnp.where(applied, new, param)


def new_param(
    plan: ZeroPlan, x: LeafUpdate, key: jax.Array | None, applied: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns a parameter's new value and its new master, both as stored; see [Note: Gathering new parameters]."""
    rounded, master = _sum_parameter(plan, x, key)
    if applied is not None:
        rounded = jnp.where(applied, rounded, natural_leaf(x.param, x.leaf.grad, plan))
    return _store_new(rounded, x.leaf, plan), master


def update_leaf(plan: ZeroPlan, x: LeafUpdate, key: jax.Array | None) -> tuple[Any, Any]:
    """Returns the update of a stored parameter, and its new master as stored; see [Note: Masters]."""
    leaf = x.leaf
    if is_key(leaf.param.dtype):
        return NO_ELEMENTS, None
    if not leaf.trained:
        return jnp.asarray(-0.0).astype(leaf.param.dtype), None  # x + -0.0 is x to the bit
    if not x.is_rounded:
        return x.update if x.update is None else stored_leaf(x.update, leaf.param, plan), None
    rounded, master = _sum_parameter(plan, x, key)
    return _make_update(x, _store_new(rounded, leaf, plan)), master


def _store_new(rounded: jax.Array, leaf: LeafPlan, plan: ZeroPlan) -> jax.Array:
    """Returns a new parameter, cut like its gradient, as the plan stores it."""
    if leaf.param.cut is None and len(plan.comm.shard_axes) > 1:  # the compiler would gather it in one hop
        rounded = gather_leaf(stored_leaf(rounded, leaf.grad, plan), leaf.grad, plan)
    return stored_leaf(rounded, leaf.param, plan)


def _sum_parameter(plan: ZeroPlan, x: LeafUpdate, key: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns a new parameter in natural shape, cut like the gradient, and its new master as stored."""
    rounded, master = _round_sum(x, x.master + x.update, key)
    return rounded, None if x.leaf.master is None else stored_leaf(master, x.leaf.master, plan)


def _round_sum(x: LeafUpdate, moved: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
    """Returns the new parameter, and its new master if it has one, rounded from their wide sum `moved`."""
    leaf = x.leaf
    if leaf.master is None:
        return _round(moved, leaf.param.dtype, key, x.number), None
    master = _round(moved, leaf.master.dtype, key, x.number)
    return round_to(master, leaf.param.dtype), master


def _make_update(x: LeafUpdate, rounded: jax.Array) -> jax.Array:
    """Returns the update with which `optax.apply_updates` arrives at the new value of a stored parameter."""
    new_wide, old_wide = rounded.astype(x.leaf.update_dtype), x.param.astype(x.leaf.update_dtype)
    return jnp.where(rounded == x.param, 0, new_wide - old_wide)  # infinities included


def place_update(update: jax.Array, leaf: StateLeaf, plan: ZeroPlan) -> Any:
    """Returns the update of a parameter such that optax's sum is laid out as planned.

    Otherwise the compiler would choose the layout wherever the sum is not just a result of the `jit`, but feeds a
    second update or the next iteration of a loop. For parameters stored whole it would choose the gradient's layout.
    """
    if not isinstance(update, jax.core.Tracer):
        update = jax.lax.with_sharding_constraint(update, plan.whole_sharding)
    return _compat.when_added(update, lambda total: stored_leaf(total.astype(leaf.dtype), leaf, plan))


def streamed_update(
    plan: ZeroPlan, x: LeafUpdate, key: jax.Array | None, applied: jax.Array | None
) -> tuple[Any, Any, list[jax.Array]]:
    """Updates a parameter that is on the host, or has its master or optimizer state there.

    See [Note: Streaming an update]. `applied` decides whether arrays on the host change.

    Returns:
      The update of the stored parameter, or its new value if it is on the host; its new master as stored; the new
      arrays of `x.moments`.
    """
    leaf, has_master = x.leaf, x.is_rounded and x.leaf.master is not None
    result = x.master.map(jnp.add, x.update) if x.is_rounded or x.moves_on_host else x.update
    values = [streamed_source(y, leaf, plan) for y in (result, *(y.new for y in x.moments)) if y is not None]
    old = [
        *([x.param] if x.moves_on_host else []),
        *([x.old_master] if has_master else []),
        *(y.old for y in x.moments),
    ]
    dtype, out = _result_like(plan, x)
    new, near = stream(plan, Update(leaf.grad, values, old, _chunk_update(plan, x), out, [key, applied]))
    moved = new.pop(0) if x.moves_on_host else None
    master = new.pop(0) if has_master else x.old_master
    if near is not None:
        near = stored_leaf(natural_leaf(round_to(near, dtype), leaf.grad, plan), leaf.param, plan)
        moved = _make_update(x, near) if x.is_rounded else near
    return moved, master, new


def _result_like(plan: ZeroPlan, x: LeafUpdate) -> tuple[Any, Any]:
    """Returns the dtype of a streamed update's result on the devices, and its destination; see `Update.out`."""
    dtype = x.leaf.param.dtype
    if x.update is None or x.moves_on_host:
        return dtype, None
    if not x.is_rounded:
        dtype = streamed_source(x.update, x.leaf, plan).aval().dtype  # optimizers may return more than the gradient's
    # The result overwrites the gradient if that is wide enough.
    (grad,) = (y.array for y in sources_of([x.grad])[0])
    is_wide = holds(grad.dtype, dtype) and not is_on_host(grad)
    return dtype, grad if is_wide else jax.ShapeDtypeStruct(x.leaf.grad.stored_shape, dtype)


def _chunk_update(plan: ZeroPlan, x: LeafUpdate) -> Callable[..., tuple[list[jax.Array], Any]]:
    """Returns the `Update.body` of `streamed_update`."""

    def body(position: Sequence[Any], values: list[Any], old: list[Any], key: Any, applied: Any) -> Any:
        key = None if key is None else functools.reduce(jax.random.fold_in, position, key)
        values, new = list(values), []
        result: Any = None if x.update is None else values.pop(0)
        if x.is_rounded:
            result, master = _round_sum(x, result, key)
            new += [] if master is None else [master]
        if x.moves_on_host:
            new, result = [result, *new], None
        new += [round_inner(plan, y.number, z, key) for y, z in zip(x.moments, values, strict=True)]
        new = [y.astype(before.dtype) for y, before in zip(new, old, strict=True)]
        if applied is not None:
            new = [jnp.where(applied, y, before) for y, before in zip(new, old, strict=True)]
        return new, result

    return body


def round_inner(plan: ZeroPlan, number: int, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Casts a leaf of the inner optimizer state from its own dtype to the dtype that the plan stores."""
    leaf = plan.inner_leaves[number]
    return x if leaf.wide is None else _round(x, leaf.dtype, key, len(plan.leaves) + number)


def _round(x: jax.Array, dtype: Any, key: jax.Array | None, index: int) -> jax.Array:
    if x.dtype == dtype:
        return x
    if key is None or dtype != jnp.bfloat16:
        return round_to(x, dtype)
    return round_stochastically(x, jax.random.fold_in(key, index))
