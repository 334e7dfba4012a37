"""Delayed updates: what waits from one step to the next, and the call that applies it.

[Note: Delayed updates]
With `Offload(delay=1)` a step applies the gradients of the step before, on the host's CPU, beside its own loss and
gradients. Reduced gradients wait, with their factors. They stay on the devices until the next step begins;
then numbers are computed from the state in which the update counts, and everything that the pass over records reads
goes to the host, so that the pass needs no device and runs in a thread. The first step has nothing to apply: it changes
no parameter and does not count in `state.step`. A step with non-finite gradients leaves nothing for the next step to
apply. The loss scale, and state that the loss changes itself, such as batch statistics, change at once.
"""

from __future__ import annotations

import concurrent.futures
import functools
from typing import NamedTuple

import jax
import numpy as np

from jzero._types import State, TrainStateLike
from jzero.arrays.disk_files import StateFiles
from jzero.arrays.processes import succeed_together
from jzero.config.settings import FLAG, check
from jzero.disk.pipeline import Pipeline, RunStats
from jzero.disk.stores import CopyingStore
from jzero.layout.leaves import StateLeaf
from jzero.layout.placement import memory_of
from jzero.plan.plan import ZeroPlan
from jzero.state.adapter import adapt_sharded
from jzero.state.disk import attached, check_newest, detached, files_of, open_files
from jzero.state.next_state import StepGrads
from jzero.state.record_update import Prepared, record_update
from jzero.state.train_state import check_alive, map_state
from jzero.state.zenflow import flow_of
from jzero.update.visits import FromDisk


class Waiting(NamedTuple):
    """What the next step applies.

    Attributes:
      step_grads: The gradients; those of parameters in records are gone once `ready` is there.
      ready: The pass over records, prepared.
      done: Its result, once it has begun.
    """

    step_grads: StepGrads
    ready: Prepared | None = None
    done: concurrent.futures.Future[RunStats] | None = None


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
      >>> late = jzero.shard_train_state(plain_state, config=jzero.ZeroConfig(stage=3, offload=offload))
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> late, _ = step(late, jnp.ones((8, 512)))
      >>> int(late.step), int(jzero.apply_pending(late).step)
      (0, 1)
    """
    check("donate", donate, FLAG)
    adapted = adapt_sharded(state)
    train_state = adapted.state
    check_alive(train_state)
    if not _waits(train_state):
        return state
    files = files_of(train_state)
    check_newest(train_state)
    files.pipeline.store.check_whole()
    in_place = map_state(functools.partial(_to_planned_memory, files.plan), files.plan, train_state)
    target = files if donate else open_files(files.plan)
    if files.plan.config.offload.zenflow is None:
        return adapted.rebuild(_applied(in_place, files, target))
    return adapted.rebuild(attached(flow_of(files).settle(detached(in_place), target), target, waits=False))


def _to_planned_memory(plan: ZeroPlan, x: jax.Array, leaf: StateLeaf) -> jax.Array:
    """Returns a leaf in its planned memory; copies one that `offload_train_state` moved."""
    return x if memory_of(x) == leaf.array_memory else jax.device_put(x, leaf.sharding)


def _waits(state: TrainStateLike) -> bool:
    """Whether gradients wait for the next step of a state; of a state of shapes, none do."""
    zero_state = state.opt_state if state.tx.plan.has_files else None
    waiting = None if zero_state is None else zero_state.disk.waiting
    if isinstance(waiting, jax.core.Tracer):
        raise ValueError(
            "`apply_pending` updates state outside of programs (`Offload(delay=1)` or `zenflow`): call it outside of "
            "`jax.jit`."
        )
    return isinstance(waiting, jax.Array | np.ndarray) and bool(waiting)


def _applied(state: TrainStateLike, files: StateFiles, target: StateFiles) -> State:
    """Returns the state after the update that waits, with its records in `target`; consumes one with these files."""
    plan, inside, waiting = state.tx.plan, detached(state), files.waiting
    update, keeps = record_update(state.tx), target is not files
    both = CopyingStore(files.pipeline.store, target.pipeline.store)
    pipeline = Pipeline(both, threads=plan.config.offload.disk_threads) if keeps else files.pipeline

    def run() -> Prepared:
        ready: Prepared = waiting.ready or update.prepare(files, inside, waiting.step_grads)
        if waiting.done is not None and not keeps:
            waiting.done.result()
        else:
            ready.run.run(pipeline)
        return ready

    ready = succeed_together(run)
    disk = FromDisk(ready.sums, ready.run.results())
    new = (update.settled_copy if keeps else update.settled)(inside, ready.step_grads, disk)
    target.pipeline.store.commit()
    return attached(new, target)


def settled_step(state: TrainStateLike) -> int:
    """Returns the `step` of a sharded train state once its pending gradients are applied."""
    check_alive(state)
    return int(state.step) + (_waits(state) and bool(state.tx.plan.config.offload.delay))
