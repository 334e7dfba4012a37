"""The optax wrapper: the inner transformation sees natural shapes, the state stays cut."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero import _compat
from jzero.arrays.casts import round_to, with_edits
from jzero.arrays.placement import is_on_host, natural_leaf, stored_leaf, strongly_typed
from jzero.arrays.streamed import Streamed, source
from jzero.config.precision import DynamicLossScale, Precision, is_float8, is_key, scale_by
from jzero.plan.leaves import LeafPlan, StateLeaf
from jzero.plan.opt_state import ZeroOptState, next_loss_scale
from jzero.plan.padded import is_padded
from jzero.plan.plan import ZeroPlan
from jzero.plan.planner import own_opt_state, zero_grads
from jzero.update.leaf import (
    NO_ELEMENTS,
    LeafUpdate,
    Moments,
    check_params_stored,
    new_param,
    placing,
    rounded_inner,
    streamed_source,
    streamed_update,
    update_leaf,
)
from jzero.update.walk import UpdateWalk

__all__ = ["InStep", "ZeroTransformation", "keep_unless", "with_next_loss_scale"]

PyTree = Any


class InStep(NamedTuple):
    """What a train step knows about the update that it calls, which state on the host has a use for.

    Attributes:
      applied: Whether the step is applied, a 0-d boolean; `None` if it always is.
      reduced: By `id` of each gradient: `(as it was reduced, what it was multiplied with)`. Where the optimizer gets
        that very gradient, chunks of the reduced one are multiplied again, and the product is never stored.
      new_params: By number, where `update` leaves the new values of `direct` parameters.
      params: The parameters as stored, for the `direct` ones, in whose place others are handed to `update`.
      direct: The parameters that `update` makes anew itself: those that lie on the host, to which optax cannot add,
        and those of [Note: Parameters made anew].
    """

    applied: jax.Array | None
    reduced: Mapping[int, tuple[jax.Array, tuple[jax.Array, ...]]]
    new_params: dict[int, jax.Array]
    params: PyTree
    direct: frozenset[int] = frozenset()


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
        if self.step is None and any(leaf.param.on_host for leaf in self.plan.leaves):
            raise ValueError(
                "Parameters that lie on the host (`Offload(params='host')`) are updated by steps of `make_train_step` "
                "alone: optax cannot add to them. Use one, or keep the parameters on the devices."
            )
        check_params_stored(self.plan, params)
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

    def as_planned(self, params: PyTree) -> PyTree:
        """Returns stored parameters laid out as planned: in a loop of the user's the compiler chooses how they come."""
        leaves = self.plan.flat_params(params)
        return self.plan.params_treedef.unflatten(
            [stored_leaf(x, leaf.param, self.plan) for x, leaf in zip(leaves, self.plan.leaves, strict=True)]
        )

    def natural_params(self, params: PyTree) -> PyTree:
        """Returns stored parameters in their natural shapes, in the dtype that the loss sees."""
        leaves = self.plan.flat_params(self.as_planned(params))
        natural = [
            natural_leaf(round_to(x, leaf.compute_dtype), leaf.param, self.plan)
            for x, leaf in zip(leaves, self.plan.leaves, strict=True)
        ]
        return self.plan.params_treedef.unflatten(natural)


