"""Sinks of metrics that write files: CSV, JSON lines, TensorBoard. Any function of `(step, values)` is a sink, too."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jzero.core.base.extras import import_extra
from jzero.core.base.guard import warn
from jzero.core.base.text import plain

Sink = Callable[[int, Mapping[str, float]], Any]
"""`sink(step, values)`; if it has a `start`, that gets the settings of the run; if a `close`, that ends it."""

NON_FINITE = "non_finite"
CSV_COLUMNS = ("step", "time")
CSV_ROW = re.compile(rb"-?\d*(,|$)")
JSON_START = b'{"step": '
"""How the lines of both begin."""
ANOTHER = "Choose another file."
FLUSH_SECONDS = 10


def import_package(module: str, *, sink: str, extra: str, distribution: str = "") -> Any:
    """Returns a module of the package that a sink writes through; raises an `ImportError` that says how to get it."""
    package = distribution or module.partition(".")[0]
    return import_extra(module, f"`{sink}` needs {package}: `pip install 'jzero[{extra}]'`, or use `jzero.JsonLines`.")


def check_names(values: Mapping[str, float], reserved: tuple[str, ...]) -> None:
    """Raises if a value has a name that a sink uses itself."""
    clashes = [name for name in values if name in reserved]
    if clashes:
        raise ValueError(f"This sink writes {reserved} of its own: rename the values {clashes}.")


class LineFile:
    """A text file that grows by whole lines. Each goes to the operating system at once.

    Writers may take turns, in one process or several: each holds the file's lock while it writes, and opens the file
    anew if another one has put a new file in its place.

    Args:
      path: The file. The first line makes it, with its folder.
      is_complete: Whether a last line without its end is complete, so that it need not be removed, given what the file
        holds and that line; raises a `ValueError` if the sink has not written them.
    """

    def __init__(self, path: str | os.PathLike[str], is_complete: Callable[[bytes, bytes], bool]) -> None:
        self.path = pathlib.Path(path)
        self._is_complete = is_complete
        self._file: Any = None
        self._is_checked = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the file alone, open and checked."""
        while self._file is None or not self._lock():
            self.close()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file, self._is_checked = self.path.open("ab+", buffering=0), False
        try:
            if not self._is_checked:
                self._check()
                self._is_checked = True
            yield
        finally:
            if not self._is_checked:
                self.close()
            elif self._file is not None:
                _flock(self._file, fcntl.LOCK_UN)

    def append(self, text: str) -> None:
        """Writes text that ends a line."""
        with self.held():
            self.write(text)

    def write(self, text: str) -> None:
        """Writes text that ends a line to the held file."""
        rest = text.encode()
        try:
            while rest:  # the system may take less than all of it
                rest = rest[self._file.write(rest) :]
        except OSError:
            self.close()  # so that the next call opens the file again, and removes what is there of this line
            raise

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock(self) -> bool:
        """Waits for the lock; whether the open file is still that of the path."""
        _flock(self._file, fcntl.LOCK_EX)
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _check(self) -> None:
        """Removes a last line that was cut off."""
        self._file.seek(0)
        content = self._file.read()
        tail = content.rpartition(b"\n")[2]
        is_complete = self._is_complete(content, tail)
        if tail and is_complete:
            self._file.write(b"\n")  # the line is complete, but its newline is missing
        elif tail:
            warn(f"The last line of {self.path} was cut off and is removed: {tail[:80]!r}.")
            self._file.truncate(len(content) - len(tail))


def _flock(file: Any, how: int) -> None:
    with contextlib.suppress(OSError):  # where there are no locks, one writer at a time has to do
        fcntl.flock(file, how)


