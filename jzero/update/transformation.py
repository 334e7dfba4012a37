"""Wraps the user's optax transformation: it sees natural shapes, while the state stays cut."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.arrays.casts import apply_edits, round_to
from jzero.arrays.placement import is_on_host, make_strongly_typed, natural_leaf, stored_leaf
from jzero.arrays.streamed import StreamedValue, source
from jzero.config.precision import DynamicLossScale, Precision, is_float8, is_key, scale_by
from jzero.plan.leaves import LeafPlan, StateLeaf
from jzero.plan.opt_state import ZeroOptState, next_loss_scale
from jzero.plan.padded import is_padded
from jzero.plan.plan import ZeroPlan
from jzero.plan.planner import own_opt_state, zero_grads
from jzero.update.extra_args import check_grads, extra_args, said_clearly
from jzero.update.leaf import (
    Grad,
    LeafUpdate,
    Moments,
    add_update,
    check_params_stored,
    find_gathered_new,
    new_param,
    place_update,
    round_inner,
    streamed_source,
    streamed_update,
    update_leaf,
)
from jzero.update.walk import evaluate_update

__all__ = ["ZeroTransformation", "keep_unless", "with_next_loss_scale"]

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ZeroTransformation:
    """An optax transformation over a partitioned state; takes the place of `tx` in the train state.

    Two wrappers of the same optax object under equal plans are equal, so wrapping again neither recompiles nor
    breaks `jax.tree.map` over two states.

    Attributes:
      inner: The user's transformation.
      plan: The plan of the state.
      applied: If the state has its own `apply_gradients`: whether the train step applies its result, a 0-d boolean.
        Otherwise `None`: `update` then skips non-finite gradients if the precision policy says so.
      value: If the state has its own `apply_gradients`: the loss of the train step, for optimizers that ask for it.
    """

    inner: Any
    plan: ZeroPlan
    applied: jax.Array | None = dataclasses.field(default=None, compare=False, repr=False)
    value: jax.Array | None = dataclasses.field(default=None, compare=False, repr=False)

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial optimizer state for stored `params`, laid out as planned."""
        return _init(self, params)

    def update(self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any) -> Any:
        """Applies the inner transformation.

        Args:
          updates: Gradients, each in its natural or its stored shape; any values for frozen parameters.
          state: The optimizer state as stored.
          params: The parameters as stored.
          **extra_args: Passed on to the inner transformation.

        Returns:
          `(updates, state)`, laid out as the plan stores parameters and optimizer state. The update of a frozen
          parameter is a scalar zero.
        """
        if params is None and self.plan.config.policy.compute is not None:
            raise ValueError("A precision policy needs the parameters: call `tx.update(grads, opt_state, params)`.")
        if any(leaf.param.on_host for leaf in self.plan.leaves):
            raise ValueError(
                "Parameters that lie on the host (`Offload(params='host')`) are updated by steps of `make_train_step` "
                "alone: optax cannot add to them. Use one, or keep the parameters on the devices."
            )
        check_grads(self.plan, updates)
        check_params_stored(self.plan, params)
        in_trace = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((updates, state, params)))
        arrays = {k: v for k, v in extra_args.items() if not callable(v)}
        functions = tuple((k, v) for k, v in sorted(extra_args.items()) if callable(v))
        update = _update if in_trace else _update_jit
        return update(self, updates, state, params, arrays, functions)

    def apply(
        self,
        grads: Sequence[Grad],
        state: PyTree,
        params: PyTree,
        applied: jax.Array | None = None,
        value: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Returns the parameters and optimizer state after a step, as stored; call it inside `jit`.

        Unlike `update`, it can update parameters on the host, and gather new parameters in place of updates.

        Args:
          grads: One per parameter leaf; any values for frozen parameters.
          state: The optimizer state as stored.
          params: The parameters as stored.
          applied: Whether anything changes, a 0-d boolean; `None` means yes.
          value: The loss, for optimizers that ask for it; `None` if it is not known.
        """
        plan, own, old = self.plan, _to_own_state(self.plan, state), self.plan.flat_params(params)
        seen = [_like_grad(plan, i, g.reduced, *g.factors) for i, g in enumerate(grads)]
        gathered = find_gathered_new(plan)
        extra = extra_args(self.inner, value, plan.params_treedef.unflatten(seen))
        moved, new = _apply_updates(
            plan, own, _optimize(plan, self.inner.update, own, seen, old, extra), applied, gathered
        )

        def new_param(i: int, leaf: LeafPlan) -> jax.Array:
            if not leaf.trained:
                return old[i]
            return moved[i] if i in gathered or leaf.param.on_host else add_update(old[i], moved[i], applied)

        after = plan.stored_params([new_param(i, leaf) for i, leaf in enumerate(plan.leaves)])
        new = new if applied is None else keep_unless(applied, new, own)
        return after, _to_opt_state(plan, new)

    def loss_scale(self, opt_state: PyTree) -> jax.Array | None:
        """Returns the factor of the loss, in float32; `None` without a loss scale."""
        scale = self.plan.config.policy.loss_scale
        if isinstance(scale, DynamicLossScale):
            return opt_state.loss_scale.scale
        return None if scale is None else jnp.asarray(scale, jnp.float32)

    def constrain(self, params: PyTree) -> PyTree:
        """Lays stored parameters out as planned; in a user's loop the compiler may have chosen another layout."""
        leaves = self.plan.flat_params(params)
        return self.plan.params_treedef.unflatten(
            [stored_leaf(x, leaf.param, self.plan) for x, leaf in zip(leaves, self.plan.leaves, strict=True)]
        )

    def natural_params(self, params: PyTree) -> PyTree:
        """Returns stored parameters in their natural shapes and in the dtype that the loss sees."""
        leaves = self.plan.flat_params(self.constrain(params))
        natural = [
            natural_leaf(round_to(x, leaf.compute_dtype), leaf.param, self.plan)
            for x, leaf in zip(leaves, self.plan.leaves, strict=True)
        ]
        return self.plan.params_treedef.unflatten(natural)


@functools.partial(jax.jit, static_argnums=0)
def _init(tx: ZeroTransformation, params: PyTree) -> PyTree:
    plan = tx.plan
    leaves = plan.flat_params(params)
    seen = [
        _optimizer_view(natural_leaf(x, leaf.param, plan), leaf) for x, leaf in zip(leaves, plan.leaves, strict=True)
    ]
    made = plan.inner_treedef.flatten_up_to(tx.inner.init(plan.params_treedef.unflatten(seen)))
    inner = plan.inner_treedef.unflatten(
        [
            stored_leaf(round_inner(plan, j, x, None), leaf, plan)
            for j, (x, leaf) in enumerate(zip(made, plan.inner_leaves, strict=True))
        ]
    )
    masters = [
        None if leaf.master is None else stored_leaf(x.astype(leaf.master.dtype), leaf.master, plan)
        for x, leaf in zip(seen, plan.leaves, strict=True)
    ]
    waiting = [None] * len(masters) if plan.waiting is None else plan.flat_params(plan.waiting.grads)
    zeros = [
        x if leaf is None else stored_leaf(x, leaf, plan) for x, leaf in zip(zero_grads(plan), waiting, strict=True)
    ]
    own = own_opt_state(plan, masters, zeros)
    own = ZeroOptState(inner, None, None, None) if own is None else dataclasses.replace(own, inner=inner)
    return _to_opt_state(plan, jax.tree.map(jnp.asarray, own))


def _update(
    tx: ZeroTransformation,
    updates: PyTree,
    state: PyTree,
    params: PyTree | None,
    arrays: dict[str, Any],
    functions: tuple[tuple[str, Any], ...],
) -> Any:
    plan, own, applied = tx.plan, _to_own_state(tx.plan, state), tx.applied
    with jax.named_scope("zero_update"):
        overflowed = _find_overflows(plan, updates) if applied is None and plan.config.policy.skips else None
        if overflowed is not None:
            applied = ~jnp.any(overflowed)
        known = None if params is None else plan.flat_params(tx.constrain(params))
        grads = _like_grads(plan, updates)
        # Arguments with the structure of the parameters (`grad=` of a line search) may be stored, like gradients.
        like_params = {
            k: plan.params_treedef.unflatten(_like_grads(plan, v))
            for k, v in arrays.items()
            if jax.tree.structure(v, is_leaf=is_padded) == plan.params_treedef
        }
        optimize = functools.partial(tx.inner.update, **dict(functions))
        of_step = extra_args(tx.inner, tx.value, plan.params_treedef.unflatten(grads))
        optimized = _optimize(plan, optimize, own, grads, known, {**of_step, **arrays, **like_params})
        changes, new = _apply_updates(plan, own, optimized, applied)
        if overflowed is not None and applied is not None:
            changes = [x if x is None else jnp.where(applied, x, jnp.asarray(-0.0).astype(x.dtype)) for x in changes]
            new = with_next_loss_scale(plan, own, keep_unless(applied, new, own), overflowed)
        changes = [
            x if x is None or i in plan.keys else place_update(x, leaf.param, plan)
            for i, (x, leaf) in enumerate(zip(changes, plan.leaves, strict=True))
        ]
        made = plan.stored_params(changes) if params is None else jax.tree.structure(params).unflatten(changes)
        return made, _to_opt_state(plan, new, like=state)


_update_jit = jax.jit(_update, static_argnums=(0, 5))


def _to_own_state(plan: ZeroPlan, state: PyTree) -> ZeroOptState:
    """Returns the stored arrays as a `ZeroOptState`; jzero's own fields are `None` if the plan needs none."""
    leaves = plan.opt_treedef.unflatten(plan.flat_opt_state(state))
    return leaves if plan.has_opt_state else ZeroOptState(leaves, None, None, None)


def _to_opt_state(plan: ZeroPlan, own: ZeroOptState, *, like: PyTree = None) -> PyTree:
    """Returns the optimizer state for a state, its padded leaves as nodes; as arrays if those of `like` are."""
    state = own if plan.has_opt_state else own.inner
    if like is not None and not any(map(is_padded, jax.tree.leaves(like, is_leaf=is_padded))):
        return state  # of an NNX optimizer
    return plan.stored_opt_state(plan.opt_treedef.flatten_up_to(state))


def keep_unless(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` if the step is applied, else `old`. On the host the update itself chose, so `new` stays."""
    return jax.tree.map(lambda new, old: new if is_on_host(new) else jnp.where(applied, new, old), new, old)


def _like_grads(plan: ZeroPlan, tree: PyTree) -> list[Any]:
    """Returns the leaves of a tree structured like the parameters; see `_like_grad`."""
    return [x if x is None else _like_grad(plan, i, x) for i, x in enumerate(plan.flat_params(tree))]


def _like_grad(plan: ZeroPlan, number: int, x: Any, *factors: jax.Array) -> Any:
    """Returns a gradient, or a leaf like it, in natural shape, cut like gradients; a streamed value if offloaded."""
    leaf = plan.leaves[number]
    if not leaf.trained:  # never read; see [Note: Frozen parameters]
        return jnp.zeros(leaf.param.shape, leaf.update_dtype)
    if number in plan.offloaded:
        x = streamed_source(x, leaf, plan)
        x = x.map(scale_by, *factors) if factors else x
    else:
        x = natural_leaf(scale_by(x, *factors) if factors else x, leaf.grad, plan)
    # Gradients are fp32 or wider, and so are optax's results from them and the parameters, except for float8.
    as_it_is = plan.config.policy == Precision() and not is_float8(leaf.update_dtype)
    return x if as_it_is else _cast(x, leaf.update_dtype)


def _optimizer_view(param: Any, leaf: LeafPlan) -> Any:
    """Returns a parameter in natural shape as the optimizer sees it; random keys become zeros of their shape."""
    return (
        jnp.zeros(leaf.param.shape, leaf.update_dtype) if is_key(leaf.param.dtype) else _cast(param, leaf.update_dtype)
    )


def _cast(x: Any, dtype: Any) -> Any:
    return x.map(lambda y: y.astype(dtype)) if isinstance(x, StreamedValue) else x.astype(dtype)


def _masters(plan: ZeroPlan, params: Sequence[jax.Array], masters: Sequence[jax.Array | None]) -> list[Any]:
    """Returns the parameters as the optimizer sees them: in natural shapes, cut, with edits taken over."""

    def master(i: int, param: jax.Array, kept: jax.Array | None, leaf: LeafPlan) -> Any:
        cut: Any
        if i in plan.offloaded:
            cut = streamed_source(param, leaf, plan)
            wide = cut if kept is None else source(kept, leaf.grad, leaf.param.shape).map(apply_edits, cut)
        else:
            cut = natural_leaf(param, leaf.grad if leaf.trained else leaf.param, plan)
            wide = cut if kept is None else apply_edits(natural_leaf(kept, leaf.grad, plan), cut)
        return _optimizer_view(wide, leaf)

    return [master(i, *x) for i, x in enumerate(zip(params, masters, plan.leaves, strict=True))]


def _inner_view(plan: ZeroPlan, inner: PyTree) -> list[Any]:
    """Returns the leaves of the inner optimizer state in their natural shapes and own dtypes."""

    def seen(x: jax.Array, leaf: StateLeaf) -> Any:
        if leaf.on_host:
            assert leaf.owner is not None
            return _cast(source(x, plan.leaves[leaf.owner].grad, leaf.shape), leaf.wide or x.dtype)
        return natural_leaf(x, leaf, plan).astype(leaf.wide or x.dtype)

    leaves = plan.inner_treedef.flatten_up_to(inner)
    return [seen(x, leaf) for x, leaf in zip(leaves, plan.inner_leaves, strict=True)]


def _optimize(
    plan: ZeroPlan, optimize: Any, own: ZeroOptState, grads: list[Any], params: list[Any] | None, extra: dict[str, Any]
) -> tuple[list[LeafUpdate], list[Any]]:
    """Runs the optimizer, an optax `update`. Returns each parameter's update and the leaves of the new inner state."""
    nothing = [None] * len(plan.leaves)
    old_masters = nothing if own.masters is None else plan.flat_params(own.masters)
    masters = nothing if params is None else _masters(plan, params, old_masters)
    tree = plan.params_treedef.unflatten
    seen_inner = plan.inner_treedef.unflatten(_inner_view(plan, own.inner))
    seen = (tree(grads), seen_inner, None if params is None else tree(masters), extra)
    with said_clearly():
        new_updates, new_inner = evaluate_update(plan, optimize, seen)
    inner = plan.inner_treedef.flatten_up_to(new_inner)
    moments: list[list[Moments]] = [[] for _ in plan.leaves]
    changes = zip(plan.inner_leaves, plan.inner_treedef.flatten_up_to(own.inner), inner, strict=True)
    for j, (leaf, old, new) in enumerate(changes):
        if leaf.on_host and leaf.owner is not None:
            moments[leaf.owner].append(Moments(j, old, new))
    updates = _like_grads(plan, new_updates)
    columns = (plan.leaves, grads, params or nothing, masters, old_masters, updates, moments)
    return [LeafUpdate(i, *x) for i, x in enumerate(zip(*columns, strict=True))], inner


def _apply_updates(
    plan: ZeroPlan,
    own: ZeroOptState,
    optimized: tuple[list[LeafUpdate], list[Any]],
    applied: jax.Array | None,
    gathered: frozenset[int] = frozenset(),
) -> tuple[list[Any], ZeroOptState]:
    """Returns the update of each stored parameter, and the new state as stored; see [Note: Masters].

    For parameters on the host and those in `gathered`, it returns the new value instead. `applied` decides whether
    these, and all other arrays on the host, change.
    """
    key = None if own.num_updates is None else jax.random.fold_in(jax.random.key(0), own.num_updates)
    leaves, inner = optimized
    moved: list[tuple[Any, Any]] = []
    for x in leaves:
        if x.number in plan.offloaded:
            result, master, moments = streamed_update(plan, x, key, applied)
            for old, new in zip(x.moments, moments, strict=True):
                inner[old.number] = new
            moved.append((result, master))
        elif x.number in gathered:
            moved.append(new_param(plan, x, key, applied))
        else:
            moved.append(update_leaf(plan, x, key))
    inner = [
        x if leaf.on_host else stored_leaf(make_strongly_typed(round_inner(plan, j, x, key), leaf.dtype), leaf, plan)
        for j, (x, leaf) in enumerate(zip(inner, plan.inner_leaves, strict=True))
    ]
    return [x for x, _ in moved], dataclasses.replace(
        own,
        inner=plan.inner_treedef.unflatten(inner),
        masters=None if own.masters is None else plan.params_treedef.unflatten([x for _, x in moved]),
        num_updates=None if own.num_updates is None else own.num_updates + 1,
    )


def _find_overflows(plan: ZeroPlan, grads: PyTree) -> jax.Array:
    """Returns one boolean per parameter: whether its gradient has non-finite elements."""
    leaves = plan.flat_params(grads)
    return jnp.stack([_not_finite(x if leaf.trained else None) for x, leaf in zip(leaves, plan.leaves, strict=True)])


def with_next_loss_scale(plan: ZeroPlan, old: Any, new: Any, overflowed: jax.Array) -> Any:
    """Returns the optimizer state `new`, with the loss scale that follows the one of `old`."""
    rules = plan.config.policy.loss_scale
    if not isinstance(rules, DynamicLossScale):
        return new
    return dataclasses.replace(new, loss_scale=next_loss_scale(old.loss_scale, rules, overflowed))


def _not_finite(x: jax.Array | None) -> jax.Array:
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros((), jnp.bool_)
    return ~jnp.all(jnp.isfinite(x))
