"""The optax wrapper: the inner transformation sees natural shapes, the state stays cut.

[Note: Masters]
Where parameters are held in 16 bits, the optimizer updates a wider master copy, cut like the gradient. The new
parameter is rounded on the shard and gathered in 16 bits; what the wrapper returns is the fp32 difference between new
and old parameter, so that `optax.apply_updates` arrives at the rounded master to the bit (unless one step makes an
element 2^16 times smaller: then the fp32 sum itself rounds). A parameter that no longer is the rounded master was
edited (`state.replace(params=...)`): the edit is taken over into the master, element by element, before the update.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero import _compat
from jzero._opt_state import ZeroOptState, next_loss_scale
from jzero._placement import check_leaf_shape, is_on_host, natural_leaf, stored_leaf
from jzero._plan import LeafPlan, StateLeaf, ZeroPlan
from jzero._planner import own_opt_state
from jzero._precision import DynamicLossScale, Precision, times
from jzero._rounding import narrow, round_stochastically, with_edits
from jzero._streamed import Streamed, source, sources_of, stream
from jzero._update_walk import UpdateWalk

__all__ = ["ZeroTransformation", "edited_master", "keep_unless", "with_next_loss_scale"]

PyTree = Any

class InStep(NamedTuple):
    """What a train step knows about the update that it calls, which state on the host has a use for.

    Attributes:
      applied: Whether the step is applied, a 0-d boolean; `None` if it always is.
      reduced: By `id` of each gradient: `(as it was reduced, what it was multiplied with)`. Where the optimizer gets
        that very gradient, chunks of the reduced one are multiplied again, and the product is never stored.
    """

    applied: jax.Array | None
    reduced: Mapping[int, tuple[jax.Array, tuple[jax.Array, ...]]]


@dataclasses.dataclass(frozen=True)
class ZeroTransformation:
    """An optax transformation over a partitioned state; takes the place of `tx` in the train state.

    A frozen value: two wrappers of the same optax object under equal plans are equal, so that wrapping again
    neither recompiles nor breaks `jax.tree.map` over two states.

    Attributes:
      inner: The user's transformation.
      plan: The plan of the state.
      step: What a train step of jzero knows while it calls `update`. Otherwise `update` itself skips gradients that are
        not finite, where the precision policy asks for it.
    """

    inner: Any
    plan: ZeroPlan
    step: InStep | None = dataclasses.field(default=None, compare=False, repr=False)

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial optimizer state for stored `params`, laid out as planned."""
        return _init(self, params)

    def update(self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any) -> Any:
        """Applies the inner transformation.

        Args:
          updates: Gradients, each in its natural or its stored shape; of frozen parameters anything.
          state: The optimizer state as stored.
          params: The parameters as stored.
          **extra_args: Handed to the inner transformation.

        Returns:
          `(updates, state)`, both as the plan stores parameters and optimizer state. The update of a frozen parameter
          is a scalar zero.
        """
        if params is None and self.plan.config.policy.compute is not None:
            raise ValueError("A precision policy needs the parameters: call `tx.update(grads, opt_state, params)`.")
        in_trace = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((updates, state, params)))
        arrays = {k: v for k, v in extra_args.items() if not callable(v)}
        functions = tuple((k, v) for k, v in sorted(extra_args.items()) if callable(v))
        update = _update if in_trace else _update_jit
        return update(self, updates, state, params, arrays, functions)

    def loss_scale(self, opt_state: PyTree) -> jax.Array | None:
        """Returns what the loss is multiplied with, float32; `None` without a loss scale."""
        scale = self.plan.config.policy.loss_scale
        if isinstance(scale, DynamicLossScale):
            return opt_state.loss_scale.scale
        return None if scale is None else jnp.asarray(scale, jnp.float32)

    def natural_params(self, params: PyTree) -> PyTree:
        """Returns stored parameters in their natural shapes, in the dtype that the loss sees."""
        leaves = self.plan.params_treedef.flatten_up_to(params)
        natural = [
            natural_leaf(narrow(x, leaf.compute_dtype), leaf.param, self.plan)
            for x, leaf in zip(leaves, self.plan.leaves, strict=True)
        ]
        return self.plan.params_treedef.unflatten(natural)


