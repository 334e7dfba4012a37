"""Sinks of metrics: JSON lines, TensorBoard. Any function of `(step, values)` is a sink, too."""

from __future__ import annotations

import importlib
import json
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["JsonLines", "Sink", "TensorBoard"]

Sink = Callable[[int, Mapping[str, float]], Any]
"""`sink(step, values)`; closed at the end if it has a `close`."""

NON_FINITE = "non_finite"
OWN_KEYS = ("step", "time", NON_FINITE)
FLUSH_SECONDS = 10


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
        self.path = pathlib.Path(path)
        self._file: Any = None

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line."""
        taken = [name for name in values if name in OWN_KEYS]
        if taken:
            raise ValueError(f"Each line has {OWN_KEYS} of its own: rename the values {taken}.")
        found = {name: str(x) for name, x in values.items() if not math.isfinite(x)}
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: None if name in found else x for name, x in values.items()}
        if found:
            line |= {NON_FINITE: found}
        if self._file is None:
            self._file = _open_whole(self.path)
        rest = json.dumps(line, allow_nan=False).encode() + b"\n"
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


def _open_whole(path: pathlib.Path) -> Any:
    """Opens a file to append to, and removes a last line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+", buffering=0)
    file.seek(0)
    tail = file.read().rpartition(b"\n")[2]
    if tail and _is_json(tail):
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
        try:
            # Without `SummaryWriter`: its thread ends at a full disk, and then the training waits for it for ever.
            self._files, self._events, self._summary = (
                importlib.import_module(f"tensorboardX.{name}")
                for name in ("event_file_writer", "proto.event_pb2", "summary")
            )
        except ModuleNotFoundError as error:
            raise ImportError(
                "`TensorBoard` needs tensorboardX: `pip install 'jzero[monitor]'`, or use `jzero.JsonLines`."
            ) from error
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
