"""Rows of stacks for programs that run.

    take_row(handle, shape, dtype) -> np.ndarray

A program asks from inside, by a callback, so nothing here raises or waits without end, see [Note: Rows for programs].

[Note: Rows for programs]
An exception in a callback would leave the other devices in a gather, which ends the process. So what goes wrong is
kept: the program gets zeros from then on, and whoever started it calls `check` afterwards, which raises. A device that
waits for long would be taken for dead by the others, likewise, so each wait has an end.

A program takes the rows of a stack in an order that is known when it begins. Threads read one row of each stack and
device ahead. If the program takes another one, it is read while the program waits, and nothing is read ahead of that
stack any more.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero.core.disk.files import DiskError, page_aligned
from jzero.core.disk.stores import Store

WAIT_S = 20.0
"""Seconds until a program stops to wait for a row; XLA's clients for CPUs end a process after 40 in a gather."""


class StoredRow(NamedTuple):
    """Where a row is, and what it is.

    Attributes:
      records: The records at whose heads its elements are, in their order.
      counts: How many elements each has.
    """

    records: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any


class _Ahead(NamedTuple):
    """A row that is being read."""

    row: int
    array: concurrent.futures.Future[np.ndarray]


class _Lane:
    """The rows of one stack on one device.

    Attributes:
      rows: Their numbers.
      expected: Those that the program will take, after what is read ahead.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.expected: collections.deque[int] = collections.deque()
        self.ahead: _Ahead | None = None


class RowReader:
    """Reads rows of the current slot of a store, see [Note: Rows for programs].

    Args:
      store: The records.
      stacks: The rows of each stack on each device, in their order.
      threads: How many rows are read at a time.

    Attributes:
      ticket: A number of this process that `take_row` finds it by.
      first: The number of each stack's first row; the others follow.
    """

    def __init__(self, store: Store, stacks: Sequence[Sequence[StoredRow]], threads: int) -> None:
        self.ticket = next(_TICKETS)
        *self.first, _ = itertools.accumulate(map(len, stacks), initial=0)
        self._store, self._rows = store, [row for stack in stacks for row in stack]
        self._lanes = [_Lane(range(a, a + len(x))) for a, x in zip(self.first, stacks, strict=True)]
        self._lane_of = [lane for lane in self._lanes for _ in lane.rows]
        self._threads = concurrent.futures.ThreadPoolExecutor(threads, "jzero rows")
        self._taking = threading.Lock()
        self._error: BaseException | None = None
        self._free: dict[int, list[np.ndarray]] = {}  # by size
        _READERS[self.ticket] = self

    def begin(self, directions: Sequence[int]) -> None:
        """Begins to read ahead for a program, and drops what was read ahead for another.

        Args:
          directions: For each loop over the stacks, 1 if it takes the first row first, -1 if the last one.
        """
        with self._taking:
            self._error = None
            for lane in self._lanes:
                lane.ahead = None
                lane.expected = collections.deque(row for step in directions for row in lane.rows[::step])
                self._read_ahead(lane)

    def take(self, number: int) -> np.ndarray:
        """Returns a row. After an error, zeros."""
        try:
            if self._error is None:
                return self._next(number).result(WAIT_S)
        except BaseException as error:
            self._error = self._error or error
        return np.zeros(self._rows[number].shape, self._rows[number].dtype)

    def check(self) -> None:
        """Raises the first error since `begin`.

        Raises:
          DiskError: A row could not be read, so all that the program computed is worth nothing.
        """
        error, self._error = self._error, None  # its traceback leads to the store, which would stay open
        if isinstance(error, TimeoutError):
            raise DiskError(
                f"A row of parameters was not read within {WAIT_S:g} seconds. The state is as before: repeat the step, "
                "or save the state, and use a faster disk."
            )
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the threads; the store stays open. Nothing may be under way."""
        self._threads.shutdown()

    def _next(self, number: int) -> concurrent.futures.Future[np.ndarray]:
        with self._taking:
            lane = self._lane_of[number]
            ahead, lane.ahead = lane.ahead, None
            if ahead is not None and ahead.row == number:
                self._read_ahead(lane)
                return ahead.array
            lane.expected.clear()
            return self._threads.submit(self._read, number)

    def _read_ahead(self, lane: _Lane) -> None:
        if lane.expected:
            row = lane.expected.popleft()
            lane.ahead = _Ahead(row, self._threads.submit(self._read, row))

    def _read(self, number: int) -> np.ndarray:
        row = self._rows[number]
        parts = [
            self._read_head(record)[: n * row.dtype.itemsize] for record, n in zip(row.records, row.counts, strict=True)
        ]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return flat.view(row.dtype).reshape(row.shape)

    def _read_head(self, record: int) -> np.ndarray:
        size = self._store.heads[record]
        free = self._free.setdefault(size, [])
        try:
            buffer = free.pop()
        except IndexError:  # no lock: threads share it
            buffer = page_aligned(size)
        lent = np.asarray(_Lent(buffer, free))
        self._store.read(record, buffer)
        return lent


class _Lent:
    """Memory that goes back with the last array over it."""

    def __init__(self, buffer: np.ndarray, free: list[np.ndarray]) -> None:
        # An array over this object, and all views of it, refer to the object; views of `buffer` would not.
        self.__array_interface__ = buffer.__array_interface__
        weakref.finalize(self, free.append, buffer).atexit = False


_TICKETS = itertools.count(1)
_READERS: weakref.WeakValueDictionary[int, RowReader] = weakref.WeakValueDictionary()


def take_row(handle: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns the row that a handle, int32 [2], stands for: a reader's ticket, and the row's number there."""
    reader = _READERS.get(int(handle[0]))
    return np.zeros(shape, dtype) if reader is None else reader.take(int(handle[1]))
