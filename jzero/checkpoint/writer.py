"""Writes the numbered checkpoints of a directory while no other program may write there."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from jzero.checkpoint.contents import find_steps
from jzero.checkpoint.damage import CheckpointError
from jzero.checkpoint.lock import DirectoryLock
from jzero.checkpoint.orbax_io import handler_registry
from jzero.checkpoint.retention import Retention
from jzero.checkpoint.saving import save_error

__all__ = ["Writer"]

SUPERSEDED = "superseded"
"""The folder for later steps, if training resumes from an earlier one."""

REMOVED = "removed"
"""The folder for steps to remove, so that a half-removed step does not look like a checkpoint."""


class Writer:
    """Orbax's manager of a directory and the lock on it, from a save until `close` or a save that fails.

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

    def steps(self) -> list[int] | None:
        """Returns the steps of complete checkpoints and of the one being written; `None` unless this is open."""
        return None if self._orbax is None else list(self._orbax.all_steps())

    def save(self, step: int, items: Any, metrics: Mapping[str, Any] | None, *, restored: int | None) -> None:
        """Saves a step once `wait` has returned for the one before; returns when it is copied to the host.

        Args:
          step: Its number.
          items: What `checkpoint_items` returns.
          metrics: Numbers by name.
          restored: The step that was restored, if there were later ones: they make room for this one.

        Raises:
          CheckpointError: It could not be written, or another program writes to the directory.
        """
        self._remove_old()
        numbers = None if metrics is None else {name: float(x) for name, x in metrics.items()}
        try:
            orbax = self._open(step, restored)
            self._saving_step = step
            orbax.save(step, args=items, metrics=numbers, force=True)
        except CheckpointError:
            raise
        except Exception as error:
            self._give_up(step)
            raise save_error(self._directory / str(step), error) from error

    def wait(self) -> None:
        """Waits until the current save is complete; raises a `CheckpointError` if it failed."""
        if self._orbax is None:
            return
        step, self._saving_step = self._saving_step, None
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            self._give_up(step)
            raise save_error(self._directory / str(step), error) from error

    def close(self) -> None:
        """Waits for the current save, and lets other programs write to the directory."""
        try:
            self.wait()
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

    def _open(self, step: int, restored: int | None) -> ocp.CheckpointManager:
        """Returns Orbax's manager, which removes incomplete checkpoints; nobody else may be writing."""
        if self._orbax is None:
            self._take_lock()
            self._supersede(step, restored)
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._retention.policy(),
                best_fn=None if self._retention.best_metric is None else self._retention.score,
                cleanup_tmp_directories=True,
                todelete_subdir=REMOVED,
            )
            self._orbax = ocp.CheckpointManager(self._directory, options=options, handler_registry=handler_registry())
        return self._orbax

    def _supersede(self, step: int, restored: int | None) -> None:
        """Moves the steps after the restored one out of the way, the newest first."""
        later = [] if restored is None else [other for other in find_steps(self._directory) if other > restored]
        if step <= max(later, default=-1) and jax.process_index() == 0:
            away = self._directory / SUPERSEDED
            away.mkdir(exist_ok=True)
            for other in sorted(later, reverse=True):
                names = (f"{other}" if i == 0 else f"{other}.{i}" for i in range(1000))
                (self._directory / str(other)).rename(next(away / name for name in names if not (away / name).exists()))
            warnings.warn(
                f"Training goes on from step {restored}: the later steps {sorted(later)} were moved to {away}.",
                stacklevel=5,
            )
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("jzero: steps superseded")

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
        """Claims the directory for this program; the first process does, and tells the others."""
        refused = ""
        self._lock.take_over()
        if jax.process_index() == 0:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                refused = self._lock.acquire()
            except OSError as error:
                refused = f"{type(error).__name__}: {error}. See that this process may write there."
        if jax.process_count() > 1:
            outcome = multihost_utils.broadcast_one_to_all(np.array(bool(refused)))
            refused = refused or ("the first process could not claim it; its own message says why." if outcome else "")
        if refused:
            self._lock.release()
            raise CheckpointError(f"Checkpoints cannot be written to {self._directory}: {refused}")


def _remove_all(directory: epath.Path) -> None:
    for path in directory.iterdir() if directory.exists() else ():
        with contextlib.suppress(OSError):  # tried again the next time
            path.rmtree()