class JsonLines:
    """A sink that appends one JSON object per step to a file.

    A line holds `step`, `time` (seconds since the epoch) and the values by name. JSON has no NaN and no infinity:
    such a value is `null`, and `non_finite` says by name whether it was "nan", "inf" or "-inf". Each line goes to
    the operating system at once, so a crash does not damage earlier lines. If a crash or a full disk cut off the
    last line, the next write removes it, with a warning. A run that resumes from a checkpoint appends: a repeated
    step gets a second line, which counts. Several writers of a file lose no line.

    Args:
      path: The file. The first write makes it, with its folder.

    Raises:
      ValueError: (when called) A value is named `step`, `time` or `non_finite`, or the file is there, but not written
        by a `JsonLines`.
      OSError: (when called) The line could not be written whole, as on a full disk.

    Example:
      >>> sink = jzero.JsonLines(tmp / "log.jsonl")
      >>> sink(1, {"loss": 2.5, "grad_norm": float("inf")})
      >>> sink.close()
      >>> print((tmp / "log.jsonl").read_text())
      {"step": 1, "time": ..., "loss": 2.5, "grad_norm": null, "non_finite": {"grad_norm": "inf"}}
      <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = LineFile(path, self._is_complete)
        self.path = self._lines.path

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line."""
        check_names(values, ("step", "time", NON_FINITE))
        nonfinite = {name: str(x) for name, x in values.items() if not math.isfinite(x)}
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: None if name in nonfinite else x for name, x in values.items()}
        if nonfinite:
            line |= {NON_FINITE: nonfinite}
        self._lines.append(json.dumps(line, allow_nan=False, default=plain) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    def _is_complete(self, content: bytes, tail: bytes) -> bool:
        """Whether the last line is JSON; raises if it, or the first one, is none of a `JsonLines`."""
        for line in (content[:80], tail[:80]):
            if not line.startswith(JSON_START) and not JSON_START.startswith(line):
                raise ValueError(f"{self.path} is no log of a `JsonLines`: it has a line {line!r}. {ANOTHER}")
        try:
            json.loads(tail)
        except ValueError:
            return False
        return True


class Csv:
    """A sink that appends one row per step to a table, for spreadsheets and `pandas.read_csv`.

    Columns are `step`, `time` (seconds since the epoch) and one per value, in the order in which values first came; a
    row is empty where a step has no such value. When a value comes for the first time, the file is written anew, with
    its column. Otherwise each row goes to the operating system at once; a last row that a crash cut off is removed,
    with a warning. A run that resumes appends: of two rows with the same step, the later one counts. Several writers of
    a file lose no row.

    Args:
      path: The file. The first write makes it, with its folder.

    Raises:
      ValueError: (when called) A value is named `step` or `time`, or the file is there, but not written by a `Csv`.
      OSError: (when called) The row could not be written whole, as on a full disk.

    Example:
      >>> sink = jzero.Csv(tmp / "log.csv")
      >>> sink(1, {"loss": 2.5})
      >>> sink(2, {"loss": 2.0, "eval/loss": float("inf")})
      >>> sink.close()
      >>> print((tmp / "log.csv").read_text())
      step,time,loss,eval/loss
      1,...,2.5,
      2,...,2.0,inf
      <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = LineFile(path, self._is_complete)
        self.path = self._lines.path
        self._columns: list[str] = []

    def __repr__(self) -> str:
        return f"Csv({str(self.path)!r})"

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row."""
        check_names(values, CSV_COLUMNS)
        row = {**values, "step": step, "time": round(time.time(), 3)}
        with self._lines.held():
            columns = self._columns or [*CSV_COLUMNS]
            columns = [*columns, *(name for name in values if name not in columns)]
            if columns == self._columns:
                self._lines.write(_csv_row([row.get(name, "") for name in columns]))
            else:
                self._rewrite(columns, row)

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    def _is_complete(self, content: bytes, tail: bytes) -> bool:
        """Notes the columns; raises if the file has no table of a `Csv`."""
        try:
            self._columns = next(csv.reader(io.StringIO(content.decode(errors="replace"), newline="")), [])
        except csv.Error:
            self._columns = []
        is_table = tuple(self._columns[: len(CSV_COLUMNS)]) == CSV_COLUMNS and b"\n" in content
        if content and not (is_table and CSV_ROW.match(tail)):
            raise ValueError(
                f"{self.path} is no table of a `Csv`: its first line is {self._columns[:4]}, and its last one "
                f"{tail[:80]!r}. {ANOTHER}"
            )
        return False

    def _rewrite(self, columns: Sequence[str], row: Mapping[str, object]) -> None:
        """Writes the file anew, with more columns and a row; the old one is there until the new one is complete."""
        with self.path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = list(csv.reader(file))[1:]
        new = self.path.with_name(self.path.name + ".new")
        with new.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(_csv_row([*cells, *[""] * (len(columns) - len(cells))]) for cells in [[*columns], *rows])
            file.write(_csv_row([row.get(name, "") for name in columns]))
        new.replace(self.path)
        self.close()  # and with it the lock


def _csv_row(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


class TensorBoard:
    """A sink that writes scalars for TensorBoard, through the package `tensorboardX`.

    Values are on disk once the sink is called ten seconds later, and when it is closed. TensorBoard shows NaN and
    infinite values as such.

    Args:
      directory: The folder of the run. Each writing process adds its own file.

    Raises:
      ImportError: tensorboardX is not installed.
      OSError: (when called or closed) The values could not be written, as on a full disk.

    Example:
      >>> sink = jzero.TensorBoard(tmp / "run")
      >>> sink(1, {"loss": 2.5})
      >>> sink.close()
      >>> len(list((tmp / "run").glob("events*")))
      1
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # Without `SummaryWriter`: its thread ends at a full disk, and training would then wait for it forever.
        self._files, self._events, self._summary = (
            import_package(f"tensorboardX.{name}", sink="TensorBoard", extra="monitor")
            for name in ("event_file_writer", "proto.event_pb2", "summary")
        )
        self.directory = pathlib.Path(directory)
        self._writer: Any = None
        self._next_flush = 0.0

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.directory)!r})"

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one scalar per value."""
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._writer = self._files.EventsWriter(str(self.directory / "events"))
        now = time.time()
        for name, value in values.items():
            summary = self._summary.scalar(name, value)
            self._writer.write_event(self._events.Event(summary=summary, step=step, wall_time=now))
        if now >= self._next_flush:
            self._writer.flush()
            self._next_flush = now + FLUSH_SECONDS

    def close(self) -> None:
        """Writes the remaining values and closes the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
