"""Restores checkpoints into states of any stage, mesh and precision.

[Note: Reading a checkpoint]
Each process reads the parts for its devices, from the natural arrays on disk straight into the stored shapes of the
plan; elements beyond a natural array are padding, zero. A damaged chunk cannot be read, see [Note: Checksums]. Then,
leaf by leaf, come the remaining changes: another dtype, a flattened layout, the 16-bit copy of a master. All of this is
local; processes tell each other whether it worked, so that either all continue or none.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from jzero.checkpoint.contents import Contents, StoredLeaf, digest, read_contents
from jzero.checkpoint.damage import REMEDY, DamageError, is_there, reading
from jzero.checkpoint.disk_restoring import RestoredRecords, restore_records
from jzero.checkpoint.extras import decode, iterator_mover
from jzero.checkpoint.format_1 import check_sums
from jzero.checkpoint.leaves import Number, TargetLeaf, number_leaves, target_leaves
from jzero.checkpoint.matching import RestoreReport, match_leaves
from jzero.checkpoint.opening import open_tree
from jzero.checkpoint.orbax_io import EXTRA, EXTRA_ARRAYS, ITERATOR
from jzero.checkpoint.shards import read_shards
from jzero.core.base.guard import warn
from jzero.core.base.text import few
from jzero.core.base.types import State, TrainStateLike
from jzero.core.config.precision import is_key
from jzero.core.config.settings import check_fields
from jzero.core.layout.casts import describe_misfit
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import copy_array, on_device
from jzero.core.layout.stored import InRecords
from jzero.core.plan.opt_state import LossScaleState, ZeroOptState, host_array
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.state_fields import frozen_fields
from jzero.core.plan.table import format_bytes
from jzero.core.processes.agree import agree
from jzero.core.processes.exchange import succeed_together
from jzero.core.processes.fingerprints import describe_plan
from jzero.core.state.adapter import StateAdapter, adapt_sharded
from jzero.core.state.record_states import kept_in_records, records_of
from jzero.core.state.train_state import check_alive, plain_state, stored_state

PARAMS, OPT_STATE = "params", "opt_state"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The arguments of `restore_checkpoint` that choose what to restore, and how strictly."""

    paths: str | None = None
    params_only: bool = False
    strict: bool = True
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    donate: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_partial(self) -> bool:
        """Whether the user chose only a part of the state."""
        return self.paths is not None or self.params_only

    def selector(self, state: TrainStateLike) -> Callable[[TargetLeaf], bool]:
        """Returns a function that says whether the user asked for a leaf."""
        fields = {PARAMS, *frozen_fields(state)}
        pattern = None
        if self.paths is not None:
            try:
                pattern = re.compile(self.paths)
            except re.error as error:
                raise ValueError(f"`paths` {self.paths!r} is not a regular expression: {error}.") from error

        def chosen(leaf: TargetLeaf) -> bool:
            if self.params_only and leaf.keys[0] not in fields:
                return False
            return pattern is None or pattern.fullmatch(leaf.path) is not None

        return chosen


def restore_checkpoint(
    path: epath.PathLike,
    like: State,
    *,
    paths: str | None = None,
    params_only: bool = False,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    data_iterator: object = None,
    donate: bool = False,
) -> State:
    r"""Reads a checkpoint into a state laid out like another one: any stage, mesh, world size and precision.

    Each process reads the slices for its devices, and every chunk that is read has a checksum.

    Args:
      path: The directory of a checkpoint: from `save_checkpoint`, a step of a manager, or one that plain Orbax wrote
        from a Flax `TrainState` or a tree with the same keys. For a manager's directory, this takes the newest step.
      like: A state sharded by jzero, or its shapes (`abstract_train_state`), which take no memory. Its values count
        only for leaves that are not restored.
      paths: Regular expression over whole paths such as `"params/decoder/.*"`: only leaves that it matches are
        restored, the others are copied from `like`. Without the optimizer: `"(?!opt_state/).*"`.
      params_only: Whether to restore only parameters, including frozen ones.
      strict: Whether it is an error if the checkpoint lacks leaves, or has others. If not, missing leaves are copied
        from `like`, and a warning lists both.
      rename: Regular expressions over whole paths in the checkpoint, with their replacements, as for `re.sub`:
        `{r"(.*)/encoder/(.*)": r"\1/backbone/\2"}` renames parameters and the optimizer state that follows them.
      data_iterator: An iterator to move to the saved position: anything with `set_state` or `load_state_dict`.
      donate: Free the arrays of `like`, and its records, before anything is read. If reading fails, they are lost.

    Returns:
      A state of the class of `like`, laid out by its plan. It shares no arrays, and can be donated.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged; the message names leaf and file.
      ValueError: It is of another model or holds numbers that do not fit, or `like` lacks values for leaves that are
        not restored.
      TypeError: `like` was not sharded by jzero.
      DiskError: There is no space for what the state has on disk (beside that of `like`, unless `donate`).

    Example:
      >>> path = f"{tmp}/elastic"
      >>> jzero.save_checkpoint(path, state)
      >>> mesh = jzero.make_mesh(devices=jax.devices()[:3])
      >>> like = jzero.abstract_train_state(plain_state, stage=1, mesh=mesh)
      >>> jzero.plan_of(jzero.restore_checkpoint(path, like)).num_shards
      3
    """
    choice = Choice(paths=paths, params_only=params_only, strict=strict, rename=rename or {}, donate=donate)
    adapted = adapt_sharded(like)
    contents = succeed_together(lambda: read_contents(path))
    state, report = restore_from(contents, adapted, choice, data_iterator=data_iterator)
    warn_unless_complete(report, choice.is_partial)
    return state


