"""Turns a sharded state into items for Orbax, and saves single checkpoints."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jzero._version import __version__
from jzero.checkpoint.contents import FORMAT, absolute, digest, sign
from jzero.checkpoint.damage import CheckpointError, causes_of, is_passing, is_there
from jzero.checkpoint.disk_places import is_streamed
from jzero.checkpoint.disk_saving import DiskArray, Snapshot
from jzero.checkpoint.extras import encode, iterator_position
from jzero.checkpoint.leaves import TargetLeaf, natural_state
from jzero.checkpoint.lock import check_shared
from jzero.checkpoint.orbax_io import (
    EXTRA,
    EXTRA_ARRAYS,
    ITERATOR,
    NOTES,
    STATE,
    MemoryArray,
    can_store,
    dtype_on_disk,
    handler_registry,
)
from jzero.checkpoint.uninterrupted import Uninterrupted
from jzero.core.base.text import as_data
from jzero.core.base.types import State, TrainStateLike
from jzero.core.config.precision import is_key
from jzero.core.layout.stored import ChangingReader, InRecords, Stored
from jzero.core.plan.opt_state import ZeroOptState
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.state_fields import frozen_fields
from jzero.core.processes.agree import MEET_S, agree, are_several, check_wait
from jzero.core.processes.exchange import exchange, succeed_together
from jzero.core.processes.fingerprints import describe_plan
from jzero.core.state.access import apply_pending
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.record_states import records_of
from jzero.core.state.train_state import check_alive

_THREAD = Uninterrupted()


def save_checkpoint(
    path: epath.PathLike,
    state: State,
    *,
    data_iterator: object = None,
    extra: Mapping[str, object] | None = None,
    check_processes: bool | float = True,
) -> None:
    """Writes a sharded train state to a new directory, and returns when it is complete.

    The tree on disk is that of a plain Flax and optax program: natural shapes, masters instead of 16-bit parameters,
    the optimizer's own state. It can be restored at any stage, on any mesh, and by plain Orbax. Until it is complete it
    has another name, so a crash leaves no half of a checkpoint; Ctrl-C waits until what was written is removed, a
    second Ctrl-C does not. Host memory: this process's part of the state, once, and once more if gradients are pending
    (`Offload(delay=1)`), which are applied to a copy; of what is on disk, a few records. With several processes, each
    must call it, with a directory that all of them share.

    Args:
      path: The directory; must not exist.
      state: A sharded train state.
      data_iterator: An iterator whose position to save: anything with `get_state` (Grain) or `state_dict` (PyTorch).
      extra: Other values to save: nested dicts of arrays, PRNG keys, numbers and text.
      check_processes: How many seconds to wait for processes that have not called it, from when the state is computed;
        `True` for 40. With `False` it waits forever.

    Raises:
      ValueError: `path` exists, the state has leaves that cannot be written (empty ones, or of a dtype such as uint4),
        or a process did not call it.
      TypeError: The state was not sharded by jzero, or `extra` holds something that cannot be saved.
      CheckpointError: It could not be written, or the processes do not share its directory.
      RuntimeError: A step consumed the state, or a later one overwrote what it has on disk.
      DiskError: What is on disk cannot be read, or is not what was written there.

    Example:
      >>> path = f"{tmp}/checkpoint"
      >>> jzero.save_checkpoint(path, state, extra={"epoch": 3})
      >>> int(jzero.restore_checkpoint(path, state).step) == int(state.step)
      True
    """
    directory, wait_s = absolute(path), check_wait(check_processes, MEET_S)
    if _THREAD.run(is_there, directory):  # after an interrupted call has finished
        raise ValueError(
            f"There is something at {directory} already, and a checkpoint never replaces another: save to a new path, "
            "or use a `jzero.CheckpointManager`, which numbers its checkpoints and removes old ones."
        )
    meet("save_checkpoint", state, wait_s)
    items = checkpoint_items(apply_pending(state), data_iterator=data_iterator, extra=extra)
    written: list[epath.Path] = []
    logging.getLogger("jzero").info("Saving the state to %s.", directory)
    try:
        _THREAD.run(_write, directory, items, written)
    except CheckpointError:
        raise
    except Exception as error:
        raise save_error(directory, error) from error
    except BaseException:
        _THREAD.run(_remove, written)
        raise


def _write(directory: epath.Path, items: Items, written: list[epath.Path]) -> None:
    """Writes a checkpoint, whose directory is then in `written`; leaves nothing behind if that fails."""
    try:
        check_shared(directory.parent)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(handler_registry=handler_registry())) as checkpointer:
            checkpointer.save(directory, args=items.args)
    except Exception:
        _remove_unfinished(directory)
        raise
    finally:
        items.release()
    written.append(directory)


def _remove(written: Sequence[epath.Path]) -> None:
    """Removes checkpoints; from the first moment they look like unfinished ones."""
    for directory in written if jax.process_index() == 0 else ():
        with contextlib.suppress(OSError):
            directory.rename(_unfinished(directory))
        _remove_unfinished(directory)


def _unfinished(directory: epath.Path) -> epath.Path:
    return directory.with_name(directory.name + ocp.path.step.TMP_DIR_SUFFIX)


def _remove_unfinished(directory: epath.Path) -> None:
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            _unfinished(directory).rmtree()


def save_error(directory: epath.PathLike, error: BaseException) -> CheckpointError:
    """Returns the error about a checkpoint that could not be written."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    way_out = ""
    if any(isinstance(cause, OSError) or is_passing(cause) for cause in causes_of(error)):
        way_out = " See that there is space and that this process may write there, then save again."
    return CheckpointError(
        f"The checkpoint at {directory} could not be written ({type(error).__name__}: {text[:400]}). Nothing of it "
        f"counts as a checkpoint, and earlier ones are as they were.{way_out}"
    )