@functools.partial(jax.jit, static_argnums=0)
def _init(tx: ZeroTransformation, params: PyTree) -> PyTree:
    plan = tx.plan
    leaves = plan.params_treedef.flatten_up_to(params)
    seen = [
        natural_leaf(x, leaf.param, plan).astype(leaf.update_dtype) for x, leaf in zip(leaves, plan.leaves, strict=True)
    ]
    made = plan.inner_treedef.flatten_up_to(tx.inner.init(plan.params_treedef.unflatten(seen)))
    inner = plan.inner_treedef.unflatten(
        [stored_leaf(_rounded_inner(plan, j, x, None), leaf, plan) for j, (x, leaf) in enumerate(zip(made, plan.inner_leaves, strict=True))]
    )
    masters = [
        None if leaf.master is None else stored_leaf(x.astype(leaf.master.dtype), leaf.master, plan)
        for x, leaf in zip(seen, plan.leaves, strict=True)
    ]
    own = own_opt_state(plan, masters)
    if own is None:
        return inner
    return jax.tree.map(jnp.asarray, dataclasses.replace(own, inner=inner))


def _update(
    tx: ZeroTransformation,
    updates: PyTree,
    state: PyTree,
    params: PyTree | None,
    arrays: dict[str, Any],
    functions: tuple[tuple[str, Any], ...],
) -> Any:
    plan = tx.plan
    own = state if plan.has_opt_state else ZeroOptState(state, None, None, None)
    with jax.named_scope("zero_update"):
        overflowed, applied = None, None if tx.step is None else tx.step.applied
        if tx.step is None and plan.config.policy.skips:
            overflowed = _overflowed(plan, updates)
            applied = ~jnp.any(overflowed)
        reduced = {} if tx.step is None else tx.step.reduced
        updates = plan.params_treedef.unflatten(
            [
                _reduced(x, leaf, plan, reduced) if i in plan.hosted and leaf.trained and x is not None else x
                for i, (x, leaf) in enumerate(zip(plan.params_treedef.flatten_up_to(updates), plan.leaves, strict=True))
            ]
        )
        grads = _like_grads(plan, updates)
        masters = None if params is None else _masters(plan, params, own.masters)
        inner = _inner_seen(plan, own.inner)
        # Trees of the parameters' structure (`grad=` of a line search) come as stored, like the gradients.
        like_params = {
            k: _like_grads(plan, v) for k, v in arrays.items() if jax.tree.structure(v) == plan.params_treedef
        }
        seen = (grads, plan.inner_treedef.unflatten(inner), masters, {**arrays, **like_params})
        new_updates, new_inner = _apply_inner(tx, seen, dict(functions))
        key = None if own.num_updates is None else jax.random.fold_in(jax.random.key(0), own.num_updates)
        before = _Before(updates, params, masters, own)
        stored, new = _next_state(plan, before, _like_grads(plan, new_updates), new_inner, key, applied)
        if overflowed is not None:
            stored = [x if x is None else jnp.where(applied, x, jnp.asarray(-0.0).astype(x.dtype)) for x in stored]
            new = with_next_loss_scale(plan, own, keep_unless(applied, new, own), overflowed)
        return plan.params_treedef.unflatten(stored), new if plan.has_opt_state else new.inner


