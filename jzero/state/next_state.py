"""Computes the next state from a step's gradients, which are applied at once or one step later.

[Note: Delayed updates]
With `Offload(delay=1)` a step applies the gradients of the previous step and stores its own in the state: reduced,
unscaled, clipped, in fp32 or wider, and in the memory of the parameter's optimizer state. The update then depends on
nothing that the step computes, so the compiler can run it on the host in parallel with the loss and its gradients. The
first step has nothing to apply: it changes no parameter and does not count in `state.step`. A step with non-finite
gradients leaves nothing for the next step to apply. The loss scale, and state that the loss changes itself, such as
batch statistics, change at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero.arrays.placement import is_on_host, make_strongly_typed, stored_leaf
from jzero.config.precision import scale_by
from jzero.config.settings import FLAG, check
from jzero.plan.leaves import StateLeaf
from jzero.plan.opt_state import DiskState, PendingUpdate, with_next_loss_scale
from jzero.plan.plan import ZeroPlan
from jzero.state.train_state import adapt_sharded, check_alive, is_plain, map_state, write_fields
from jzero.update.chunks import Pass, run_pass
from jzero.update.transformation import NO_ELEMENTS
from jzero.update.visits import NO_DISK, FromDisk
from jzero.update.whole import Grad

__all__ = ["StepGrads", "apply_pending", "next_state", "scaled_grads", "settled_step"]

State = Any


class StepGrads(NamedTuple):
    """The gradients of one step.

    Attributes:
      grads: One per parameter leaf, laid out as planned; the factors are the loss scale and clipping.
      applied: Whether to apply them, a 0-d boolean; `None` means yes.
      weighs: Whether the batch had any weight, a 0-d boolean; `None` means yes.
      overflowed: One boolean per parameter leaf, if the precision policy needs them.
      value: The loss, the mean over the global batch.
    """

    grads: list[Grad]
    applied: jax.Array | None
    weighs: jax.Array | None
    overflowed: jax.Array
    value: jax.Array


def scaled_grads(
    plan: ZeroPlan, grads: Sequence[jax.Array], reduced: Sequence[jax.Array], factor: jax.Array, *clip: jax.Array
) -> list[Grad]:
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


def next_state(state: Any, found: StepGrads, changed: Mapping[str, Mapping[str, Any]], disk: FromDisk = NO_DISK) -> Any:
    """Returns the state after a step, as the plan stores it; call it inside `jit`.

    Gradients that are not applied change only the loss scale, and those of a batch without weight not even that.

    Args:
      state: The state before the step.
      found: The step's gradients.
      changed: What the loss wrote, by field of the state and path in the field.
      disk: What was computed from the state's records.
    """
    plan = state.tx.plan
    carried = write_fields(state, changed)
    if found.applied is not None and carried is not state:
        carried = _keep_unless(found.applied, carried, state)
    if plan.config.offload.delay:
        new = _with_pending(_apply_pending_grads(carried), found)
    else:
        new = _update(carried, found.grads, found.applied, found.value, disk)
    if found.applied is not None and plan.has_opt_state:
        scaled = with_next_loss_scale(state.opt_state, new.opt_state, plan.config.policy.loss_scale, found.overflowed)
        scaled = scaled if found.weighs is None else _keep_unless(found.weighs, scaled, new.opt_state)
        new = new.replace(opt_state=scaled)
    if disk.results:
        generation = DiskState(state.opt_state.disk.generation + 1)
        new = new.replace(opt_state=dataclasses.replace(new.opt_state, disk=generation))
    return _to_stored(new, plan)


def _keep_unless(applied: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` if the step is applied, else `old`. On the host the update itself chose, so `new` stays."""
    return jax.tree.map(lambda new, old: new if is_on_host(new) else jnp.where(applied, new, old), new, old)


def _to_stored(state: Any, plan: ZeroPlan) -> Any:
    def stored(x: Any, leaf: StateLeaf) -> jax.Array:
        dtype = leaf.stored_dtype if tuple(x.shape) == leaf.stored_shape else leaf.dtype
        return x if is_on_host(x) else stored_leaf(make_strongly_typed(x, dtype), leaf, plan)

    return map_state(stored, plan, state)


def _update(
    state: Any, grads: list[Grad], applied: jax.Array | None, value: jax.Array | None, disk: FromDisk = NO_DISK
) -> Any:
    """Returns the state after the optimizer's step; unchanged if `applied` is false."""
    if not is_plain(state):
        return _update_by_itself(state, grads, applied, value)
    params, opt_state = state.tx.apply(grads, state.opt_state, state.params, applied, value, disk)
    step = state.step + 1
    step = step if applied is None else jnp.where(applied, step, state.step)
    return state.replace(step=step, params=params, opt_state=opt_state)


def _update_by_itself(state: Any, grads: list[Grad], applied: jax.Array | None, value: jax.Array | None) -> Any:
    """Calls the state's own `apply_gradients`, which relies only on optax's contract."""
    tx, plan = state.tx, state.tx.plan
    away = any(leaf.param.on_host for leaf in plan.leaves)
    if away or plan.has_files or plan.config.offload.delay:
        options = {"params='host'": away, "optimizer='disk'": plan.has_files, "delay=1": True}
        option = next(name for name, is_set in options.items() if is_set)
        what = {"params='host'": "parameters", "optimizer='disk'": "optimizer state", "delay=1": "gradients"}[option]
        raise TypeError(
            f"`{type(state).__name__}` has an `apply_gradients` of its own, which could compute on {what}; with "
            f"`Offload({option})` they are not there to compute on. Do what it does outside of the step, or go without "
            "that option."
        )
    params = plan.flat_params(state.params)
    seen = [NO_ELEMENTS if i in plan.keys else x for i, x in enumerate(params)]
    before = state.replace(tx=dataclasses.replace(tx, applied=applied, value=value), params=plan.stored_params(seen))
    new = before.apply_gradients(grads=plan.stored_grads([scale_by(g.reduced, *g.factors) for g in grads]))
    after = [params[i] if i in plan.keys else x for i, x in enumerate(plan.flat_params(new.params))]
    new = new.replace(tx=tx, params=plan.stored_params(after))
    return new if applied is None else _keep_unless(applied, new, state)