def meet(where: str, state: State, wait_s: float | None) -> None:
    """Returns once all processes are at this place, with states of one plan; raises in all if one does not come.

    What follows are collectives, which would hang. A process may be behind as long as it computes the state, which the
    others wait for, too; after that it only has to get here.

    Args:
      where: The public function.
      state: A sharded train state.
      wait_s: How many seconds to wait, from when the state is computed.
    """
    train_state = adapt_sharded(state).state
    plan = train_state.tx.plan
    if are_several(plan.mesh):
        check_alive(train_state)
        jax.block_until_ready(train_state)
    same = {"the training state": describe_plan(plan)}
    agree(f"{where}, which each must call", plan.mesh, lambda: None, lambda _: same, wait_s=wait_s)


class Items(NamedTuple):
    """What to write.

    Attributes:
      args: The items of a checkpoint.
      release: Lets steps overwrite what is on disk of the state. Call it if the items are not written.
    """

    args: ocp.args.Composite
    release: Callable[[], None]


def checkpoint_items(state: State, *, data_iterator: object, extra: Mapping[str, object] | None) -> Items:
    """Returns the items of a checkpoint of a sharded train state. All processes must be here, see `meet`.

    Most arrays are those of the state itself, so they must not be donated before Orbax has copied them.
    """
    train_state = adapt_sharded(state).state
    check_alive(train_state)
    if not train_state.tx.plan.has_records:
        return Items(_make_items(state, None, data_iterator, extra), lambda: None)
    snapshot = Snapshot(records_of(train_state))
    try:
        return Items(_make_items(state, snapshot, data_iterator, extra), snapshot.release)
    except BaseException:
        snapshot.release()
        raise


def _make_items(
    state: State, snapshot: Snapshot | None, data_iterator: object, extra: Mapping[str, object] | None
) -> ocp.args.Composite:
    adapted = adapt_sharded(state)
    train_state = adapted.state
    plan = train_state.tx.plan
    items: dict[str, Any] = succeed_together(lambda: _extra_items(data_iterator, extra))
    if ITERATOR in items:
        items[ITERATOR] = {"positions": exchange(lambda: items[ITERATOR])}
    plain, leaves, arrays = natural_state(train_state, plan)
    _check_storable(leaves)
    arrays = [_on_devices_unless_streamed(x, leaf) for x, leaf in zip(arrays, leaves, strict=True)]
    if snapshot is not None:
        succeed_together(lambda: snapshot.examine(plan.view.params.flat(train_state.params)))
    digests = {name: digest(x) for name, x in items.items() if name != EXTRA_ARRAYS}
    digests |= {f"{EXTRA_ARRAYS}/{name}": digest(x) for name, x in items.get(EXTRA_ARRAYS, {}).items()}
    notes = {
        **_notes(train_state, plan, adapted.ties()),
        "paths": [leaf.path for leaf in leaves],
        "digests": digests,
        "keys": [leaf.path for leaf in leaves if is_key(leaf.leaf.dtype)],
        "param_fields": ["params", *frozen_fields(train_state)],
    }
    items[NOTES] = sign(notes)
    items[STATE] = plan.plain.view.rebuilt(plain, _to_write(arrays, leaves, snapshot))
    trees = (STATE, EXTRA_ARRAYS)
    return ocp.args.Composite(
        **{name: (ocp.args.PyTreeSave if name in trees else ocp.args.JsonSave)(x) for name, x in items.items()}
    )