def keep_unless(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` if the step is applied, else `old`; what is on the host was decided on where it was overwritten."""
    return jax.tree.map(lambda new, old: new if is_on_host(new) else jnp.where(applied, new, old), new, old)


def _like_grads(plan: ZeroPlan, tree: PyTree) -> PyTree:
    """A tree of the parameters' structure in natural shapes, each device's part at hand; streamed where that pays."""
    leaves = plan.params_treedef.flatten_up_to(tree)
    seen = [
        x if x is None else _like_grad(x, leaf, plan, streamed=i in plan.hosted)
        for i, (x, leaf) in enumerate(zip(leaves, plan.leaves, strict=True))
    ]
    return plan.params_treedef.unflatten(seen)


def _like_grad(x: Any, leaf: LeafPlan, plan: ZeroPlan, *, streamed: bool) -> Any:
    if not leaf.trained:  # never read, see `_trained`
        return jnp.zeros(leaf.param.shape, leaf.update_dtype)
    if streamed:
        x = _streamed_source(x, leaf, plan)
    elif not isinstance(x, Streamed):
        x = natural_leaf(x, leaf.grad, plan)
    return x if plan.config.policy == Precision() else _cast(x, leaf.update_dtype)


def _reduced(x: jax.Array, leaf: LeafPlan, plan: ZeroPlan, reduced: Mapping[int, Any]) -> Streamed:
    """A gradient as a streamed value, made of what it was before it was widened, if that is known."""
    raw, factors = reduced.get(id(x), (x, ()))
    grad = _streamed_source(raw, leaf, plan)
    return grad.map(times, *factors) if factors else grad


def _streamed_source(x: Any, leaf: LeafPlan, plan: ZeroPlan) -> Streamed:
    """A gradient or a parameter, in natural or stored shape, as a streamed value."""
    if isinstance(x, Streamed):
        return x
    check_leaf_shape(x, leaf.grad)
    return source(stored_leaf(x, leaf.grad, plan), leaf.grad, leaf.param.shape)


def _cast(x: Any, dtype: Any) -> Any:
    return x.map(lambda y: y.astype(dtype)) if isinstance(x, Streamed) else x.astype(dtype)


def _masters(plan: ZeroPlan, params: PyTree, masters: PyTree) -> PyTree:
    """Returns what the optimizer sees of the parameters: natural shapes, cut, edits of the parameters included."""
    leaves = plan.params_treedef.flatten_up_to(params)
    kept = [None] * len(leaves) if masters is None else plan.params_treedef.flatten_up_to(masters)

    def master(i: int, param: jax.Array, kept: jax.Array | None, leaf: LeafPlan) -> Any:
        if i in plan.hosted:
            cut = _streamed_source(param, leaf, plan)
            wide = cut if kept is None else source(kept, leaf.grad, leaf.param.shape).map(with_edits, cut)
        else:
            cut = natural_leaf(param, leaf.grad if leaf.trained else leaf.param, plan)
            wide = cut if kept is None else with_edits(natural_leaf(kept, leaf.grad, plan), cut)
        return _cast(wide, leaf.update_dtype)

    return plan.params_treedef.unflatten(
        [master(i, *x) for i, x in enumerate(zip(leaves, kept, plan.leaves, strict=True))]
    )


def _inner_seen(plan: ZeroPlan, inner: PyTree) -> list[Any]:
    """Returns the leaves of the user's own optimizer's state in natural shapes and its own dtypes."""

    def seen(x: jax.Array, leaf: StateLeaf) -> Any:
        if leaf.on_host:
            assert leaf.owner is not None
            return _cast(source(x, plan.leaves[leaf.owner].grad, leaf.shape), leaf.wide or x.dtype)
        return natural_leaf(x, leaf, plan).astype(leaf.wide or x.dtype)

    leaves = plan.inner_treedef.flatten_up_to(inner)
    return [seen(x, leaf) for x, leaf in zip(leaves, plan.inner_leaves, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def edited_master(leaf: LeafPlan, plan: ZeroPlan, param: jax.Array, master: jax.Array) -> jax.Array:
    """Returns a master as stored, with what was edited in its parameter, see [Note: Masters]."""
    assert leaf.master is not None
    cut = natural_leaf(param, leaf.grad if leaf.trained else leaf.param, plan)
    return stored_leaf(with_edits(natural_leaf(master, leaf.grad, plan), cut), leaf.master, plan)


class _Before(NamedTuple):
    """What an update starts from.

    Attributes:
      grads: Gradients, in natural or stored shapes; streamed ones where state lies on the host.
      params: Parameters as stored, if they are known.
      masters: What the optimizer sees of them.
      own: The state as stored.
    """

    grads: PyTree
    params: PyTree | None
    masters: PyTree | None
    own: ZeroOptState


def _next_state(
    plan: ZeroPlan, before: _Before, updates: PyTree, new_inner: PyTree, key: jax.Array | None, applied: Any
) -> tuple[list[Any], ZeroOptState]:
    """Returns the updates of the stored parameters and the new state as stored, see [Note: Masters]."""
    own = before.own
    update = plan.params_treedef.flatten_up_to(updates)
    nothing = [None] * len(plan.leaves)
    grads, params, masters = (
        nothing if tree is None else plan.params_treedef.flatten_up_to(tree)
        for tree in (before.grads, before.params, before.masters)
    )
    old_masters = nothing if own.masters is None else plan.params_treedef.flatten_up_to(own.masters)
    old_inner = plan.inner_treedef.flatten_up_to(own.inner)
    inner = plan.inner_treedef.flatten_up_to(new_inner)
    stored: list[Any] = []
    kept: list[Any] = []
    for i, leaf in enumerate(plan.leaves):
        leaves = _Leaves(i, leaf, grads[i], params[i], masters[i], old_masters[i], update[i])
        if i in plan.hosted:
            own_inner = [j for j, x in enumerate(plan.inner_leaves) if x.on_host and x.owner == i]
            change, master, new = _streamed_update(
                plan, leaves, [(j, old_inner[j], inner[j]) for j in own_inner], key, applied
            )
            for j, x in zip(own_inner, new, strict=True):
                inner[j] = x
        else:
            change, master = _update_leaf(plan, leaves, key)
        stored.append(change)
        kept.append(master)
    inner = [
        x if leaf.on_host else stored_leaf(_rounded_inner(plan, j, x, key), leaf, plan)
        for j, (x, leaf) in enumerate(zip(inner, plan.inner_leaves, strict=True))
    ]
    new_own = dataclasses.replace(
        own,
        inner=plan.inner_treedef.unflatten(inner),
        masters=None if own.masters is None else plan.params_treedef.unflatten(kept),
        num_updates=None if own.num_updates is None else own.num_updates + 1,
    )
    return stored, new_own


class _Leaves(NamedTuple):
    """What belongs to one parameter. Streamed values are of its natural shape; arrays as in `_Before`."""

    index: int
    leaf: LeafPlan
    grad: Any
    param: Any
    master: Any
    old_master: Any
    update: Any


def _update_leaf(plan: ZeroPlan, x: _Leaves, key: jax.Array | None) -> tuple[Any, Any]:
    """Returns the update of a stored parameter and its new master as stored."""
    leaf = x.leaf
    if not leaf.trained:
        return jnp.asarray(-0.0).astype(leaf.param.dtype), None  # x + -0.0 is x to the bit
    if x.update is None or not _is_rounded(x):
        return x.update if x.update is None else stored_leaf(x.update, leaf.param, plan), None
    rounded, master = _rounded(x, x.master + x.update, key)
    kept = None if leaf.master is None else stored_leaf(master, leaf.master, plan)
    return _change(x, stored_leaf(rounded, leaf.param, plan)), kept


def _is_rounded(x: _Leaves) -> bool:
    """Whether a new parameter is its rounded master, so that the update alone does not give it."""
    return x.leaf.param.dtype != x.leaf.update_dtype and x.param is not None and x.master is not None


def _rounded(x: _Leaves, moved: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns a new parameter, and its new master if it has one, from what the optimizer made of them."""
    leaf = x.leaf
    if leaf.master is None:
        return _round(moved, leaf.param.dtype, key, x.index), None
    master = _round(moved, leaf.master.dtype, key, x.index)
    return narrow(master, leaf.param.dtype), master


def _change(x: _Leaves, rounded: jax.Array) -> jax.Array:
    """Returns what `optax.apply_updates` has to add to a stored parameter to arrive at its new value."""
    new_wide, old_wide = rounded.astype(x.leaf.update_dtype), x.param.astype(x.leaf.update_dtype)
    return jnp.where(rounded == x.param, 0, new_wide - old_wide)  # infinities included


def _streamed_update(
    plan: ZeroPlan, x: _Leaves, inner: list[tuple[int, Any, Any]], key: jax.Array | None, applied: Any
) -> tuple[Any, Any, list[Any]]:
    """The update of one parameter whose optimizer state lies on the host, see [Note: Streaming an update].

    Args:
      plan: The plan.
      x: What belongs to the parameter.
      inner: Of each leaf of its optimizer state on the host the number, the array, and its new value.
      key: For stochastic rounding.
      applied: Whether the step is applied; `None` if it always is.

    Returns:
      The update of the stored parameter, its new master as stored, the new arrays of `inner`.
    """
    leaf = x.leaf
    is_rounded = x.update is not None and _is_rounded(x)
    values = [] if x.update is None else [x.master.map(jnp.add, x.update) if is_rounded else x.update]
    values = [_streamed_source(y, leaf, plan) for y in (*values, *(new for _, _, new in inner))]
    old = [y for y in (x.old_master, *(y for _, y, _ in inner)) if y is not None]
    numbers = {"key": key, "applied": applied}
    names = [name for name, y in numbers.items() if y is not None]

    def body(position: tuple[Any, Any], values: list[Any], old: list[Any], *given: Any) -> tuple[list[Any], Any]:
        known = dict(zip(names, given, strict=True))
        own_key = known.get("key")
        for number in position if own_key is not None else ():
            own_key = jax.random.fold_in(own_key, number)
        remaining, new, result = iter(values), [], None
        if x.update is not None:
            result = next(remaining)
        if is_rounded:
            result, master = _rounded(x, result, own_key)
            new += [] if master is None else [master]
        new += [_rounded_inner(plan, j, y, own_key) for (j, _, _), y in zip(inner, remaining, strict=True)]
        new = [y.astype(before.dtype) for y, before in zip(new, old, strict=True)]
        if "applied" in known:
            new = [jnp.where(known["applied"], y, before) for y, before in zip(new, old, strict=True)]
        return new, result

    out = None
    if x.update is not None:
        dtype = leaf.param.dtype if is_rounded else leaf.update_dtype
        (grad,) = (y.array for y in sources_of([x.grad])[0])
        fits = not is_on_host(grad) and jnp.promote_types(dtype, grad.dtype) == grad.dtype
        out = grad if fits else jax.ShapeDtypeStruct(leaf.grad.stored_shape, dtype)
    host, device = stream(plan, leaf.grad, values, old, body, out, [numbers[name] for name in names])
    kept = host.pop(0) if x.old_master is not None else None
    if device is None:
        return None, kept, host
    device = natural_leaf(narrow(device, dtype), leaf.grad, plan)
    device = stored_leaf(device, leaf.param, plan)
    return (_change(x, device) if is_rounded else device), kept, host


def _rounded_inner(plan: ZeroPlan, number: int, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns a leaf of the inner optimizer state, given in its own dtype, in the dtype in which it is stored."""
    leaf = plan.inner_leaves[number]
    return x if leaf.wide is None else _round(x, leaf.dtype, key, len(plan.leaves) + number)


def _round(x: jax.Array, dtype: Any, key: jax.Array | None, index: int) -> jax.Array:
    if x.dtype == dtype:
        return x
    if key is None or dtype != jnp.bfloat16:
        return narrow(x, dtype)
    return round_stochastically(x, jax.random.fold_in(key, index))


def _overflowed(plan: ZeroPlan, grads: PyTree) -> jax.Array:
    """Returns for each parameter whether its gradient is not finite."""
    leaves = plan.params_treedef.flatten_up_to(grads)
    return jnp.stack([_not_finite(x if leaf.trained else None) for x, leaf in zip(leaves, plan.leaves, strict=True)])


def with_next_loss_scale(plan: ZeroPlan, old: Any, new: Any, overflowed: jax.Array) -> Any:
    """Returns the optimizer state `new` with the loss scale that follows `old`'s."""
    rules = plan.config.policy.loss_scale
    if not isinstance(rules, DynamicLossScale):
        return new
    return dataclasses.replace(new, loss_scale=next_loss_scale(old.loss_scale, rules, overflowed))


def _not_finite(x: jax.Array | None) -> jax.Array:
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros((), jnp.bool_)
    return ~jnp.all(jnp.isfinite(x))


_update_jit = jax.jit(_update, static_argnums=(0, 5))


def _apply_inner(tx: ZeroTransformation, args: tuple[PyTree, ...], functions: dict[str, Any]) -> Any:
    def call(grads: PyTree, opt_state: PyTree, params: PyTree, arrays: dict[str, Any]) -> Any:
        return tx.inner.update(grads, opt_state, params, **arrays, **functions)

    if tx.plan.num_shards == 1 and not tx.plan.hosted:
        return call(*args)
    leaves, treedef = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Streamed))
    shapes = treedef.unflatten([x.aval() if isinstance(x, Streamed) else x for x in leaves])
    jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*shapes)
    inner, consts = _compat.open_jaxpr(jaxpr)
    walk = UpdateWalk(tx.plan)
    outputs = walk(inner, consts, leaves)
    if walk.brought:
        warnings.warn(
            "The optimizer needs more than single elements of state that is on the host, so each step brings these "
            f"leaves to the devices as a whole: {sorted(walk.brought)}. Their memory is needed once more there; keep "
            "them on the devices (`LeafRule(offload=False)`) if that is too much.",
            stacklevel=2,
        )
    return jax.tree.unflatten(jax.tree.structure(out), outputs)