def _apply_pending_grads(state: Any) -> Any:
    """Returns the state after the pending update; unchanged if none is pending."""
    plan, pending = state.tx.plan, state.opt_state.pending
    kept = zip(plan.flat_params(pending.grads), plan.leaves, strict=True)
    grads = [Grad(jnp.zeros((), leaf.grad.dtype) if x is None else x) for x, leaf in kept]
    return _update(state, grads, pending.ready, None)  # the loss of these gradients is not kept


def _with_pending(state: Any, found: StepGrads) -> Any:
    """Returns the state with a step's gradients pending, in place of the previous ones."""
    plan = state.tx.plan
    old = plan.flat_params(state.opt_state.pending.grads)
    leaves = plan.flat_params(plan.waiting.grads)

    def kept(i: int, leaf: StateLeaf | None) -> Any:
        grad = found.grads[i]
        if leaf is None:
            return None
        if not is_on_host(grad.reduced):
            return stored_leaf(scale_by(grad.reduced, *grad.factors).astype(leaf.dtype), leaf, plan)
        arrays = [grad.reduced, old[i]]
        return run_pass(plan, Pass(leaf, lambda x, _, factors: [scale_by(x[0], *factors)], arrays, grad.factors, [1]))[
            0
        ]

    grads = plan.params_treedef.unflatten([kept(i, leaf) for i, leaf in enumerate(leaves)])
    ready = jnp.ones((), jnp.bool_) if found.applied is None else found.applied
    return state.replace(opt_state=dataclasses.replace(state.opt_state, pending=PendingUpdate(grads, ready)))


def apply_pending(state: State, *, donate: bool = False) -> State:
    """Applies the gradients that `Offload(delay=1)` delayed, so that none is lost when training ends.

    Saving a checkpoint, sharding a state again, editing parameters and `unshard_train_state` do so themselves.
    Reading parameters does not, and restoring a checkpoint drops pending gradients. Training can continue from the
    result, but its first step then has nothing to apply, so the numbers differ from those of an uninterrupted run.
    Works inside `jax.jit`.

    Args:
      state: A sharded train state.
      donate: Whether to reuse the memory of `state`, which cannot be used afterwards; otherwise both states take
        memory for a while.

    Returns:
      The state without pending gradients; `state` itself if there were none.

    Raises:
      TypeError: The state was not sharded by jzero.
      RuntimeError: A step consumed the state.

    Example:
      >>> offload = jzero.Offload(optimizer="host", compute="host", delay=1)
      >>> late = jzero.shard_train_state(plain_state, config=jzero.ZeroConfig(stage=3, offload=offload))
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> late, _ = step(late, jnp.ones((8, 512)))
      >>> int(late.step), int(jzero.apply_pending(late).step)
      (0, 1)
    """
    check("donate", donate, FLAG)
    adapted = adapt_sharded(state)
    train_state, plan = adapted.state, adapted.state.tx.plan
    pending = train_state.opt_state.pending if plan.has_opt_state else None
    if pending is None or not isinstance(pending.ready, jax.Array):
        return state
    if isinstance(pending.ready, jax.core.Tracer):
        return adapted.rebuild(_settle(train_state))
    check_alive(train_state)
    if not bool(pending.ready):
        return state
    near = map_state(functools.partial(_to_planned_memory, plan), plan, train_state)
    return adapted.rebuild(_apply(plan, jax.tree.structure(near), donate)(near))


def _to_planned_memory(plan: ZeroPlan, x: jax.Array, leaf: StateLeaf) -> jax.Array:
    """Returns a leaf in its planned memory; copies one that `offload_train_state` moved."""
    return x if is_on_host(x) == (leaf.on_host and plan.names_host_memory) else jax.device_put(x, plan.sharding(leaf))


@jax.named_scope("zero_update")
def _settle(state: Any) -> Any:
    """Returns the state with its pending gradients applied, as the plan stores it; call it inside `jit`."""
    new = _apply_pending_grads(state)
    pending = dataclasses.replace(new.opt_state.pending, ready=jnp.zeros((), jnp.bool_))
    return _to_stored(new.replace(opt_state=dataclasses.replace(new.opt_state, pending=pending)), state.tx.plan)


def settled_step(state: Any) -> int:
    """Returns the `step` of a sharded train state once its pending gradients are applied."""
    check_alive(state)
    pending = state.opt_state.pending if state.tx.plan.has_opt_state else None
    return int(state.step) + (pending is not None and bool(pending.ready))


@functools.lru_cache(maxsize=8)
def _apply(plan: ZeroPlan, treedef: Any, donate: bool) -> Any:
    shapes = treedef.unflatten(range(treedef.num_leaves))
    shardings = map_state(lambda x, leaf: plan.sharding(leaf), plan, shapes)
    return jax.jit(_settle, donate_argnums=(0,) if donate else (), out_shardings=shardings)
