"""Files that can only be read from their start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class SequentialFile:
    """A file's examples by number; reading in order is cheap, and going back starts the file again.

    Args:
      read: Yields the examples of a file.
      path: The file.
    """

    def __init__(self, read: Callable[[Any], Iterable[Any]], path: Any) -> None:
        self._read, self._path = read, path
        self._lock = threading.Lock()
        self._examples: Iterator[Any] | None = None
        self._next = 0
        self._last: Any = None

    def __getitem__(self, number: int) -> Any:
        with self._lock:
            if self._examples is None or number < self._next - 1:
                self._examples, self._next = iter(self._read(self._path)), 0
            try:
                while self._next <= number:
                    self._last = next(self._examples)
                    self._next += 1
            except BaseException as error:
                self._examples = None  # a generator that raised has ended: the next attempt starts again
                if isinstance(error, StopIteration):
                    raise IndexError(f"it ends after {self._next} examples") from None
                raise
            return self._last
