"""Sinks of metrics that write files: CSV, JSON lines, TensorBoard. Any function of `(step, values)` is a sink, too."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jzero.core.base.extras import import_extra
from jzero.core.base.text import plain

Sink = Callable[[int, Mapping[str, float]], Any]
"""`sink(step, values)`; if it has a `start`, that gets the settings of the run; if a `close`, that ends it."""

NON_FINITE = "non_finite"
CSV_COLUMNS = ("step", "time")
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

    Args:
      path: The file. The first line makes it, with its folder.
      is_complete: Whether a last line without its end is complete, so that it need not be removed.
    """

    def __init__(self, path: str | os.PathLike[str], is_complete: Callable[[bytes], bool]) -> None:
        self.path = pathlib.Path(path)
        self._is_complete = is_complete
        self._file: Any = None

    def append(self, text: str) -> None:
        """Writes text that ends a line."""
        if self._file is None:
            self._file = _open_lines(self.path, self._is_complete)
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


class JsonLines:
    """A sink that appends one JSON object per step to a file.

    A line holds `step`, `time` (seconds since the epoch) and the values by name. JSON has no NaN and no infinity:
    such a value is `null`, and `non_finite` says by name whether it was "nan", "inf" or "-inf". Each line goes to
    the operating system at once, so a crash does not damage earlier lines. If a crash or a full disk cut off the
    last line, the next write removes it, with a warning. A run that resumes from a checkpoint appends: a repeated
    step gets a second line, which counts.

    Args:
      path: The file. The first write makes it, with its folder.

    Raises:
      ValueError: (when called) A value is named `step`, `time` or `non_finite`.
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
        self._lines = LineFile(path, _is_json)
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


class Csv:
    """A sink that appends one row per step to a table, for spreadsheets and `pandas.read_csv`.

    Columns are `step`, `time` (seconds since the epoch) and one per value, in the order in which values first came; a
    row is empty where a step has no such value. When a value comes for the first time, the file is written anew, with
    its column. Otherwise each row goes to the operating system at once; a last row that a crash cut off is removed,
    with a warning. A run that resumes appends: of two rows with the same step, the later one counts.

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
        self._lines = LineFile(path, lambda tail: False)
        self.path = self._lines.path
        self._columns: list[str] | None = None

    def __repr__(self) -> str:
        return f"Csv({str(self.path)!r})"

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row."""
        check_names(values, CSV_COLUMNS)
        if self._columns is None:
            self._columns = self._columns_there()
        new = [name for name in values if name not in self._columns]
        if new or not self._columns:
            self._columns = [*(self._columns or CSV_COLUMNS), *new]
            self._rewrite(self._columns)
        row = {**values, "step": step, "time": round(time.time(), 3)}
        self._lines.append(_csv_row([row.get(name, "") for name in self._columns]))

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    def _columns_there(self) -> list[str]:
        """Returns the columns of the file; none if it is not there."""
        if not self.path.exists():
            return []
        self._lines.append("")  # removes a last row that was cut off
        with self.path.open(newline="") as file:
            columns = next(csv.reader(file), [])
        if columns and tuple(columns[: len(CSV_COLUMNS)]) != CSV_COLUMNS:
            self.close()
            raise ValueError(
                f"{self.path} is no table of a `Csv`: its first line is {columns[:4]}. Choose another file."
            )
        return columns

    def _rewrite(self, columns: Sequence[str]) -> None:
        """Writes the file anew, with more columns; the old one is there until the new one is complete."""
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[list[str]] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                rows = list(csv.reader(file))[1:]
        new = self.path.with_name(self.path.name + ".new")
        with new.open("w", newline="") as file:
            file.writelines(_csv_row([*row, *[""] * (len(columns) - len(row))]) for row in [[*columns], *rows])
        new.replace(self.path)


def _csv_row(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _open_lines(path: pathlib.Path, is_complete: Callable[[bytes], bool]) -> Any:
    """Opens a file to append to, and removes a last line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+", buffering=0)
    file.seek(0)
    tail = file.read().rpartition(b"\n")[2]
    if tail and is_complete(tail):
        file.write(b"\n")  # the line is complete, but its newline is missing
    elif tail:
        warnings.warn(f"The last line of {path} was cut off and is removed: {tail[:80]!r}.", stacklevel=2)
        file.truncate(file.tell() - len(tail))
    return file


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


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