def warn_unless_complete(report: RestoreReport, is_partial: bool) -> None:
    """Warns about missing leaves, and about leaves that the state does not have unless only some were asked for."""
    if report.missing or (report.unexpected and not is_partial):
        warn(str(report))  # in the program, outside of `set_mesh`


def restore_from(
    contents: Contents, adapted: StateAdapter, choice: Choice, *, data_iterator: object = None
) -> tuple[State, RestoreReport]:
    """Returns the state from a checkpoint, laid out like another one, and a report of what was restored."""
    target = RestoreTarget(adapted)
    matched, report = succeed_together(lambda: target.match(contents.leaves.values(), choice, contents.directory))
    same = {"the training state": describe_plan(target.plan), "the checkpoint": f"checkpoint: {digest(contents.notes)}"}
    agree("restore_checkpoint", target.plan.mesh, lambda: None, lambda _: same, wait_s=math.inf)
    move = None if data_iterator is None else succeed_together(lambda: _mover(contents, data_iterator))
    succeed_together(lambda: target.check_kept(matched))
    mine = list(matched.values())[jax.process_index() :: jax.process_count()]
    succeed_together(lambda: check_sums(contents, mine))
    if choice.donate:
        target.free(matched)
    target_leaves = target.leaves
    in_memory = {i: leaf for i, leaf in matched.items() if i not in target.on_disk}
    num_bytes = sum(leaf.num_bytes for leaf in matched.values())
    logging.getLogger("jzero").info("Restoring %s from %s.", format_bytes(num_bytes), contents.directory)
    read = succeed_together(lambda: _read(contents, {i: (target_leaves[i], leaf) for i, leaf in in_memory.items()}))
    disk = target.restore_records(contents, matched) if target.on_disk else None
    own = _own_state(contents, target) if target.takes_opt_state(choice) else None
    check_fit(read, target_leaves)
    state = target.fill(matched, read.pop, own, disk, shares=choice.donate)
    if disk is not None and choice.donate:
        target.close_records()
    if move is not None:
        succeed_together(move)
    return state, report


def _mover(contents: Contents, data_iterator: object) -> Callable[[], None]:
    """Returns a function that moves a data iterator to its saved position; raises if there is none."""
    positions = contents.read_json(ITERATOR)
    if positions is None:
        raise ValueError(f"The checkpoint at {contents.directory} holds no position of a data iterator.")
    return iterator_mover(data_iterator, positions["positions"])


