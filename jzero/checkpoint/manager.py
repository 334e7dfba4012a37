"""Numbered checkpoints of a training run: saves some steps, keeps some, and finds the one to resume from."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, SupportsFloat

from etils import epath

from jzero.checkpoint.contents import absolute, find_steps, read_contents
from jzero.checkpoint.damage import CheckpointError, DamageError
from jzero.checkpoint.matching import RestoreReport
from jzero.checkpoint.preemption import PreemptionNotice
from jzero.checkpoint.restoring import Choice, read_extra, restore_from, warn_unless_complete
from jzero.checkpoint.retention import Retention
from jzero.checkpoint.saving import checkpoint_items, meet
from jzero.checkpoint.writer import Writer
from jzero.core.base.guard import warn
from jzero.core.base.types import State
from jzero.core.config.settings import check, integer, one_of, optional
from jzero.core.layout.set_mesh import in_own_mesh
from jzero.core.processes.agree import MEET_S, check_wait
from jzero.core.processes.exchange import exchange, succeed_together
from jzero.core.state.access import apply_pending, step_after_pending
from jzero.core.state.adapter import StateAdapter, adapt_sharded

STEP = integer(0, says="a whole number of at least 0, or nothing to take `state.step`")


class CheckpointManager:
    """Saves a training state at regular steps, keeps some checkpoints, and finds the one to resume from.

    A thin layer over Orbax's manager. `save` copies the state to the host; training continues while files are written.
    A checkpoint counts once it is complete; until then it has another name. Old checkpoints are removed only after a
    newer one is complete. One program at a time may write to a directory; any number may read. If a program has several
    managers, the one that saves takes over from the others. If training resumes from an earlier step than the newest,
    because you asked for it or because newer ones are damaged, and the first save after that is not newer either, it
    moves the steps after the restored one to the folder `superseded`.

    After the first `save`, the manager handles SIGTERM: the next `save` writes a checkpoint whatever the interval,
    waits until it is complete, and ends the program with `SystemExit`; a second SIGTERM ends it at once.

    Args:
      directory: The directory of the checkpoints, one subdirectory per step. The first `save` makes it.
      max_to_keep: How many of the latest checkpoints to keep; `None` for all. With `best_metric`, how many of the best
        to keep, besides the latest.
      save_interval_steps: `save` only saves at multiples of this, and in its first call.
      keep_every_steps: Checkpoints at multiples of this stay, whatever `max_to_keep` says.
      best_metric: Name of the metric, among those passed to `save`, that ranks checkpoints. Checkpoints saved without
        it all stay; NaN is worse than any number.
      best_mode: Whether large (`"max"`) or small (`"min"`) values are good.
      preemption_exit_code: Exit status after a checkpoint saved at SIGTERM; `None` to continue, see `preempted`.
      check_processes: As for `save_checkpoint`: how many seconds `save` waits for processes that have not called it.

    Attributes:
      directory: The directory of the checkpoints.
      preempted: Whether a SIGTERM arrived.
      last_restore: A `RestoreReport` of the last `restore`: restored, cast, renamed and missing leaves.

    Raises:
      ValueError: An argument has an impossible value.

    Example:
      >>> with jzero.CheckpointManager(f"{tmp}/run", max_to_keep=3, save_interval_steps=2) as manager:
      ...     for _ in range(5):
      ...         state = state.replace(step=state.step + 1)
      ...         _ = manager.save(state, extra={"note": "hello"})
      ...     manager.wait()
      ...     manager.all_steps(), int(manager.restore(state).step), manager.restore_extra()
      ([1, 2, 4], 4, {'note': 'hello'})

    References:
      `orbax.checkpoint.CheckpointManager`; DeepSpeed's `save_checkpoint` and `load_checkpoint`.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int = 1,
        keep_every_steps: int | None = None,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "min",
        preemption_exit_code: int | None = 0,
        check_processes: bool | float = True,
    ) -> None:
        max_to_keep = check("max_to_keep", max_to_keep, optional(integer(1)))
        keep_every_steps = check("keep_every_steps", keep_every_steps, optional(integer(1)))
        self._interval = check("save_interval_steps", save_interval_steps, integer(1))
        self._exit_code = check("preemption_exit_code", preemption_exit_code, optional(integer(0)))
        best_mode = check("best_mode", best_mode, one_of("max", "min", says="'max' or 'min'"))
        self.directory = absolute(directory)
        self.last_restore: RestoreReport | None = None
        self.preempted = False
        self._retention = Retention(max_to_keep, keep_every_steps, best_metric, best_mode)
        self._wait_s = check_wait(check_processes, MEET_S)
        self._writer = Writer(self.directory, self._retention)
        self._restored_step: int | None = None
        self._branch: int | None = None  # the step that was restored, if there are later ones
        self._seen: list[int] | None = None  # the steps in the directory, while nothing is written
        self._notice = PreemptionNotice()
        _close_at_exit(self)

    @in_own_mesh
    def save(
        self,
        state: State,
        *,
        step: int | None = None,
        data_iterator: object = None,
        extra: Mapping[str, object] | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves the state if its step is due, and returns once it is copied to the host.

        What is on disk is not copied: one later step may run before it is written, the next waits for that. With
        several processes, each must call it, at every step. They must share the directory.

        Args:
          state: A sharded train state, after a step.
          step: Its step, an integer of at least 0. By default `state.step` (after pending gradients are applied, see
            `apply_pending`), for which the host must wait; a loop that counts its own steps should pass the step.
          data_iterator: An iterator whose position to save: anything with `get_state` (Grain) or `state_dict`
            (PyTorch).
          extra: Other values to save: nested dicts of arrays, PRNG keys, numbers and text.
          metrics: Numbers by name, for `best_metric`.
          force: Whether to save whatever the interval.

        Returns:
          Whether it saves; an existing step is not saved again.

        Raises:
          CheckpointError: This checkpoint or the one before could not be written, another program writes to the
            directory, the processes do not share it, or it holds later steps that were not restored.
          ValueError: `step` is not an integer, or negative; `metrics` lacks `best_metric`, except at a SIGTERM; a
            process did not call it.
          TypeError: The state was not sharded by jzero, or `extra` holds something that cannot be saved.
          RuntimeError: A step consumed the state, or a later one overwrote what it has on disk.
          DiskError: What is on disk cannot be read, or is not what was written there.
          SystemExit: A SIGTERM arrived, and the state is saved.
        """
        step = check("step", step_after_pending(adapt_sharded(state).state) if step is None else step, STEP)
        self._notice.listen()
        now = self._notice.reached(step) and not self.preempted
        self.preempted = self.preempted or now
        meet_all = functools.partial(meet, "CheckpointManager.save", state, self._wait_s)
        latest = self._latest(meet_all)
        if latest is not None and step <= latest:
            latest = self._latest(meet_all, look_again=True)
        goes_back = latest is not None and self._branch is not None and self._branch < step <= latest
        if latest is not None and step < latest and not goes_back and step != self._branch:
            raise CheckpointError(
                f"{self.directory} holds step {latest}, so step {step} would not be the one to go on from, and is not "
                "saved. To train on from an earlier step restore it with this manager "
                "(`manager.restore(like, step=...)`); for another run choose another directory."
            )
        due = latest is None or step % self._interval == 0
        saved = (latest is None or step > latest or goes_back) and (force or now or due)
        if saved:
            if not now:
                self._retention.check(metrics)
            self._wait_for_previous(despite_failure=now)
            if goes_back:
                self._writer.close()
            meet_all()
            items = checkpoint_items(apply_pending(state), data_iterator=data_iterator, extra=extra)
            self._seen = None
            self._writer.save(step, items, metrics, restored=self._branch)
            self._branch = None
        if now and self._exit_code is not None:
            self.close()
            logging.getLogger("jzero").warning(
                "SIGTERM: step %s is saved in %s; the program ends.", step, self.directory
            )
            raise SystemExit(self._exit_code)
        return saved

    def wait(self) -> None:
        """Waits until the current save is complete; raises a `CheckpointError` if it failed."""
        self._writer.wait()

    @in_own_mesh
    def restore(
        self,
        like: State,
        *,
        step: int | None = None,
        paths: str | None = None,
        params_only: bool = False,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        data_iterator: object = None,
        donate: bool = False,
    ) -> State:
        """Reads a checkpoint into a state laid out like another one, as `restore_checkpoint` does.

        Args:
          like: A state sharded by jzero, or its shapes (`abstract_train_state`).
          step: The step. By default the newest that is not damaged: if bytes of one are wrong or missing, a warning
            describes the damage, and the step before is restored.
          paths: As for `restore_checkpoint`.
          params_only: As for `restore_checkpoint`.
          strict: As for `restore_checkpoint`.
          rename: As for `restore_checkpoint`.
          data_iterator: As for `restore_checkpoint`.
          donate: As for `restore_checkpoint`.

        Returns:
          The state; `last_restore` describes what was restored.

        Raises:
          CheckpointError: There is no checkpoint, all are damaged, or the file system fails.
          ValueError: It is of another model, or `like` has no values for leaves that are not restored.
          TypeError: `like` was not sharded by jzero.
        """
        self.wait()
        choice = Choice(paths=paths, params_only=params_only, strict=strict, rename=rename or {}, donate=donate)
        adapted = adapt_sharded(like)
        step = check("step", step, optional(STEP))
        steps = self._agreed_steps()
        if step is not None and step not in steps:
            raise CheckpointError(f"There is no step {step} in {self.directory}: it has {sorted(steps)}.")
        if not steps:
            raise CheckpointError(f"There is no checkpoint in {self.directory} to restore.")
        self._seen = None
        damaged: list[str] = []
        for candidate in [step] if step is not None else sorted(steps, reverse=True):
            read = functools.partial(self._read, candidate, adapted, choice, data_iterator)
            try:
                try:
                    state, report = read()
                except CheckpointError:
                    state, report = read()  # what passes does not come twice, see [Note: What is damage]
            except DamageError as error:
                if step is not None:
                    raise
                damaged.append(str(error))
                continue
            if damaged:
                warn(f"Step {candidate} was restored, since what is newer is damaged:\n" + "\n".join(damaged))
            warn_unless_complete(report, choice.is_partial)
            self.last_restore, self._restored_step = report, candidate
            self._branch = candidate if candidate < max(steps) else None
            return state
        raise CheckpointError(f"No checkpoint in {self.directory} can be read:\n" + "\n".join(damaged))

    def restore_extra(self, step: int | None = None) -> Any:
        """Returns the `extra` of a step; arrays come back as NumPy arrays, tuples as lists.

        Args:
          step: The step. By default the last one restored, or else the newest.
        """
        self.wait()
        step = check("step", step, optional(STEP))
        steps = self._find_committed()
        step = next((s for s in (step, self._restored_step, max(steps, default=None)) if s is not None), None)
        if step is None or step not in steps:
            raise CheckpointError(f"There is no step {step} in {self.directory}: it has {sorted(steps)}.")
        return read_extra(read_contents(steps[step]))

    def all_steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, and of the one being written, in order."""
        there = self._find_committed()
        self._writer.forget_deleted(there)
        steps = self._writer.steps()
        return sorted(there if steps is None else steps)

    def latest_step(self) -> int | None:
        """Returns the newest step of `all_steps`; `None` if there is none."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the best step by `best_metric`; `None` if there is none."""
        self.wait()
        return self._retention.best(self._find_committed())

    def close(self) -> None:
        """Waits for the current save, and lets other programs write to the directory."""
        self._notice.stop()
        self._seen = None
        self._writer.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(
        self, step: int, adapted: StateAdapter, choice: Choice, data_iterator: object
    ) -> tuple[State, RestoreReport]:
        contents = succeed_together(functools.partial(read_contents, self.directory / str(step)))
        return restore_from(contents, adapted, choice, data_iterator=data_iterator)

    def _find_committed(self) -> dict[int, epath.Path]:
        return find_steps(self.directory)

    def _agreed_steps(self) -> list[int]:
        """Returns the steps that the first process sees, since file systems may lag. Each process must call it."""
        return list(exchange(lambda: sorted(self._find_committed()))[0])

    def _latest(self, meet_all: Callable[[], None], *, look_again: bool = False) -> int | None:
        """Returns the newest step. Each process must call it.

        Args:
          meet_all: Called before processes tell each other.
          look_again: Whether to read the directory although its steps are known, since someone may have deleted one.
        """
        steps = self._writer.steps()
        if look_again or (steps is None and self._seen is None):
            meet_all()
            self._seen = self._agreed_steps()
            self._writer.forget_deleted(self._seen)
            steps = self._writer.steps()
        return max(self._seen or () if steps is None else steps, default=None)

    def _wait_for_previous(self, *, despite_failure: bool) -> None:
        """Waits for the previous save; if it failed, raises, or only warns if this save is the last chance."""
        try:
            self.wait()
        except CheckpointError as error:
            if not despite_failure:
                raise
            warn(str(error))


def _close_at_exit(manager: CheckpointManager) -> None:
    """Closes a manager at the end of the program, if the program does not, so that its last checkpoint is completed."""
    reference, process = weakref.ref(manager), os.getpid()

    def close() -> None:
        left = reference()
        if left is not None and os.getpid() == process:  # forked processes inherit the hook
            left.close()

    # This must run while threads can still start; `atexit` is too late, and Python has no public name for it.
    getattr(threading, "_register_atexit", atexit.register)(close)
