"""Opens the records of states, attaches them to states, and detaches them for programs.

[Note: The newest state]
The arrays of a state can be copied (`jax.tree.map(jnp.copy, state)`), its records cannot: the copy shares them, and the
next step overwrites them. So a state has the number of its generation as an array, which goes wherever its arrays go,
and the records know that of the newest state. `records_of` is the one way from a state to its records, for all that
read or write them, and compares the two. A leaf does not know its state: `readable(state)` has leaves that can be read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jzero.core.base.types import PyTree, State
from jzero.core.disk.files import check_folder
from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.stores import DiskStore, RamStore, Store
from jzero.core.layout.box import field_offsets
from jzero.core.layout.stored import PLACES, TO_COPY, InRecords
from jzero.core.plan.opt_state import DiskState
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.trees import TreeView
from jzero.core.processes.exchange import succeed_together
from jzero.core.records.records import Records, handle_shape, layout
from jzero.core.records.run import RecordUpdate
from jzero.core.records.schedules import AtOnce, Delayed
from jzero.core.records.zenflow import ZenFlowSchedule
from jzero.core.state.next_state import next_state
from jzero.core.state.train_state import check_alive
from jzero.core.update.program import record_program
from jzero.core.update.transformation import ZeroTransformation
from jzero.core.update.whole import Grad

T = TypeVar("T")


def open_records(plan: ZeroPlan) -> Records:
    """Reserves the space for this process's records of a state, before anything is written."""
    offload, index = plan.config.offload, layout(plan)
    ends = [field_offsets([x.dtype for x in plan.record_fields[r.param]], r.place.size)[1:] for r in index]
    sizes = [x[-1] for x in ends]
    heads = [x[0] if r.param in plan.params_on_disk else 0 for x, r in zip(ends, index, strict=True)]
    if offload.path is None:
        store: Store = RamStore(sizes, num_slots=1 if offload.delay else 2)  # beside several steps it must be whole
    else:
        store = DiskStore(check_folder(offload.path), sizes, heads, checksum=offload.disk_checksum)
    records = Records(plan, index, Pipeline(store, threads=offload.disk_threads))
    records.pending = Delayed() if offload.delay else AtOnce() if offload.zenflow is None else ZenFlowSchedule(records)
    return records


def checked_records(tx: ZeroTransformation) -> Records | None:
    """Checks the update of a state and opens its records; returns `None` if nothing of it is there."""
    check_update(tx)
    return open_records(tx.plan) if tx.plan.has_records else None


def check_update(tx: ZeroTransformation) -> None:
    """Raises unless the update of a state can run on its records, if it has any; traces it, and touches no device."""
    plan = tx.plan
    if not plan.has_records:
        return
    params = plan.view.params.stored([leaf.param.abstract for leaf in plan.leaves])
    opt_state = plan.view.opt_state.stored([leaf.abstract for leaf in plan.opt_leaves])
    grads = [Grad(leaf.grad.abstract) for leaf in plan.leaves]
    value = jax.ShapeDtypeStruct((), np.float32)
    program = record_program(*tx.update_of_step(grads, opt_state, params, None, value))
    if plan.config.offload.zenflow is not None:
        program.require_mean_of_gradients()


@functools.lru_cache(maxsize=8)
def record_update(tx: ZeroTransformation) -> RecordUpdate:
    """Returns the compiled update of all states with an optimizer and a plan."""

    def laid_out(state: State) -> State:
        return tx.plan.view.map(lambda x, leaf: jax.lax.with_sharding_constraint(x, leaf.sharding), state)

    return RecordUpdate(
        tx, lambda *args: laid_out(next_state(*args)), lambda state, params: laid_out(state.replace(params=params))
    )


def map_records(fn: Callable[[InRecords], object], plan: ZeroPlan, state: State) -> State:
    """Returns a state with `fn(leaf)` in place of each leaf in records."""

    def mapped(view: TreeView[Any], tree: PyTree) -> PyTree:
        return view.tree([fn(x) if isinstance(x, InRecords) else x for x in view.nodes(tree)])

    params = mapped(plan.view.params, state.params) if plan.params_on_disk else state.params
    return state.replace(params=params, opt_state=mapped(plan.view.opt_state, state.opt_state))


def detached(state: State) -> State:
    """Returns a state whose leaves in records do not know these, for programs."""
    return map_records(lambda x: x.detached, state.tx.plan, state)


def for_loss(state: State) -> State:
    """Returns a state for programs that evaluate a loss: handles of the rows of parameters on disk, or their shapes."""
    plan, program_state = state.tx.plan, detached(state)
    if not plan.params_on_disk:
        return program_state
    params = plan.view.params.nodes(state.params)
    for i in plan.params_on_disk:
        params[i] = _handles(plan, i, params[i])
    return program_state.replace(params=plan.view.params.tree(params))