class RestoreTarget:
    """A state to restore into: its leaves in a checkpoint, and how they become stored arrays.

    Attributes:
      leaves: Its leaves in a checkpoint.
      on_disk: Of those that the state has on disk, the path in its optimizer state, by number.
    """

    def __init__(self, adapted: StateAdapter) -> None:
        self.adapted = adapted
        self.plan: ZeroPlan = adapted.state.tx.plan
        self._plain = plain_state(adapted.state, self.plan)
        self.leaves = target_leaves(self._plain, self.plan)
        plain = self.plan.plain.view.flat(self._plain)
        self.on_disk = {i: x.path for i, x in enumerate(plain) if isinstance(x, InRecords)}
        self._values = self.plan.view.flat(adapted.state)

    def match(
        self, stored: Iterable[StoredLeaf], choice: Choice, where: epath.PathLike
    ) -> tuple[dict[int, StoredLeaf], RestoreReport]:
        """Returns the stored leaf for each leaf, by its index in `leaves`, and a report, see `match_leaves`."""
        chosen = choice.selector(self.adapted.state)
        return match_leaves(self.leaves, stored, where, chosen=chosen, rename=choice.rename, strict=choice.strict)

    def _sources(self, own: ZeroOptState | None) -> tuple[TrainStateLike, list[tuple[Any, StateLeaf]]]:
        """Returns the stored state with sources as leaves, and each with its layout, in the order of `plan.view`."""
        tree = stored_state(number_leaves(self._plain, self.plan), self.plan, own)
        return tree, list(zip(self.plan.view.flat(tree), self.plan.view.leaves, strict=True))

    def takes_opt_state(self, choice: Choice) -> bool:
        """Whether all optimizer leaves are restored; if so, its loss scale and counter are, too."""
        chosen = choice.selector(self.adapted.state)
        return not choice.params_only and all(chosen(leaf) for leaf in self.leaves if leaf.keys[0] == OPT_STATE)

    def check_kept(self, matched: Mapping[int, StoredLeaf]) -> None:
        """Raises unless the state has values for all leaves that are not restored."""
        left = [
            (self.leaves[source.index].path, x)
            for x, (source, _) in zip(self._values, self._sources(None)[1], strict=True)
            if isinstance(source, Number) and source.index not in matched
        ]
        abstract = list(dict.fromkeys(path for path, x in left if not _has_values(x)))
        if abstract:
            raise ValueError(
                f"These leaves are not restored, and `like` has shapes but no values for them: {few(abstract, 10)}. "
                "Pass a state with values, such as the one to start from, as `like`."
            )
        check_alive([x for _, x in left])
        if any(isinstance(x, InRecords) for _, x in left):
            records_of(self.adapted.state)

    def restore_records(self, contents: Contents, matched: Mapping[int, StoredLeaf]) -> RestoredRecords:
        """Returns new records with the leaves on disk: those in the checkpoint, and copies of the others."""
        keeps = any(i not in matched for i in self.on_disk)
        there = {path: matched[i] for i, path in self.on_disk.items() if i in matched}
        return restore_records(contents, self.plan, there, records_of(self.adapted.state) if keeps else None)

    def close_records(self) -> None:
        """Frees the records of the state, if it has any."""
        if any(_has_values(x) for x in self._values if isinstance(x, InRecords)):
            records_of(self.adapted.state).close()

    def free(self, matched: Mapping[int, StoredLeaf]) -> None:
        """Frees the arrays whose values will be replaced, and the records if all that they hold will be."""
        if self.on_disk and all(i in matched for i in self.on_disk):
            self.close_records()
        sources = [source for source, _ in self._sources(None)[1]]
        goes = [isinstance(source, Number) and source.index in matched for source in sources]
        reused = {id(x) for x, go in zip(self._values, goes, strict=True) if not go}
        for x, go in zip(self._values, goes, strict=True):
            if go and isinstance(x, jax.Array) and id(x) not in reused and not x.is_deleted():
                x.delete()

    def fill(
        self,
        matched: Container[int],
        read: Callable[[int], jax.Array],
        own: ZeroOptState | None = None,
        disk: RestoredRecords | None = None,
        *,
        shares: bool,
    ) -> State:
        """Returns the state with other leaves.

        Args:
          matched: The numbers of the leaves to replace.
          read: Returns one of them, as `leaves` describes it, of numbers that fit (`check_fit`). Called once for each,
            when its turn has come, so that a reader may hold one at a time.
          own: The loss scale and counter to continue with; `None` to keep those of the state, or to start over. Pending
            gradients belong to other parameters, and are dropped.
          disk: What was restored on disk. Without it, leaves on disk stay there, and those that were read are written
            to the state's own records.
          shares: Whether the result has the other arrays themselves, not copies.
        """
        tree, sources = self._sources(own)
        last_use = {source.index: i for i, (source, _) in enumerate(sources) if isinstance(source, Number)}
        fresh = {"disk/waiting", *(["disk/generation"] if disk is not None else [])}
        values, held = [], dict[int, jax.Array]()
        for i, (x, (source, leaf)) in enumerate(zip(self._values, sources, strict=True)):
            if disk is not None and isinstance(source, Number) and source.index in self.on_disk:
                values.append(self._from_disk(x, source.index, leaf, disk, shares))
            elif isinstance(source, Number) and (number := source.index) in matched:
                if number not in held:
                    held[number] = read(number)
                values.append(_finish(held[number], self.leaves[number], leaf))
                if last_use[number] == i:  # so that at most one leaf exists twice
                    jax.block_until_ready(values[-1])
                    del held[number]
            elif isinstance(source, Number) or (own is None and leaf.path not in fresh and _is_alive(x)):
                values.append(x if shares or isinstance(x, InRecords) else copy_array(x))
            else:
                values.append(leaf.place(source))
        state = self.plan.view.rebuilt(tree, values, tx=self.adapted.state.tx)
        if disk is None:
            state = kept_in_records(state, like=self.adapted.state)
        return self.adapted.rebuild(state)

    def _from_disk(self, x: Any, index: int, leaf: StateLeaf, disk: RestoredRecords, shares: bool) -> Any:
        """Returns a leaf that is on disk now, or the 16-bit parameter of a master that is."""
        if leaf.in_records:
            return disk.records.node(leaf)
        if index not in disk.rounded:
            return x if shares else copy_array(x)
        rounded = self.plan.leaves[index].grad.convert(disk.rounded.pop(index), leaf)
        return jax.block_until_ready(rounded)  # so that at most one leaf exists twice


