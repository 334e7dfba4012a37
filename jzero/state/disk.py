"""Opens the files of states on disk, attaches them to states, and detaches them for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jzero._types import PyTree, State
from jzero.arrays.disk_files import StateFiles, layout
from jzero.arrays.disk_rows import StateRows, handle_shape
from jzero.arrays.processes import succeed_together
from jzero.disk.files import check_folder
from jzero.disk.pipeline import Pipeline
from jzero.disk.stores import DiskStore, RamStore, Store
from jzero.layout.on_disk import OnDisk
from jzero.layout.placement import place_array
from jzero.layout.records import field_offsets
from jzero.plan.plan import ZeroPlan
from jzero.state.train_state import abstract_leaf
from jzero.update.find_visits import check_adds_up, find_visits
from jzero.update.transformation import ZeroTransformation
from jzero.update.visits import VisitOperands
from jzero.update.whole import Grad

T = TypeVar("T")


def check_update(tx: ZeroTransformation) -> None:
    """Raises unless the update of a state can run on its records, if it has any; traces it, and touches no device."""
    plan = tx.plan
    if not plan.has_files:
        return

    params = plan.stored_params([abstract_leaf(leaf.param) for leaf in plan.leaves])
    opt_state = plan.stored_opt_state(list(map(abstract_leaf, plan.opt_leaves)))
    grads = [Grad(abstract_leaf(leaf.grad)) for leaf in plan.leaves]
    value = jax.ShapeDtypeStruct((), np.float32)

    def operands(
        grads: list[Grad[jax.Array]], opt_state: PyTree, params: PyTree, value: jax.Array
    ) -> list[VisitOperands]:
        visits = find_visits(*tx.update_of_step(grads, opt_state, params, None, value), {})
        if plan.config.offload.zenflow is not None:
            check_adds_up(visits)
        return visits.operands

    jax.eval_shape(operands, grads, opt_state, params, value)


def checked_files(tx: ZeroTransformation) -> StateFiles | None:
    """Checks the update of a state and opens its files; returns `None` if nothing of it is in records."""
    check_update(tx)
    return open_files(tx.plan) if tx.plan.has_files else None


def open_files(plan: ZeroPlan) -> StateFiles:
    """Reserves the space for this process's records of a state, before anything is written."""
    offload, records = plan.config.offload, layout(plan)
    ends = [field_offsets([x.dtype for x in plan.disk_fields[r.param]], r.place.size)[1:] for r in records]
    sizes = [x[-1] for x in ends]
    heads = [x[0] if r.param in plan.params_on_disk else 0 for x, r in zip(ends, records, strict=True)]
    if offload.path is None:
        store: Store = RamStore(sizes, num_slots=1 if offload.delay else 2)  # beside several steps it must be whole
    else:
        store = DiskStore(check_folder(offload.path), sizes, heads, checksum=offload.disk_checksum)
    files = StateFiles(plan, records, Pipeline(store, threads=offload.disk_threads))
    files.rows = StateRows(files) if plan.params_on_disk else None
    return files


def map_disk(fn: Callable[[OnDisk], object], plan: ZeroPlan, state: State) -> State:
    """Returns a state with `fn(leaf)` in place of each leaf on disk."""

    def mapped(treedef: PyTreeDef, tree: PyTree) -> PyTree:
        return treedef.unflatten([fn(x) if isinstance(x, OnDisk) else x for x in treedef.flatten_up_to(tree)])

    params = mapped(plan.params_treedef, state.params) if plan.params_on_disk else state.params
    return state.replace(params=params, opt_state=mapped(plan.opt_treedef, state.opt_state))


def detached(state: State) -> State:
    """Returns a state whose leaves on disk do not know their files, for programs."""
    return map_disk(lambda x: x.detached, state.tx.plan, state)


