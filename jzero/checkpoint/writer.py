"""Writes the numbered checkpoints of a directory while no other program may write there."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsFloat

import jax
import orbax.checkpoint as ocp
from etils import epath

from jzero.checkpoint.contents import find_steps
from jzero.checkpoint.damage import CheckpointError
from jzero.checkpoint.lock import DirectoryLock, check_shared
from jzero.checkpoint.orbax_io import handler_registry
from jzero.checkpoint.retention import Retention
from jzero.checkpoint.saving import Items, save_error
from jzero.checkpoint.uninterrupted import Uninterrupted
from jzero.core.base.guard import warn
from jzero.core.processes.exchange import succeed_together

SUPERSEDED = "superseded"
"""The folder for later steps, if training resumes from an earlier one."""

REMOVED = "removed"
"""The folder for steps to remove, so that a half-removed step does not look like a checkpoint."""


class Writer:
    """Orbax's manager of a directory and the lock on it, from a save until `close` or a save that fails.

    Everything runs in one thread: see [Note: Ctrl-C while a checkpoint is written].

    Args:
      directory: Where the checkpoints are, one directory per step.
      retention: Which of them are kept.
    """

    def __init__(self, directory: epath.Path, retention: Retention) -> None:
        self._directory = directory
        self._retention = retention
        self._orbax: ocp.CheckpointManager | None = None
        self._lock = DirectoryLock(directory, weakref.WeakMethod(self.close))
        self._saving_step: int | None = None
        self._sweeper: threading.Thread | None = None  # removes old checkpoints
        self._thread = Uninterrupted(_forget(weakref.ref(self)))

    def steps(self) -> list[int] | None:
        """Returns the steps of complete checkpoints and of the one being written; `None` unless this is open."""
        return self._thread.run(self._steps)

    def forget_deleted(self, there: Collection[int]) -> None:
        """Forgets steps that someone else deleted.

        Args:
          there: The complete steps in the directory.
        """
        self._thread.run(self._forget_deleted, there)

    def save(
        self, step: int, items: Items, metrics: Mapping[str, SupportsFloat] | None, *, restored: int | None
    ) -> None:
        """Saves a step once `wait` has returned for the one before; returns when it is copied to the host.

        Args:
          step: Its number.
          items: What `checkpoint_items` returns.
          metrics: Numbers by name.
          restored: The step that was restored, if there were later ones: they make room for this one.

        Raises:
          CheckpointError: It could not be written, or another program writes to the directory.
        """
        try:
            numbers = None if metrics is None else {name: float(x) for name, x in metrics.items()}
            moved = self._thread.run(self._save, step, items.args, numbers, restored)
        except Exception:  # Ctrl-C does not end the save
            items.release()
            raise
        if moved:
            away = self._directory / SUPERSEDED
            warn(f"Training goes on from step {restored}: the later steps {moved} were moved to {away}.")

    def wait(self) -> None:
        """Waits until the current save is complete; raises a `CheckpointError` if it failed."""
        self._thread.run(self._wait)

    def close(self) -> None:
        """Waits for the current save, and lets other programs write to the directory."""
        self._thread.run(self._close)

    def _steps(self) -> list[int] | None:
        return None if self._orbax is None else list(self._orbax.all_steps())

    def _forget_deleted(self, there: Collection[int]) -> None:
        if set(self._steps() or ()) - {self._saving_step, *there}:
            self._wait()  # Orbax would forget the step that it is writing, too
            assert self._orbax is not None
            self._orbax.reload()

    def _save(self, step: int, items: Any, metrics: Mapping[str, float] | None, restored: int | None) -> list[int]:
        """Saves a step; returns the steps that made room for it."""
        self._remove_old()
        try:
            moved = [] if self._orbax is not None else self._open(step, restored)
            assert self._orbax is not None
            self._saving_step = step
            self._orbax.save(step, args=items, metrics=metrics, force=True)
            return moved
        except CheckpointError:
            raise
        except Exception as error:
            self._give_up(step)
            raise save_error(self._directory / str(step), error) from error

    def _wait(self) -> None:
        if self._orbax is None:
            return
        step, self._saving_step = self._saving_step, None
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            self._give_up(step)
            raise save_error(self._directory / str(step), error) from error

    def _close(self) -> None:
        try:
            self._wait()
            if self._orbax is not None:
                self._orbax.close()
                self._remove_old()
                self._join_sweeper()
        finally:
            self._orbax = None
            self._lock.release()

    def _remove_old(self) -> None:
        """Deletes steps that are no longer kept, in the background."""
        if self._orbax is not None and jax.process_index() == 0:
            self._join_sweeper()
            self._sweeper = threading.Thread(target=_remove_all, args=(self._directory / REMOVED,))
            self._sweeper.start()

    def _join_sweeper(self) -> None:
        if self._sweeper is not None:
            self._sweeper.join()

    def _open(self, step: int, restored: int | None) -> list[int]:
        """Starts Orbax's manager, which removes incomplete checkpoints; returns the steps that made room.

        Nobody else may be writing.
        """
        self._take_lock()
        moved = self._supersede(step, restored)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention.policy(),
            best_fn=None if self._retention.best_metric is None else self._retention.score,
            cleanup_tmp_directories=True,
            todelete_subdir=REMOVED,
        )
        self._orbax = ocp.CheckpointManager(self._directory, options=options, handler_registry=handler_registry())
        return moved

    def _supersede(self, step: int, restored: int | None) -> list[int]:
        """Moves the steps after the restored one out of the way, the newest first; the first process returns them."""

        def move() -> list[int]:
            later = [] if restored is None else [other for other in find_steps(self._directory) if other > restored]
            if step > max(later, default=-1) or jax.process_index() > 0:
                return []
            away = self._directory / SUPERSEDED
            away.mkdir(exist_ok=True)
            for other in sorted(later, reverse=True):
                names = (f"{other}" if i == 0 else f"{other}.{i}" for i in range(1000))
                (self._directory / str(other)).rename(next(away / name for name in names if not (away / name).exists()))
            return sorted(later)

        return succeed_together(move)

    def _give_up(self, step: int | None) -> None:
        """Forgets a failed save and removes its files, so that the next save starts cleanly."""
        self._saving_step = None
        orbax, self._orbax = self._orbax, None
        with contextlib.suppress(Exception):
            if orbax is not None:
                orbax.close()
        if jax.process_index() == 0:
            for unfinished in self._directory.glob(f"{step}{ocp.path.step.TMP_DIR_SUFFIX}*"):
                with contextlib.suppress(OSError):
                    unfinished.rmtree()
        self._lock.release()

    def _take_lock(self) -> None:
        """Claims the directory for this program; the first process does, for all."""

        def claim() -> None:
            if jax.process_index() > 0:
                return
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                refused = self._lock.acquire()
            except OSError as error:
                refused = f"{type(error).__name__}: {error}. See that this process may write there."
            if refused:
                raise CheckpointError(f"Checkpoints cannot be written to {self._directory}: {refused}")

        self._lock.take_over()
        try:
            succeed_together(claim)
            check_shared(self._directory)
        except BaseException:
            self._lock.release()
            raise


def _forget(writer: weakref.ref[Writer]) -> Callable[[], None]:
    """Returns what makes a writer that a fork copied as if it had never been open."""

    def forget() -> None:
        copy = writer()
        assert copy is not None
        copy._orbax = copy._saving_step = copy._sweeper = None

    return forget


def _remove_all(directory: epath.Path) -> None:
    for path in directory.iterdir() if directory.exists() else ():
        with contextlib.suppress(OSError):  # tried again the next time
            path.rmtree()
