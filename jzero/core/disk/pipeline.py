"""Records on their way through memory, from one slot of a store into the other.

    Pipeline(store, threads)

[Note: Records in flight]
Readers run ahead, the calling thread visits records in their order, writers follow. A fixed number of buffers goes
round between the three, and is all the memory that this takes: they queue before the slowest, and the others wait. A
reader takes record and buffer together, so the next record to be visited always has one, and nothing hangs.

Ctrl-C interrupts the calling thread at any line. All that this thread does to the others is to put something into a
queue or to get something out, which happens or does not. It counts those that have ended before it joins them: if
Ctrl-C ends a `Thread.join`, Python 3.11 and 3.12 take a thread that still runs for one that has ended. A pass that ends
early is thrown away with its threads and queues, once no read or write is under way; the buffers are kept.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jzero.core.disk.files import page_aligned
from jzero.core.disk.stores import Store

WAKE_S = 0.1
"""Seconds until a thread that waits for an end looks again: Ctrl-C may have taken what would have woken it."""

Finish = Callable[[np.ndarray], object]
Visit = Callable[[int, np.ndarray], Finish | None]


class RunStats(NamedTuple):
    """What one `Pipeline.run` took.

    Attributes:
      seconds: All of it.
      waited_seconds: Of these, how long the calling thread waited: for a record, or at the end for the writers.
    """

    seconds: float
    waited_seconds: float
    read_bytes: int
    written_bytes: int


class Pipeline:
    """Shows the records of a store to a visitor, see [Note: Records in flight].

    One thread may use it at a time. A pipeline that is no longer referred to ends its threads.

    Args:
      store: The records.
      threads: How many records are read at a time, and how many written.

    Attributes:
      buffers: All memory that records take, `2 · threads + 1` times uint8 `[max(store.sizes)]`.
    """

    def __init__(self, store: Store, threads: int = 2) -> None:
        self._pass: _Pass | None = None
        self._process = os.getpid()
        self.store, self._threads = store, threads
        self.buffers = tuple(page_aligned(max(store.sizes, default=0)) for _ in range(2 * threads + 1))

    def start_reading(self, records: Sequence[int] | None = None) -> None:
        """Begins to read ahead what the next `run` of the same records visits. Errors wait for that.

        Args:
          records: Which, in this order; all by default.
        """
        self._current(self._order(records), reads=True)

    def run(
        self, visit: Visit, records: Sequence[int] | None = None, *, reads: bool = True, writes: bool = True
    ) -> RunStats:
        """Visits records, in their order and in this thread. After an error it can be called again.

        Args:
          visit: `visit(record, buffer)` is given a record's bytes, uint8 `[store.sizes[record]]`. It may change them at
            once, or return a function `finish(buffer)` that does; a writer calls it when nobody waits, and until it
            returns, the buffer stays that record's.
          records: Which, in this order; all by default. Before `store.commit` all must have been written.
          reads: Whether to read the records. Else the buffers hold anything.
          writes: Whether to write them, after `store.begin`. Then `store.commit` is left to the caller.

        Raises:
          DiskError: A read or a write failed, see `Store`. It is the first error, and nothing is under way any more.
        """
        started = time.perf_counter()
        order = self._order(records)
        try:
            current = self._current(order, reads)
            if writes:
                self.store.begin()
            waited = current.visit_all(visit, writes)
        finally:
            self.cancel()
        moved = sum(self.store.sizes[record] for record in order)
        return RunStats(time.perf_counter() - started, waited, moved * reads, moved * writes)

    def cancel(self) -> None:
        """Drops what was read ahead. Waits until no read or write is under way."""
        if self._pass is not None:
            if self._process == os.getpid():  # a forked child has none of the threads
                self._pass.end()
            self._pass = None  # not before: if Ctrl-C ends the wait, the next call waits again

    def close(self) -> None:
        """Ends all threads and drops the buffers; the store stays open."""
        self.cancel()
        self.buffers = ()

    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.stop()  # else its readers would keep the store and its space alive

    def _order(self, records: Sequence[int] | None) -> tuple[int, ...]:
        return tuple(range(len(self.store.sizes)) if records is None else records)

    def _current(self, order: tuple[int, ...], reads: bool) -> _Pass:
        """Returns the pass that `start_reading` began, if it is this one, or a new one."""
        assert self.buffers, "used after `close`"
        if self._process != os.getpid():
            raise RuntimeError(
                "Optimizer state on disk belongs to the process that made it, and this is a forked child of that one. "
                "Train in the process that made the state, or make one here."
            )
        key = (order, reads, self.store.generation)
        if self._pass is None or not self._pass.is_fresh or self._pass.key != key:
            self.cancel()
            self._pass = _Pass(self.store, self.buffers, key, self._threads)
            self._pass.start()
        return self._pass


class _Visited(NamedTuple):
    """A record on its way to a writer, in its buffer."""

    record: int
    buffer: np.ndarray
    finish: Finish | None
    writes: bool


class _Pass:
    """One pass of records through the buffers, with threads of its own.

    Args:
      store: The records.
      buffers: What goes round.
      key: The records in their order, whether they are read, and the generation of the store.
      threads: Number of readers, and of writers.

    Attributes:
      key: The same.
      is_fresh: Whether it has begun to read, and nobody has taken what it read. Another pass is of no use any more:
        Ctrl-C may have ended its start, its visits or its end.
    """

    def __init__(
        self, store: Store, buffers: Sequence[np.ndarray], key: tuple[tuple[int, ...], bool, int], threads: int
    ) -> None:
        self.key, self.is_fresh = key, False
        self._store = store
        self._order, self._reads, _ = key
        self._positions = iter(range(len(self._order)))
        self._taking = threading.Lock()
        self._free: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[int, np.ndarray] | None] = queue.SimpleQueue()  # position, whole buffer
        self._visited: queue.SimpleQueue[_Visited | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._stopped = False
        self._begun: list[None] = []  # one entry per thread: to append is one step, which Ctrl-C cannot divide
        self._ended: list[None] = []
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes who waits for an end
        for buffer in buffers:
            self._free.put(buffer)
        # Daemons: reading ahead must not keep a program from ending, and an unfinished pass is of no use after it.
        self._threads = [
            threading.Thread(target=self._until_end, args=(work,), name=f"jzero disk {number}", daemon=True)
            for work in (self._read_records, self._write_records)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Starts to read."""
        for thread in self._threads:
            thread.start()
        self.is_fresh = True

    def visit_all(self, visit: Visit, writes: bool) -> float:
        """Visits the records and waits for the writers; returns the seconds waited."""
        self.is_fresh = False
        waited = 0.0
        early: dict[int, np.ndarray] = {}  # by position
        for position, record in enumerate(self._order):
            started = time.perf_counter()
            while position not in early:
                early.update([self._next_arrived()])
            waited += time.perf_counter() - started
            buffer = early.pop(position)
            finish = visit(record, buffer[: self._store.sizes[record]])
            self._visited.put(_Visited(record, buffer, finish, writes))
        started = time.perf_counter()
        for _ in self._threads:
            self._visited.put(None)
        self._wait_for_ends(self._threads)
        self._raise_first()
        return waited + time.perf_counter() - started

    def stop(self) -> None:
        """Tells the threads to begin nothing more."""
        self.is_fresh, self._stopped = False, True
        for _ in self._threads:  # they may wait for something
            self._free.put(None)
            self._visited.put(None)

    def end(self) -> None:
        """Stops, and waits until nothing is under way."""
        self.stop()
        self._wait_for_ends(self._begun)  # one that begins later finds the pass stopped
        self._errors.clear()  # their tracebacks lead to this pass, which would keep its store until a collection

    def _until_end(self, work: Callable[[], None]) -> None:
        """Is what each thread runs."""
        self._begun.append(None)
        try:
            work()
        finally:
            self._ended.append(None)
            self._ends.put(None)

    def _wait_for_ends(self, of: Sequence[object]) -> None:
        """Waits until as many threads have ended as there are entries."""
        while len(self._ended) < len(of):
            with contextlib.suppress(queue.Empty):
                self._ends.get(timeout=WAKE_S)
        for thread in self._threads:
            if thread.is_alive():  # it does nothing any more, but still refers to the store
                thread.join()

    def _next_arrived(self) -> tuple[int, np.ndarray]:
        arrived = self._arrived.get()
        self._raise_first()
        assert arrived is not None
        return arrived

    def _raise_first(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _read_records(self) -> None:
        while (taken := self._take()) is not None:
            position, buffer = taken
            record = self._order[position]
            try:
                if self._reads:
                    self._store.read(record, buffer[: self._store.sizes[record]])
            except BaseException as error:
                self._fail(error)
                break
            self._arrived.put(taken)

    def _take(self) -> tuple[int, np.ndarray] | None:
        """Returns the next position and a buffer for it, together, so that no later record takes the last buffer."""
        with self._taking:
            position = next(self._positions, None)
            buffer = None if position is None else self._free.get()
        return None if position is None or buffer is None or self._stopped else (position, buffer)

    def _write_records(self) -> None:
        while (visited := self._visited.get()) is not None and not self._stopped:
            try:
                self._finish(visited)
            except BaseException as error:
                self._fail(error)
                break

    def _finish(self, visited: _Visited) -> None:
        """Does what remains to be done for a record, and frees its buffer."""
        used = visited.buffer[: self._store.sizes[visited.record]]
        if visited.finish is not None:
            visited.finish(used)
        if visited.writes:
            self._store.write(visited.record, used)
        self._free.put(visited.buffer)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._arrived.put(None)  # wakes the calling thread
