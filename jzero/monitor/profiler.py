"""Profiles of some steps of a run, by `jax.profiler`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax


class StepProfiler:
    """Traces steps `first` to `last`, counted from 1, into a folder.

    Invariant: at most one trace is open, and only between `before(first)` and `after(last)` or `close`.
    """

    def __init__(self, directory: str | os.PathLike[str], steps: tuple[int, int]) -> None:
        self.directory = os.fspath(directory)
        self.first, self.last = steps
        self.started = False
        self._open = False
        self._annotation: Any = None

    def before(self, count: int, step: int, wait: Callable[[], None]) -> None:
        """Call it before step number `count` of this run; `wait` waits for the steps before."""
        if count == self.first:
            wait()
            jax.profiler.start_trace(self.directory)
            self.started = self._open = True
        if self._open:
            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()

    def after(self, count: int, wait: Callable[[], None]) -> None:
        """Call it after step number `count` was dispatched."""
        self._leave()
        if self._open and count == self.last:
            wait()
            self.close()

    def close(self) -> None:
        """Ends the trace, if one is open, and writes it."""
        self._leave()
        if self._open:
            self._open = False
            jax.profiler.stop_trace()

    def _leave(self) -> None:
        if self._annotation is not None:
            annotation, self._annotation = self._annotation, None
            annotation.__exit__(None, None, None)
