"""Opens the records of states, attaches them to states, and detaches them for programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jzero.core.base.types import PyTree, State
from jzero.core.layout.placement import place_array
from jzero.core.layout.stored import InRecords
from jzero.core.plan.plan import ZeroPlan
from jzero.core.processes.agree import succeed_together
from jzero.core.records.opening import open_records
from jzero.core.records.programs import RecordUpdate
from jzero.core.records.records import Records, handle_shape
from jzero.core.state.next_state import next_state
from jzero.core.state.train_state import abstract_leaf, map_state
from jzero.core.update.program import record_program
from jzero.core.update.transformation import ZeroTransformation
from jzero.core.update.whole import Grad

T = TypeVar("T")


def checked_records(tx: ZeroTransformation) -> Records | None:
    """Checks the update of a state and opens its records; returns `None` if nothing of it is there."""
    check_update(tx)
    return open_records(tx.plan) if tx.plan.has_records else None


def check_update(tx: ZeroTransformation) -> None:
    """Raises unless the update of a state can run on its records, if it has any; traces it, and touches no device."""
    plan = tx.plan
    if not plan.has_records:
        return
    params = plan.stored_params([abstract_leaf(leaf.param) for leaf in plan.leaves])
    opt_state = plan.stored_opt_state(list(map(abstract_leaf, plan.opt_leaves)))
    grads = [Grad(abstract_leaf(leaf.grad)) for leaf in plan.leaves]
    value = jax.ShapeDtypeStruct((), np.float32)
    program = record_program(*tx.update_of_step(grads, opt_state, params, None, value))
    if plan.config.offload.zenflow is not None:
        program.require_mean_of_gradients()


@functools.lru_cache(maxsize=8)
def record_update(tx: ZeroTransformation) -> RecordUpdate:
    """Returns the compiled update of all states with an optimizer and a plan."""

    def laid_out(state: State) -> State:
        return map_state(lambda x, leaf: jax.lax.with_sharding_constraint(x, leaf.sharding), tx.plan, state)

    return RecordUpdate(
        tx, lambda *args: laid_out(next_state(*args)), lambda state, params: laid_out(state.replace(params=params))
    )


def map_records(fn: Callable[[InRecords], object], plan: ZeroPlan, state: State) -> State:
    """Returns a state with `fn(leaf)` in place of each leaf in records."""

    def mapped(treedef: PyTreeDef, tree: PyTree) -> PyTree:
        return treedef.unflatten([fn(x) if isinstance(x, InRecords) else x for x in treedef.flatten_up_to(tree)])

    params = mapped(plan.params_treedef, state.params) if plan.params_on_disk else state.params
    return state.replace(params=params, opt_state=mapped(plan.opt_treedef, state.opt_state))


def detached(state: State) -> State:
    """Returns a state whose leaves in records do not know these, for programs."""
    return map_records(lambda x: x.detached, state.tx.plan, state)


def for_loss(state: State) -> State:
    """Returns a state for programs that evaluate a loss: handles of the rows of parameters on disk, or their shapes."""
    plan, program_state = state.tx.plan, detached(state)
    if not plan.params_on_disk:
        return program_state
    params = plan.params_treedef.flatten_up_to(state.params)
    for i in plan.params_on_disk:
        params[i] = _handles(plan, i, params[i])
    return program_state.replace(params=plan.params_treedef.unflatten(params))


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


def run_on_rows(run: Callable[[State], T], state: State, passes: Sequence[int]) -> T:
    """Returns the results of a program that evaluates a loss, once they are there; raises if a row was not.

    Args:
      run: Calls the program with the state, as `for_loss` returns it.
      state: A state with parameters on disk.
      passes: The order in which the program takes rows, see `RowReader.begin`.

    Raises:
      DiskError: In all processes, if a row could not be read in one.
    """
    check_newest(state)
    reader = records_of(state).rows.reader

    def attempt() -> T:
        reader.begin(passes)
        results = jax.block_until_ready(run(for_loss(state)))
        reader.check()
        return results

    return succeed_together(attempt)


def attached(state: State, records: Records) -> State:
    """Returns a state whose leaves are in these records, of which it is the newest."""
    plan, zero_state = state.tx.plan, state.opt_state

    def number(x: bool | int, old: jax.Array | None) -> jax.Array | None:
        return None if old is None else place_array(np.asarray(x, old.dtype), old.dtype, plan.whole_sharding)

    old = zero_state.disk
    disk = dataclasses.replace(
        old,
        generation=number(records.generation, old.generation),
        waiting=number(records.pending.waits(), old.waiting),
    )
    zero_state = dataclasses.replace(zero_state, disk=disk)
    return map_records(lambda x: dataclasses.replace(x, records=records), plan, state.replace(opt_state=zero_state))


def records_of(state: State) -> Records:
    """Returns the records of a state."""
    plan = state.tx.plan
    leaves = [*plan.opt_treedef.flatten_up_to(state.opt_state), *plan.params_treedef.flatten_up_to(state.params)]
    records = next(x.records for x in leaves if isinstance(x, InRecords))
    if not isinstance(records, Records):
        raise ValueError(
            "This state has shapes in place of what is on disk. Make one with `jzero.shard_train_state` or "
            "`jzero.init_train_state`, or restore a checkpoint into it."
        )
    records.require_not_released()
    return records


def kept_in_records(state: State, *, like: State) -> State:
    """Writes leaves that belong in records, but are arrays, there; returns the state.

    Args:
      state: The state.
      like: The state from which it was made, whose records it shares. If anything is written, that one is stale.
    """
    plan = state.tx.plan
    layouts = [*(leaf.param for leaf in plan.leaves), *plan.opt_leaves]
    leaves = [*plan.params_treedef.flatten_up_to(state.params), *plan.opt_treedef.flatten_up_to(state.opt_state)]
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
    state = state.replace(params=plan.params_treedef.unflatten(params), opt_state=plan.opt_treedef.unflatten(opt_state))
    return attached(state, records)


def check_newest(state: State) -> None:
    """Raises if a later step overwrote what a state has in records."""
    newest, mine = records_of(state).generation, int(state.opt_state.disk.generation)
    if mine != newest:
        raise RuntimeError(
            f"A later step overwrote what this state has on disk: it is number {mine}, the files are at {newest}. Go "
            "on with the state that the step returned (`state, metrics = step(state, batch)`), or restore a checkpoint."
        )
