"""What a command is doing, from jzero's log to stderr: a line that goes away on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator

EVERY_S = 2.0
"""Seconds from one line to the next where lines stay."""


@contextlib.contextmanager
def shown_status() -> Iterator[None]:
    """Shows the newest message of jzero's log, and keeps its warnings."""
    log = logging.getLogger("jzero")
    level, propagate = log.level, log.propagate
    stays = not sys.stderr.isatty() or os.environ.get("TERM") == "dumb"
    with _Lines() if stays else _Line() as handler:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False  # to the root's handler, which absl adds
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate


class _Status(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Shows a message; one that is a warning stays."""
        text = f"jzero: {self.format(record)}"
        if record.levelno > logging.INFO:
            self.keep(text)
        else:
            self.show(text)

    def keep(self, text: str) -> None:
        """Writes a line that stays."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def show(self, text: str) -> None:
        """Shows what jzero does from now on."""
        raise NotImplementedError


class _Line(_Status):
    """One line with a clock, which rich draws; other output scrolls above it."""

    def __enter__(self) -> _Line:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("jzero", total=None)
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, text: str) -> None:
        self._progress.reset(self._task, description=text)


class _Lines(_Status):
    """A line every `EVERY_S` seconds, if there is news."""

    def __enter__(self) -> _Lines:
        self._newest = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def show(self, text: str) -> None:
        self._newest = text

    def _run(self) -> None:
        written = ""
        while not self._ends.wait(EVERY_S):
            newest = self._newest
            if newest != written:
                self.keep(newest)
                written = newest
