"""The update of one parameter: its master, its optimizer state, and what is to be added to it.

[Note: Masters]
Where parameters are held in 16 bits, the optimizer updates a wider master copy, cut like the gradient. The new
parameter is rounded on the shard and gathered in 16 bits; what the wrapper returns is the fp32 difference between new
and old parameter, so that `optax.apply_updates` arrives at the rounded master to the bit (unless one step makes an
element 2^16 times smaller: then the fp32 sum itself rounds). A parameter that no longer is the rounded master was
edited (`state.replace(params=...)`): the edit is taken over into the master, element by element, before the update.

[Note: Parameters made anew]
What is added to a parameter that every device holds whole has to be whole, too. A train step of jzero, where nobody
else looks at updates, therefore takes the new parameter itself: the sum is taken on the shard, and what is gathered is
the result, so that no whole update is there beside the old and the new parameters. Of a GPT of 7B on 8 H200 that takes
stage 2 from 44.1 to 35.3 GiB. Not so on TPUs, where an update is added leaf by leaf as it comes, and whole new
parameters would all wait for the old ones (1.4B on 8 v5p: 9.0 GiB in place of 6.8): there optax adds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jzero import _compat
from jzero.arrays.casts import holds, round_stochastically, round_to
from jzero.arrays.placement import check_leaf_shape, is_on_host, natural_leaf, stored_leaf
from jzero.arrays.streamed import Streamed, Update, source, sources_of, stream
from jzero.config.precision import is_key
from jzero.plan.leaves import LeafPlan, StateLeaf
from jzero.plan.plan import ZeroPlan

__all__ = [
    "NO_ELEMENTS",
    "LeafUpdate",
    "Moments",
    "check_params_stored",
    "new_param",
    "placing",
    "rounded_inner",
    "streamed_source",
    "streamed_update",
    "update_leaf",
]


NO_ELEMENTS = np.zeros((0,), np.float32)
"""Stands for a parameter on the host, and for its update, where optax adds the two."""


def check_params_stored(plan: ZeroPlan, params: Any) -> None:
    """Raises for parameters in their natural shape that the plan stores in another: optax could not add to them."""
    for x, leaf in zip([] if params is None else plan.flat_params(params), plan.leaves, strict=params is not None):
        if np.shape(x) == leaf.param.shape != leaf.param.stored_shape:
            raise ValueError(
                f"{leaf.path!r} is stored as {leaf.param.stored_shape}, but the parameters to be updated hold it in "
                f"its natural shape {leaf.param.shape}. Edit parameters with `jzero.update_params` or `.at[...]`."
            )


def streamed_source(x: Any, leaf: LeafPlan, plan: ZeroPlan) -> Streamed:
    """A gradient or a parameter, in natural or stored shape, as a streamed value."""
    if isinstance(x, Streamed):
        return x
    check_leaf_shape(x, leaf.grad)
    return source(stored_leaf(x, leaf.grad, plan), leaf.grad, leaf.param.shape)


class LeafUpdate(NamedTuple):
    """What an update knows of one parameter. Of one whose state lies on the host, all but arrays as stored is streamed.

    Attributes:
      number: Its number among the parameters.
      leaf: Its layout.
      grad: Its gradient.
      param: The parameter as stored, if it is known.
      master: What the optimizer saw of it.
      old_master: Its master copy as stored, if it has one.
      update: What the optimizer made of it; `None` if nothing.
    """

    number: int
    leaf: LeafPlan
    grad: Any
    param: Any
    master: Any
    old_master: Any
    update: Any

    @property
    def is_rounded(self) -> bool:
        """Whether the new parameter is its rounded master, so that the update alone does not give it."""
        known = self.update is not None and self.param is not None and self.master is not None
        return known and self.leaf.param.dtype != self.leaf.update_dtype


def new_param(
    plan: ZeroPlan, x: LeafUpdate, key: jax.Array | None, applied: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns a parameter's new value and its new master, both as stored; see [Note: Parameters made anew].

    Args:
      plan: The plan.
      x: What belongs to the parameter, which is trained and has an update.
      key: For stochastic rounding.
      applied: Whether the step is applied; `None` if it always is.
    """
    leaf, moved = x.leaf, x.master + x.update
    rounded, master = _rounded(x, moved, key) if x.is_rounded else (moved.astype(leaf.param.dtype), None)
    if applied is not None:
        rounded = jnp.where(applied, rounded, natural_leaf(x.param, leaf.grad, plan))
    kept = None if master is None else stored_leaf(master, cast("StateLeaf", leaf.master), plan)
    return stored_leaf(rounded, leaf.param, plan), kept


def update_leaf(plan: ZeroPlan, x: LeafUpdate, key: jax.Array | None) -> tuple[Any, Any]:
    """Returns the update of a stored parameter and its new master as stored, see [Note: Masters]."""
    leaf = x.leaf
    if leaf.param.on_host or is_key(leaf.param.dtype):
        return NO_ELEMENTS, None
    if not leaf.trained:
        return jnp.asarray(-0.0).astype(leaf.param.dtype), None  # x + -0.0 is x to the bit
    if not x.is_rounded:
        return x.update if x.update is None else stored_leaf(x.update, leaf.param, plan), None
    rounded, master = _rounded(x, x.master + x.update, key)
    kept = None if leaf.master is None else stored_leaf(master, leaf.master, plan)
    return _change(x, stored_leaf(rounded, leaf.param, plan)), kept