def _has_values(x: object) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, InRecords) and x.records is not None)


def check_fit(read: Mapping[int, jax.Array], target_leaves: Sequence[TargetLeaf]) -> None:
    """Raises if a cast to the state's dtypes would change numbers by more than rounding."""
    cast = [(target_leaves[i], x) for i, x in read.items() if x.dtype != target_leaves[i].leaf.dtype]
    bad = [f"  {leaf.path}: {why}" for leaf, x in cast if (why := describe_misfit(on_device(x), leaf.leaf.dtype))]
    if bad:
        raise ValueError(
            "These leaves cannot be read into the state, which does not hold their numbers:\n"
            + "\n".join(bad)
            + "\nRead them into a state of a wider dtype."
        )


def _is_alive(x: object) -> bool:
    return isinstance(x, jax.Array) and not x.is_deleted()


def read_extra(contents: Contents) -> Any:
    """Returns the values saved as `extra`; an empty dict if there are none."""
    encoded = contents.read_json(EXTRA)
    if encoded is None:
        return {}
    arrays: dict[str, np.ndarray] = {}
    directory = contents.directory / EXTRA_ARRAYS
    if is_there(directory):
        with reading(directory):
            reading_all = {keys[0]: x.read() for keys, x in open_tree(directory).items()}
            arrays = {name: np.asarray(x.result()) for name, x in reading_all.items()}
    digests = {name: value for name, value in contents.notes.get("digests", {}).items() if "/" in name}
    if digests and digests != {f"{EXTRA_ARRAYS}/{name}": digest(x) for name, x in arrays.items()}:
        raise DamageError(f"The arrays in {directory} are damaged: they are not what was written.\n{REMEDY}")
    return decode(encoded, arrays)


def _own_state(contents: Contents, target: RestoreTarget) -> ZeroOptState | None:
    """Returns the noted loss scale and counter of updates; `None` if another program wrote the checkpoint."""
    if not contents.notes:
        return None
    noted = contents.notes.get("precision", {})
    scale, count = noted.get("loss_scale"), noted.get("num_updates")
    loss_scale = None
    if scale is not None:
        count_leaves = len(target.plan.leaves)
        is_noted = len(scale["overflowed"]) == count_leaves
        overflowed = scale["overflowed"] if is_noted else [False] * count_leaves
        loss_scale = LossScaleState(
            scale=host_array(scale["scale"], np.float32),
            good_steps=host_array(scale["good_steps"], np.int32),
            hysteresis=host_array(scale["hysteresis"], np.int32),
            exhausted=host_array(scale["exhausted"], np.bool_),
            overflowed=host_array(overflowed, np.bool_),
        )
    count = None if count is None else host_array(count, np.int32)
    return ZeroOptState(inner=None, masters=None, loss_scale=loss_scale, num_updates=count)


def _read(contents: Contents, leaves: Mapping[int, tuple[TargetLeaf, StoredLeaf]]) -> dict[int, jax.Array]:
    """Reads leaves from disk into the stored shapes of a plan, in buffers of their own.

    Raises:
      CheckpointError: A leaf cannot be read, or is damaged.
    """
    read = {i: _read_keys(contents, *x) for i, x in leaves.items() if is_key(x[0].leaf.dtype)}
    read_shards(contents, {i: x for i, x in leaves.items() if i not in read}, read.__setitem__)
    return read


def _read_keys(contents: Contents, target_leaf: TargetLeaf, stored: StoredLeaf) -> jax.Array:
    """Returns random keys in the form of a leaf, from their words."""
    with contents.errors():
        words = np.asarray(contents.arrays[stored.keys].read().result())
    impl = jax.random.key_impl(jax.numpy.zeros((), target_leaf.leaf.dtype))
    return target_leaf.form.place(jax.random.wrap_key_data(jax.numpy.asarray(words), impl=impl))


def _finish(x: jax.Array, target_leaf: TargetLeaf, leaf: StateLeaf) -> jax.Array:
    """Returns an array from disk as a leaf of the state, in its own buffer."""
    is_finished = x.dtype == leaf.dtype and target_leaf.cut == leaf.padded_cut and x.sharding == leaf.sharding
    return x if is_finished else target_leaf.form.convert(x, leaf)
