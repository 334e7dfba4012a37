"""Computes the next state from a step's gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jzero.core.base.types import PyTree, TrainStateLike
from jzero.core.config.precision import scale_by
from jzero.core.engine.written_variables import Changed
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import make_strongly_typed, memory_of
from jzero.core.plan.opt_state import with_next_loss_scale
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.adapter import adapt
from jzero.core.state.train_state import write_fields
from jzero.core.update.run import Done
from jzero.core.update.transformation import NO_ELEMENTS
from jzero.core.update.whole import Grad, StepGrads


def scaled_grads(
    plan: ZeroPlan, grads: Sequence[jax.Array], reduced: Sequence[jax.Array], factor: jax.Array, *clip: jax.Array
) -> list[Grad[jax.Array]]:
    """Returns the gradients with their factors, which the update applies.

    Args:
      plan: The plan.
      grads: One per parameter leaf: `reduced` times `factor`; empty if `reduced` is in host memory.
      reduced: The reduced gradients.
      factor: The factor for the loss scale and micro-batches.
      *clip: The factors of clipping.
    """
    pairs = enumerate(zip(grads, reduced, strict=True))
    return [Grad(raw, (factor, *clip)) if i in plan.offloaded else Grad(g, clip) for i, (g, raw) in pairs]


def next_state(
    state: TrainStateLike,
    step_grads: StepGrads,
    changed: Changed,
    update: StepGrads | None,
    done: Done | None = None,
) -> TrainStateLike:
    """Returns the state after a step, as the plan stores it; call it inside `jit`.

    Gradients that are not applied change only the loss scale, and those of a batch without weight not even that.

    Args:
      state: The state before the step.
      step_grads: The step's gradients.
      changed: What the loss wrote, by field of the state and path in the field.
      update: The gradients to apply now: `step_grads`, those of an earlier step, or none.
      done: What passes over records computed, if state is there.
    """
    plan = state.tx.plan
    new = write_fields(state, changed)
    if step_grads.applied is not None and new is not state:
        new = _keep_unless(step_grads.applied, new, state)
    laid_out: list[jax.Array] = []
    if update is not None:
        new = _update(new, update.grads, update.applied, update.value, done)
        if not adapt(state).has_own_update:
            laid_out = jax.tree.leaves((new.params, new.opt_state))
    if step_grads.applied is not None and plan.has_opt_state:
        scaled = with_next_loss_scale(
            state.opt_state, new.opt_state, plan.config.policy.loss_scale, step_grads.overflowed
        )
        scaled = scaled if step_grads.weighs is None else _keep_unless(step_grads.weighs, scaled, new.opt_state)
        new = new.replace(opt_state=scaled)
    return _to_stored(new, plan, laid_out)


def _keep_unless(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` if the step is applied, else `old`. Host arrays were selected by the update."""
    return jax.tree.map(lambda new, old: new if memory_of(new) == "host" else jnp.where(applied, new, old), new, old)


def _to_stored(state: TrainStateLike, plan: ZeroPlan, laid_out: Sequence[jax.Array]) -> TrainStateLike:
    """Returns a state as stored; `laid_out` are arrays of it that are so already."""
    done = set(map(id, laid_out))

    def stored(x: jax.Array, leaf: StateLeaf) -> jax.Array:
        dtype = leaf.stored_dtype if tuple(x.shape) == leaf.stored_shape else leaf.dtype
        if id(x) in done or memory_of(x) == "host":
            return x
        return leaf.store(make_strongly_typed(x, dtype))

    return plan.view.map(stored, state)


def _update(
    state: TrainStateLike,
    grads: list[Grad[jax.Array]],
    applied: jax.Array | None,
    value: jax.Array | None,
    done: Done | None,
) -> TrainStateLike:
    """Returns the state after the optimizer's step; unchanged if `applied` is false."""
    if adapt(state).has_own_update:
        return _update_by_itself(state, grads, applied, value)
    params, opt_state = state.tx.apply(grads, state.opt_state, state.params, applied, value, done)
    step = state.step + 1
    step = step if applied is None else jnp.where(applied, step, state.step)
    return state.replace(step=step, params=params, opt_state=opt_state)


def check_can_compute(state: TrainStateLike) -> None:
    """Raises if a state has an `apply_gradients` of its own, and something that it could read is not on the devices."""
    plan = state.tx.plan
    on_host = any(leaf.param.memory == "host" for leaf in plan.leaves)
    if adapt(state).has_own_update and (on_host or plan.has_records):
        option = "params='host'" if on_host else plan.config.offload.made_records
        what = "parameters" if on_host else "gradients" if plan.config.offload.delay else "optimizer state"
        raise TypeError(
            f"`{type(state).__name__}` has an `apply_gradients` of its own, which could compute on {what}; with "
            f"`Offload({option})` they are not on the devices. Do what it does outside of the step, or go without that "
            "option."
        )


def _update_by_itself(
    state: TrainStateLike, grads: list[Grad[jax.Array]], applied: jax.Array | None, value: jax.Array | None
) -> TrainStateLike:
    """Calls the state's own `apply_gradients`, which relies only on optax's contract."""
    check_can_compute(state)
    tx, plan = state.tx, state.tx.plan
    params = plan.view.params.flat(state.params)
    without_keys = [NO_ELEMENTS if i in plan.keys else x for i, x in enumerate(params)]
    before = state.replace(
        tx=dataclasses.replace(tx, applied=applied, value=value), params=plan.view.params.stored(without_keys)
    )
    new = before.apply_gradients(grads=plan.view.stored_grads([scale_by(g.reduced, *g.factors) for g in grads]))
    after = [params[i] if i in plan.keys else x for i, x in enumerate(plan.view.params.flat(new.params))]
    new = new.replace(tx=tx, params=plan.view.params.stored(after))
    return new if applied is None else _keep_unless(applied, new, state)