def _rounded(x: LeafUpdate, moved: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
    """Returns a new parameter, and its new master if it has one, from what the optimizer made of them."""
    leaf = x.leaf
    if leaf.master is None:
        return _round(moved, leaf.param.dtype, key, x.number), None
    master = _round(moved, leaf.master.dtype, key, x.number)
    return round_to(master, leaf.param.dtype), master


def _change(x: LeafUpdate, rounded: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` has to add to a stored parameter to arrive at its new value."""
    new_wide, old_wide = rounded.astype(x.leaf.update_dtype), x.param.astype(x.leaf.update_dtype)
    return jnp.where(rounded == x.param, 0, new_wide - old_wide)  # infinities included


def placing(update: jax.Array, leaf: StateLeaf, plan: ZeroPlan) -> Any:
    """Returns the update of a parameter, to which optax adds it: the sum is laid out as the plan has it.

    Otherwise the compiler would choose the layout, that of the gradient for parameters held whole, wherever the sum is
    no result of the `jit` alone but goes into a second update or the next pass of a loop.
    """
    if not isinstance(update, jax.core.Tracer):
        update = jax.lax.with_sharding_constraint(update, plan.whole_sharding)
    return _compat.when_added(update, lambda total: stored_leaf(total.astype(leaf.dtype), leaf, plan))


class Moments(NamedTuple):
    """A leaf of the optimizer's own state on the host: its number, the stored array, its new value."""

    number: int
    old: jax.Array
    new: Any


def streamed_update(
    plan: ZeroPlan, x: LeafUpdate, moments: Sequence[Moments], key: jax.Array | None, applied: jax.Array | None
) -> tuple[Any, Any, Any, list[jax.Array]]:
    """The update of a parameter that lies on the host, or has a master or optimizer state there.

    See [Note: Streaming an update].

    Args:
      plan: The plan.
      x: What belongs to the parameter.
      moments: Its optimizer state on the host.
      key: For stochastic rounding.
      applied: Whether the step is applied; `None` if it always is.

    Returns:
      The update of the stored parameter, its new master as stored, the parameter itself if it lies on the host, whose
      update then has no elements, and the new arrays of `moments`.
    """
    leaf = x.leaf
    moves_param = leaf.param.on_host and x.update is not None
    result = x.master.map(jnp.add, x.update) if x.is_rounded or moves_param else x.update
    wanted = [y for y in (result, *(y.new for y in moments)) if y is not None]
    has_master = x.is_rounded and leaf.master is not None
    old = [*([x.param] if moves_param else []), *([x.old_master] if has_master else []), *(y.old for y in moments)]
    numbers = {name: y for name, y in (("key", key), ("applied", applied)) if y is not None}

    def body(position: Sequence[Any], values: list[Any], old: list[Any], *given: Any) -> tuple[list[Any], Any]:
        known = dict(zip(numbers, given, strict=True))
        if "key" in known:
            known["key"] = functools.reduce(jax.random.fold_in, position, known["key"])
        values, new = list(values), []
        result: Any = None if x.update is None else values.pop(0)
        if x.is_rounded:
            result, master = _rounded(x, result, known.get("key"))
            new += [master] if has_master else []
        if moves_param:
            new, result = [result, *new], None
        new += [rounded_inner(plan, y.number, z, known.get("key")) for y, z in zip(moments, values, strict=True)]
        new = [y.astype(before.dtype) for y, before in zip(new, old, strict=True)]
        if "applied" in known:
            new = [jnp.where(known["applied"], y, before) for y, before in zip(new, old, strict=True)]
        return new, result

    dtype, out = leaf.param.dtype, None
    if x.update is not None and not x.is_rounded:
        dtype = streamed_source(x.update, leaf, plan).aval().dtype  # optimizers may return more than the gradient's
    if x.update is not None and not moves_param:
        # What the devices get takes the memory of the gradient, if that is wide enough.
        (grad,) = (y.array for y in sources_of([x.grad])[0])
        is_wide = holds(grad.dtype, dtype) and not is_on_host(grad)
        out = grad if is_wide else jax.ShapeDtypeStruct(leaf.grad.stored_shape, dtype)
    values = [streamed_source(y, leaf, plan) for y in wanted]
    new, near = stream(plan, Update(leaf.grad, values, old, body, out, list(numbers.values())))
    param = new.pop(0) if moves_param else None
    master = new.pop(0) if has_master else x.old_master
    if near is None:
        return (NO_ELEMENTS if moves_param else None), master, param, new
    near = stored_leaf(natural_leaf(round_to(near, dtype), leaf.grad, plan), leaf.param, plan)
    return (_change(x, near) if x.is_rounded else near), master, None, new


def rounded_inner(plan: ZeroPlan, number: int, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns a leaf of the inner optimizer state, given in its own dtype, in the dtype in which it is stored."""
    leaf = plan.inner_leaves[number]
    return x if leaf.wide is None else _round(x, leaf.dtype, key, len(plan.leaves) + number)


def _round(x: jax.Array, dtype: Any, key: jax.Array | None, index: int) -> jax.Array:
    if x.dtype == dtype:
        return x
    if key is None or dtype != jnp.bfloat16:
        return round_to(x, dtype)
    return round_stochastically(x, jax.random.fold_in(key, index))
