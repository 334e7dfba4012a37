"""What a state needs before it is read or edited outside of a step, wherever its leaves are.

readable(state)        its leaves can be read
apply_pending(state)   no gradients wait for a later step
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jzero.core.base.types import State, TrainStateLike
from jzero.core.config.settings import FLAG, check
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import copy_array, memory_of
from jzero.core.records.schedules import Schedule
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.record_states import attached, detached, map_records, open_records, record_update, records_of
from jzero.core.state.train_state import check_alive


def readable(state: State) -> State:
    """Returns a state whose leaves in records can be read: each read asks `records_of` first."""
    plan = state.tx.plan
    if not plan.has_records:
        return state
    return map_records(
        lambda x: dataclasses.replace(x, reader=lambda path: records_of(state).read_leaf(path)), plan, state
    )


def apply_pending(state: State, *, donate: bool = False) -> State:
    """Applies the gradients that `Offload(delay=1)` or `zenflow` delayed, so that none is lost when training ends.

    Saving a checkpoint, sharding a state again, editing or loading parameters or optimizer state, and
    `unshard_train_state` do so themselves. Reading parameters does not, and restoring a checkpoint drops pending
    gradients. Training can continue from the result, but its first step then has nothing to apply, so the numbers
    differ from those of an uninterrupted run. Not for use inside `jax.jit`.

    Args:
      state: A sharded train state.
      donate: Whether to reuse the memory of `state`, which cannot be used afterwards; otherwise both states take
        memory, and space on disk, for a while.

    Returns:
      The state without pending gradients; `state` itself if there were none.

    Raises:
      TypeError: The state was not sharded by jzero.
      RuntimeError: A step consumed the state.
      ValueError: It is called inside `jax.jit`.

    Example:
      >>> offload = jzero.Offload(optimizer="host", compute="host", delay=1)
      >>> delayed = jzero.shard_train_state(plain_state, config=jzero.ZeroConfig(stage=3, offload=offload))
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> delayed, _ = step(delayed, jnp.ones((8, 512)))
      >>> int(delayed.step), int(jzero.apply_pending(delayed).step)
      (0, 1)
    """
    check("donate", donate, FLAG)
    adapted = adapt_sharded(state)
    train_state = adapted.state
    check_alive(train_state)
    if not _waits(train_state):
        return state
    records = records_of(train_state)
    records.pipeline.store.check_whole()
    used = records.plan.view.map(_planned if donate else _copied, train_state)
    target = records if donate else open_records(records.plan)
    assert isinstance(records.pending, Schedule)
    new = records.pending.apply_pending(record_update(train_state.tx), records, detached(used), target)
    return adapted.rebuild(attached(new, target))


def _planned(x: jax.Array, leaf: StateLeaf) -> jax.Array:
    """Returns a leaf in its planned memory; copies one that `offload_train_state` moved."""
    return x if memory_of(x) == leaf.array_memory else jax.device_put(x, leaf.sharding)


def _copied(x: jax.Array, leaf: StateLeaf) -> jax.Array:
    """Returns a copy of a leaf in its planned memory."""
    return copy_array(x) if memory_of(x) == leaf.array_memory else _planned(x, leaf)


def _waits(state: TrainStateLike) -> bool:
    """Whether gradients wait for the next step of a state; of a state of shapes, none do."""
    zero_state = state.opt_state if state.tx.plan.has_records else None
    waiting = None if zero_state is None else zero_state.disk.waiting
    if isinstance(waiting, jax.core.Tracer):
        raise ValueError(
            "`apply_pending` updates state outside of programs (`Offload(delay=1)` or `zenflow`): call it outside of "
            "`jax.jit`."
        )
    return isinstance(waiting, jax.Array | np.ndarray) and bool(waiting)


def step_after_pending(state: TrainStateLike) -> int:
    """Returns the `step` of a sharded train state once its pending gradients are applied."""
    check_alive(state)
    return int(state.step) + (_waits(state) and bool(state.tx.plan.config.offload.delay))