def _handles(plan: ZeroPlan, i: int, x: jax.Array | InRecords) -> jax.Array | jax.ShapeDtypeStruct:
    """Returns the handles of a parameter on disk, given its place or these."""
    like = handle_shape(plan, i)
    if isinstance(x, InRecords):
        return x.records.rows.handles[i] if isinstance(x.records, Records) else like
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"{plan.leaves[i].path!r} is an array of shape {tuple(x.shape)}, but the plan keeps it on disk "
            "(`Offload(params='disk')`). Write it there with `jzero.set_full_param` or `jzero.update_params`."
        )
    return x


def run_on_rows(run: Callable[[State], T], state: State, directions: Sequence[int]) -> T:
    """Returns the results of a program that evaluates a loss, once they are there; raises if a row was not.

    Args:
      run: Calls the program with the state, as `for_loss` returns it.
      state: A state with parameters on disk.
      directions: The order in which the program takes rows, see `RowReader.begin`.

    Raises:
      DiskError: In all processes, if a row could not be read in one.
    """
    reader = records_of(state).rows.reader

    def attempt() -> T:
        reader.begin(directions)
        results = jax.block_until_ready(run(for_loss(state)))
        reader.check()
        return results

    return succeed_together(attempt)


def attached(state: State, records: Records) -> State:
    """Returns a state whose leaves are in these records, of which it is the newest."""
    plan, zero_state = state.tx.plan, state.opt_state

    def number(x: bool | int, old: jax.Array | None) -> jax.Array | None:
        if old is None:
            return None
        # No transfer is implicit (`jax.transfer_guard`), and no buffer NumPy's own: a step donates it.
        parts = [jax.device_put(np.asarray(x, old.dtype), d, may_alias=False) for d in plan.mesh.local_devices]
        return jax.make_array_from_single_device_arrays((), plan.whole_sharding, parts)

    old = zero_state.disk
    disk = dataclasses.replace(
        old,
        generation=number(records.generation, old.generation),
        waiting=number(records.pending.waits(), old.waiting),
    )
    zero_state = dataclasses.replace(zero_state, disk=disk)
    return map_records(lambda x: dataclasses.replace(x, records=records), plan, state.replace(opt_state=zero_state))


def records_of(state: State) -> Records:
    """Returns the records of a state, for whatever reads or writes them, see [Note: The newest state].

    Raises:
      RuntimeError: They are those of a later state, or gone; or a step consumed the state.
      ValueError: The state has no values, or is inside of a program, or its arrays were moved from their devices.
    """
    plan = state.tx.plan
    leaves = [*plan.view.opt_state.nodes(state.opt_state), *plan.view.params.nodes(state.params)]
    records = next(x.records for x in leaves if isinstance(x, InRecords))
    if not isinstance(records, Records):
        raise ValueError(
            "This state has shapes in place of what is in records. Make one with `jzero.shard_train_state` or "
            "`jzero.init_train_state`, or restore a checkpoint into it."
        )
    records.require_not_released()
    disk: DiskState = state.opt_state.disk
    check_alive(disk)
    where = PLACES[records.where]
    if isinstance(disk.generation, jax.core.Tracer):
        raise ValueError(f"What this state has {where} is not for programs: call this outside of `jax.jit`.")
    devices = disk.generation.sharding.device_set if isinstance(disk.generation, jax.Array) else ()
    if devices != plan.whole_sharding.device_set:
        raise ValueError(
            "The arrays of this state were moved from its devices (`jax.device_get`, `jax.device_put`), without what "
            f"it has {where}. Go on with the state that they were taken from. {TO_COPY}"
        )
    if (mine := int(jax.device_get(disk.generation))) != records.generation:
        raise RuntimeError(
            f"A later step overwrote what this state has {where}: it is number {mine} of {records.generation}. "
            "Go on with the state that the step returned (`state, metrics = step(state, batch)`), or restore a "
            f"checkpoint. {TO_COPY}"
        )
    return records


def kept_in_records(state: State, *, like: State) -> State:
    """Writes leaves that belong in records, but are arrays, there; returns the state.

    Args:
      state: The state.
      like: The state from which it was made, whose records it shares. If anything is written, that one is stale.
    """
    plan = state.tx.plan
    layouts = [*(leaf.param for leaf in plan.leaves), *plan.opt_leaves]
    leaves = [*plan.view.params.nodes(state.params), *plan.view.opt_state.nodes(state.opt_state)]
    new = {
        leaf.path: leaf.unbox(x)
        for x, leaf in zip(leaves, layouts, strict=True)
        if leaf.in_records and not isinstance(x, InRecords)
    }
    if not new:
        return state
    records = records_of(like)
    records.rewrite(new)
    stored = [records.node(x) if x.in_records and x.path in new else y for x, y in zip(layouts, leaves, strict=True)]
    params, opt_state = stored[: len(plan.leaves)], stored[len(plan.leaves) :]
    state = state.replace(params=plan.view.params.tree(params), opt_state=plan.view.opt_state.tree(opt_state))
    return attached(state, records)