def for_loss(state: State) -> State:
    """Returns a state for programs that evaluate a loss: handles of the rows of parameters on disk, or their shapes."""
    plan, program_state = state.tx.plan, detached(state)
    if not plan.params_on_disk:
        return program_state
    params = plan.params_treedef.flatten_up_to(state.params)
    for i in plan.params_on_disk:
        params[i] = _handles(plan, i, params[i])
    return program_state.replace(params=plan.params_treedef.unflatten(params))


def _handles(plan: ZeroPlan, i: int, x: jax.Array | OnDisk) -> jax.Array | jax.ShapeDtypeStruct:
    """Returns the handles of a parameter on disk, given its place or these."""
    like = handle_shape(plan, i)
    if isinstance(x, OnDisk):
        rows = x.files.rows if isinstance(x.files, StateFiles) else None
        return like if rows is None else rows.handles[i]
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
    rows = files_of(state).rows
    assert rows is not None
    reader = rows.reader

    def attempt() -> T:
        reader.begin(passes)
        results = jax.block_until_ready(run(for_loss(state)))
        reader.check()
        return results

    return succeed_together(attempt)


def attached(state: State, files: StateFiles, *, waits: bool | None = None) -> State:
    """Returns a state whose leaves on disk are in these files, which are its newest; says whether something waits."""
    plan, zero_state = state.tx.plan, state.opt_state
    replicated = plan.whole_sharding
    generation = place_array(np.asarray(files.generation), np.dtype(np.int32), replicated)
    waiting = (
        zero_state.disk.waiting if waits is None else place_array(np.asarray(waits), np.dtype(np.bool_), replicated)
    )
    zero_state = dataclasses.replace(
        zero_state, disk=dataclasses.replace(zero_state.disk, generation=generation, waiting=waiting)
    )
    return map_disk(lambda x: dataclasses.replace(x, files=files), plan, state.replace(opt_state=zero_state))


def files_of(state: State) -> StateFiles:
    """Returns the files of a state on disk."""
    plan = state.tx.plan
    leaves = [*plan.opt_treedef.flatten_up_to(state.opt_state), *plan.params_treedef.flatten_up_to(state.params)]
    files = next(x.files for x in leaves if isinstance(x, OnDisk))
    if not isinstance(files, StateFiles):
        raise ValueError(
            "This state has shapes in place of what is on disk. Make one with `jzero.shard_train_state` or "
            "`jzero.init_train_state`, or restore a checkpoint into it."
        )
    files.check_is_there()
    return files


def kept_on_disk(state: State, files: StateFiles | None) -> State:
    """Writes leaves that belong on disk, but are arrays, to the files of a state; returns the state.

    Args:
      state: The state.
      files: The files of the state from which it was made. If anything is written, that state is stale.
    """
    plan = state.tx.plan
    layouts = [*(leaf.param for leaf in plan.leaves), *plan.opt_leaves]
    leaves = [*plan.params_treedef.flatten_up_to(state.params), *plan.opt_treedef.flatten_up_to(state.opt_state)]
    new = {
        leaf.path: leaf.unbox(x)
        for x, leaf in zip(leaves, layouts, strict=True)
        if leaf.in_records and not isinstance(x, OnDisk)
    }
    if files is None or not new:
        return state
    files.rewrite(new)
    stored = [files.node(x) if x.in_records and x.path in new else y for x, y in zip(layouts, leaves, strict=True)]
    params, opt_state = stored[: len(plan.leaves)], stored[len(plan.leaves) :]
    state = state.replace(params=plan.params_treedef.unflatten(params), opt_state=plan.opt_treedef.unflatten(opt_state))
    return attached(state, files)


def check_newest(state: State) -> None:
    """Raises if a later step overwrote what a state has in records."""
    newest, mine = files_of(state).generation, int(state.opt_state.disk.generation)
    if mine != newest:
        raise RuntimeError(
            f"A later step overwrote what this state has on disk: it is number {mine}, the files are at {newest}. Go "
            "on with the state that the step returned (`state, metrics = step(state, batch)`), or restore a checkpoint."
        )