def _on_devices_unless_streamed(x: Stored, leaf: TargetLeaf) -> Stored:
    """Returns an array. One on disk stays there if its records can be written; else it comes to memory."""
    if not isinstance(x, InRecords) or is_streamed(leaf.leaf):
        return x
    changes, reader = list[Callable[[jax.Array], jax.Array]](), x.reader
    while isinstance(reader, ChangingReader):
        changes, reader = [reader.change, *changes], reader.reader
    assert reader is not None
    # What follows are collectives, which must find all processes.
    on_devices = succeed_together(functools.partial(reader, x.path))
    return functools.reduce(lambda y, change: change(y), changes, on_devices)


def _to_write(
    arrays: Sequence[Stored], leaves: Sequence[TargetLeaf], snapshot: Snapshot | None
) -> Iterator[jax.Array | MemoryArray | DiskArray]:
    """Yields arrays as leaves of the tree for Orbax."""
    written = collections.defaultdict[int, list[int]](list)  # bytes by device, of those with the same part
    for x, leaf in zip(arrays, leaves, strict=True):
        if isinstance(x, InRecords):
            assert snapshot is not None
            yield DiskArray(snapshot, *snapshot.records.place_of(x.path))
        elif is_key(leaf.leaf.dtype):
            yield x
        else:
            num_replicas = len(x.sharding.device_set) * math.prod(x.sharding.shard_shape(x.shape)) // x.size
            loads = written[num_replicas] = written[num_replicas] or [0] * num_replicas
            replica = loads.index(min(loads))
            loads[replica] += x.nbytes
            yield MemoryArray(x, leaf.leaf.shape, replica)


def _check_storable(leaves: Sequence[TargetLeaf]) -> None:
    """Raises if Orbax cannot write some leaves."""
    empty = [leaf.path for leaf in leaves if not leaf.leaf.size]
    if empty:
        raise ValueError(f"Orbax writes no arrays without elements: {empty[:5]}. Leave them out of the state.")
    bad = [f"  {leaf.path}: {leaf.leaf.dtype}" for leaf in leaves if not can_store(dtype_on_disk(leaf.leaf.dtype))]
    if bad:
        raise ValueError(
            "Orbax cannot write leaves of these dtypes:\n" + "\n".join(bad) + "\nKeep them in another one."
        )


def _extra_items(data_iterator: object, extra: Mapping[str, object] | None) -> dict[str, Any]:
    """Returns the items to save beside the state."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"`extra` must be a dict: got {type(extra).__name__}.")
    items: dict[str, Any] = {}
    if extra:
        items[EXTRA], apart = encode(extra)
        if apart:
            items[EXTRA_ARRAYS] = apart
    if data_iterator is not None:
        items[ITERATOR] = iterator_position(data_iterator)
    return items


def _notes(train_state: TrainStateLike, plan: ZeroPlan, ties: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    own = train_state.opt_state
    precision: dict[str, object] = {}
    if isinstance(own, ZeroOptState):
        if own.loss_scale is not None:
            fields = dataclasses.fields(own.loss_scale)
            precision["loss_scale"] = {f.name: np.asarray(getattr(own.loss_scale, f.name)).tolist() for f in fields}
        if own.num_updates is not None:
            precision["num_updates"] = int(own.num_updates)
    return {
        "format": FORMAT,
        "jzero": __version__,
        "jax": jax.__version__,
        "config": as_data(plan.config),
        "mesh": {str(name): int(size) for name, size in plan.mesh.shape.items()},
        "num_processes": jax.process_count(),
        "precision": precision,
        "ties": {other: name for name, others in ties.items() for other in others},
    }