@functools.partial(jax.jit, static_argnums=0)
def _init(tx: ZeroTransformation, params: PyTree) -> PyTree:
    plan = tx.plan
    leaves = plan.flat_params(params)
    seen = [_seen(natural_leaf(x, leaf.param, plan), leaf) for x, leaf in zip(leaves, plan.leaves, strict=True)]
    made = plan.inner_treedef.flatten_up_to(tx.inner.init(plan.params_treedef.unflatten(seen)))
    inner = plan.inner_treedef.unflatten(
        [
            stored_leaf(rounded_inner(plan, j, x, None), leaf, plan)
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
    plan, given = tx.plan, params
    own = state if plan.has_opt_state else ZeroOptState(state, None, None, None)
    # A train step of jzero is in that scope already.
    with jax.named_scope("zero_update") if tx.step is None else contextlib.nullcontext():
        guards = tx.step is None and plan.config.policy.skips
        overflowed = _overflowed(plan, updates) if guards else jnp.zeros((0,), jnp.bool_)
        if tx.step is not None and params is not None:
            pairs = zip(*(plan.flat_params(tree) for tree in (params, tx.step.params)), strict=True)
            params = plan.params_treedef.unflatten([y if i in tx.step.direct else x for i, (x, y) in enumerate(pairs)])
        elif params is not None:
            params = tx.as_planned(params)
        step = tx.step or InStep(~jnp.any(overflowed) if guards else None, {}, {}, None)
        grads = _like_grads(plan, updates, step.reduced)
        masters = None if params is None else _masters(plan, params, own.masters)
        inner = _inner_seen(plan, own.inner)
        # Trees of the parameters' structure (`grad=` of a line search) come as stored, like the gradients.
        like_params = {
            k: _like_grads(plan, v)
            for k, v in arrays.items()
            if jax.tree.structure(v, is_leaf=is_padded) == plan.params_treedef
        }
        seen = (grads, plan.inner_treedef.unflatten(inner), masters, {**arrays, **like_params})
        new_updates, new_inner = _apply_inner(tx, seen, dict(functions))
        key = None if own.num_updates is None else jax.random.fold_in(jax.random.key(0), own.num_updates)
        before = _Before(grads, params, masters, own)
        new_updates = _like_grads(plan, new_updates)
        stored, new = _next_state(plan, before, new_updates, new_inner, key, step)
        if guards:
            applied = jnp.asarray(step.applied)
            stored = [x if x is None else jnp.where(applied, x, jnp.asarray(-0.0).astype(x.dtype)) for x in stored]
            new = with_next_loss_scale(plan, own, keep_unless(applied, new, own), overflowed)
        if tx.step is None:
            pairs = zip(stored, plan.leaves, strict=True)
            stored = [x if x is None else placing(x, leaf.param, plan) for x, leaf in pairs]
        made = plan.stored_params(stored) if given is None else jax.tree.structure(given).unflatten(stored)
        return made, new if plan.has_opt_state else new.inner


def keep_unless(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` if the step is applied, else `old`; what is on the host was decided on where it was overwritten."""
    return jax.tree.map(lambda new, old: new if is_on_host(new) else jnp.where(applied, new, old), new, old)


def _like_grads(plan: ZeroPlan, tree: PyTree, reduced: Mapping[int, Any] = MappingProxyType({})) -> PyTree:
    """A tree of the parameters' structure in natural shapes, each device's part at hand; streamed ones for the host."""
    leaves = plan.flat_params(tree)

    def like_grad(x: Any, i: int, leaf: LeafPlan) -> Any:
        if not leaf.trained:  # never read, see `_trained`
            return jnp.zeros(leaf.param.shape, leaf.update_dtype)
        if i not in plan.offloaded:
            x = natural_leaf(x, leaf.grad, plan)
        else:
            raw, factors = reduced.get(id(x), (x, ()))
            x = source(raw, leaf.grad, leaf.param.shape) if is_on_host(raw) else streamed_source(raw, leaf, plan)
            x = x.map(scale_by, *factors) if factors else x
        # Gradients are fp32 or wider, and so is what optax makes of them and parameters, but for those of 8 bits.
        as_it_is = plan.config.policy == Precision() and not is_float8(leaf.update_dtype)
        return x if as_it_is else _cast(x, leaf.update_dtype)

    seen = [
        x if x is None else like_grad(x, i, leaf) for i, (x, leaf) in enumerate(zip(leaves, plan.leaves, strict=True))
    ]
    return plan.params_treedef.unflatten(seen)


def _seen(param: Any, leaf: LeafPlan) -> Any:
    """Returns a parameter in natural shape as the optimizer sees it: of random keys nothing but the shape."""
    return jnp.zeros(param.shape, leaf.update_dtype) if is_key(leaf.param.dtype) else _cast(param, leaf.update_dtype)


def _cast(x: Any, dtype: Any) -> Any:
    return x.map(lambda y: y.astype(dtype)) if isinstance(x, Streamed) else x.astype(dtype)


def _masters(plan: ZeroPlan, params: PyTree, masters: PyTree) -> PyTree:
    """Returns what the optimizer sees of the parameters: natural shapes, cut, edits of the parameters included."""
    leaves = plan.flat_params(params)
    kept = [None] * len(leaves) if masters is None else plan.flat_params(masters)

    def master(i: int, param: jax.Array, kept: jax.Array | None, leaf: LeafPlan) -> Any:
        cut: Any
        if i in plan.offloaded:
            cut = (
                source(param, leaf.grad, leaf.param.shape) if leaf.param.on_host else streamed_source(param, leaf, plan)
            )
            wide = cut if kept is None else source(kept, leaf.grad, leaf.param.shape).map(with_edits, cut)
        else:
            cut = natural_leaf(param, leaf.grad if leaf.trained else leaf.param, plan)
            wide = cut if kept is None else with_edits(natural_leaf(kept, leaf.grad, plan), cut)
        return _seen(wide, leaf)

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


class _Before(NamedTuple):
    """What an update starts from.

    Attributes:
      grads: What the optimizer sees of the gradients.
      params: Parameters as stored, if they are known.
      masters: What the optimizer sees of them.
      own: The state as stored.
    """

    grads: PyTree
    params: PyTree | None
    masters: PyTree | None
    own: ZeroOptState


def _next_state(
    plan: ZeroPlan, before: _Before, updates: PyTree, new_inner: PyTree, key: jax.Array | None, step: InStep
) -> tuple[list[Any], ZeroOptState]:
    """Returns the updates of the stored parameters and the new state as stored.

    See [Note: Masters].
    """
    own = before.own
    update = plan.flat_params(updates)
    nothing = [None] * len(plan.leaves)
    grads, params, masters = (
        nothing if tree is None else plan.flat_params(tree) for tree in (before.grads, before.params, before.masters)
    )
    old_masters = nothing if own.masters is None else plan.flat_params(own.masters)
    old_inner = plan.inner_treedef.flatten_up_to(own.inner)
    inner = plan.inner_treedef.flatten_up_to(new_inner)
    stored: list[Any] = []
    kept: list[Any] = []
    for i, leaf in enumerate(plan.leaves):
        around = LeafUpdate(i, leaf, grads[i], params[i], masters[i], old_masters[i], update[i])
        if i in plan.offloaded:
            moments = [
                Moments(j, old_inner[j], inner[j])
                for j, x in enumerate(plan.inner_leaves)
                if x.on_host and x.owner == i
            ]
            change, master, param, new = streamed_update(plan, around, moments, key, step.applied)
            if param is not None:
                step.new_params[i] = param
            for own_leaf, x in zip(moments, new, strict=True):
                inner[own_leaf.number] = x
        elif i in step.direct - plan.keys and update[i] is not None and masters[i] is not None:
            step.new_params[i], master = new_param(plan, around, key, step.applied)
            change = NO_ELEMENTS
        else:
            change, master = update_leaf(plan, around, key)
        stored.append(change)
        kept.append(master)
    inner = [
        x if leaf.on_host else stored_leaf(strongly_typed(rounded_inner(plan, j, x, key), leaf.dtype), leaf, plan)
        for j, (x, leaf) in enumerate(zip(inner, plan.inner_leaves, strict=True))
    ]
    new_own = dataclasses.replace(
        own,
        inner=plan.inner_treedef.unflatten(inner),
        masters=None if own.masters is None else plan.params_treedef.unflatten(kept),
        num_updates=None if own.num_updates is None else own.num_updates + 1,
    )
    return stored, new_own


def _overflowed(plan: ZeroPlan, grads: PyTree) -> jax.Array:
    """Returns for each parameter whether its gradient is not finite."""
    leaves = plan.flat_params(grads)
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

    if tx.plan.num_shards == 1 and not tx.plan.offloaded:
        return call(*args)
    leaves, treedef = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Streamed))
    shapes = treedef.unflatten([x.aval() if isinstance(x, Streamed) else x for x in leaves])
    traced = jax.jit(call).trace(*shapes)
    opened, consts = _compat.open_jaxpr(traced.jaxpr)
    walk, out = UpdateWalk(tx.plan), traced.out_info
    if not tx.plan.offloaded and not walk.mixes(opened):  # then it is one call, which is traced already
        return jax.jit(call)(*args)
    outputs = walk(opened, consts, leaves)
    plan = tx.plan
    new_updates, new_inner = jax.tree.unflatten(jax.tree.structure(out), outputs)
    updates = [x if i in plan.offloaded else walk.computed(x) for i, x in enumerate(plan.flat_params(new_updates))]
    inner = [
        x if leaf.on_host else walk.computed(x)
        for x, leaf in zip(plan.inner_treedef.flatten_up_to(new_inner), plan.inner_leaves, strict=True)
    ]
    if walk.fetched_whole:
        warnings.warn(
            "The optimizer needs more than single elements, or their sum, of what is on the host, so each step brings "
            f"these leaves to the devices as a whole: {sorted(walk.fetched_whole)}. Their memory is needed once more "
            "there; keep them on the devices (`LeafRule(offload=False)`) if that is too much.",
            stacklevel=2,
        )
    return plan.params_treedef.unflatten(updates), plan.inner_treedef.unflatten(inner)
