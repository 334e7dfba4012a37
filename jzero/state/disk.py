"""State on disk: in goes a plan or a state, out come its files, and the state with or without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jzero.arrays.disk_files import StateFiles, layout
from jzero.arrays.placement import place_array
from jzero.disk.files import check_folder
from jzero.disk.pipeline import Pipeline
from jzero.disk.stores import DiskStore, RamStore, Store
from jzero.plan.leaves import StateLeaf
from jzero.plan.on_disk import OnDisk
from jzero.plan.plan import ZeroPlan
from jzero.plan.records import field_offsets
from jzero.update.find_visits import check_adds_up
from jzero.update.transformation import ZeroTransformation
from jzero.update.whole import Grad

__all__ = ["attached", "check_newest", "detached", "files_of", "kept_on_disk", "open_files"]

State = Any


def check_update(tx: ZeroTransformation) -> None:
    """Raises unless the update of a state can run on its records, if it has any; traces it, and touches no device."""
    plan = tx.plan
    if not plan.has_files:
        return

    def shape(leaf: StateLeaf) -> Any:
        if leaf.in_records:
            return OnDisk(leaf.path, leaf.stored_shape, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stored_dtype, sharding=plan.sharding(leaf))

    params = plan.stored_params([shape(leaf.param) for leaf in plan.leaves])
    opt_state = plan.stored_opt_state(list(map(shape, plan.opt_leaves)))
    grads = [Grad(shape(leaf.grad)) for leaf in plan.leaves]
    value = jax.ShapeDtypeStruct((), np.float32)

    def operands(grads: list[Grad], opt_state: Any, params: Any, value: Any) -> Any:
        found = tx.visits(grads, opt_state, params, None, value, {})
        if plan.config.offload.zenflow is not None:
            check_adds_up(found)
        return found.operands

    jax.eval_shape(operands, grads, opt_state, params, value)


def checked_files(tx: ZeroTransformation) -> StateFiles | None:
    """Returns the space for the records of a state, as `check_update` and `open_files` say; `None` if it has none."""
    check_update(tx)
    return open_files(tx.plan) if tx.plan.has_files else None


def open_files(plan: ZeroPlan) -> StateFiles:
    """Takes the space for the records of a state of this process, before anything is written."""
    offload, records = plan.config.offload, layout(plan)
    sizes = [field_offsets([x.dtype for x in plan.disk_fields[r.param]], r.place.size)[-1] for r in records]
    if offload.path is None:
        store: Store = RamStore(sizes, num_slots=1 if offload.delay else 2)  # beside several steps it must be whole
    else:
        store = DiskStore(check_folder(offload.path), sizes, checksum=offload.disk_checksum)
    return StateFiles(plan, records, Pipeline(store, threads=offload.disk_threads))


def map_disk(fn: Callable[[OnDisk], Any], plan: ZeroPlan, state: State) -> State:
    """Returns a state with `fn(leaf)` in place of each leaf on disk."""
    leaves = plan.opt_treedef.flatten_up_to(state.opt_state)
    opt_state = plan.opt_treedef.unflatten([fn(x) if isinstance(x, OnDisk) else x for x in leaves])
    return state.replace(opt_state=opt_state)


def detached(state: State) -> State:
    """Returns a state whose leaves on disk do not know their files, for programs."""
    return map_disk(lambda x: x.detached, state.tx.plan, state)


def attached(state: State, files: StateFiles, *, waits: bool | None = None) -> State:
    """Returns a state whose leaves on disk are in these files, which are its newest; says whether something waits."""
    plan, own = state.tx.plan, state.opt_state
    whole = plan.whole_sharding
    generation = place_array(np.asarray(files.generation), np.dtype(np.int32), whole)
    waiting = own.disk.waiting if waits is None else place_array(np.asarray(waits), np.dtype(np.bool_), whole)
    own = dataclasses.replace(own, disk=dataclasses.replace(own.disk, generation=generation, waiting=waiting))
    return map_disk(lambda x: dataclasses.replace(x, files=files), plan, state.replace(opt_state=own))


def files_of(state: State) -> StateFiles:
    """Returns the files of a state on disk."""
    leaves = state.tx.plan.opt_treedef.flatten_up_to(state.opt_state)
    files = next(x.files for x in leaves if isinstance(x, OnDisk))
    if not isinstance(files, StateFiles):
        raise ValueError(
            "This state has shapes in place of what is on disk. Make one with `jzero.shard_train_state` or "
            "`jzero.init_train_state`, or restore a checkpoint into it."
        )
    files.check_is_there()
    return files


def kept_on_disk(state: State, files: StateFiles | None) -> State:
    """Returns a state with leaves that belong on disk, but are arrays as stored, written there; others are copied.

    Args:
      state: The state.
      files: The files of the state that it came from, which is not the newest any more if anything is written.
    """
    plan = state.tx.plan
    leaves = plan.opt_treedef.flatten_up_to(state.opt_state)
    new = {
        leaf.path: leaf.unbox(x)
        for x, leaf in zip(leaves, plan.opt_leaves, strict=True)
        if leaf.in_records and not isinstance(x, OnDisk)
    }
    if files is None or not new:
        return state
    files.rewrite(new)
    kept = [files.node(leaf) if leaf.path in new else x for x, leaf in zip(leaves, plan.opt_leaves, strict=True)]
    return attached(state.replace(opt_state=plan.opt_treedef.unflatten(kept)), files)


def check_newest(state: State) -> None:
    """Raises if a later step overwrote what a state has in records."""
    newest, mine = files_of(state).generation, int(state.opt_state.disk.generation)
    if mine != newest:
        raise RuntimeError(
            f"A later step overwrote what this state has on disk: it is number {mine}, the files are at {newest}. Go "
            "on with the state that the step returned (`state, metrics = step(state, batch)`), or restore a checkpoint."
        )
