"""Records of bytes in two slots: reads of one state, and writes of the next.

    DiskStore(folder, sizes, heads, *, checksum)

[Note: Two slots]
A step reads records from one slot and writes them to the other; `commit` exchanges the slots once all are written.
Until then the old state is whole, so after an error, or Ctrl-C, the step can be repeated or the state saved. A save
that runs beside training pins its slot: the next step writes the other one and may commit; the step after it, which
would write the pinned slot, waits in `begin`. The price is the space, twice.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import itertools
import threading
import time
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jzero.core.disk.files import PAGE, DiskError, UnnamedFile, free_bytes


class Store(abc.ABC):
    """Records in two slots, see [Note: Two slots]. Before they are first written they are zeros.

    Threads may read and write records at once; `begin` and `commit` belong to the one thread that drives steps.

    Args:
      sizes: Bytes of each record, multiples of 4096.
      heads: How many bytes at the beginning of each record can be read without the rest, likewise; none by default.

    Attributes:
      offsets: Where each record begins in a slot.
      num_bytes: Bytes of one slot.
      slot: The current slot, 0 or 1.
      generation: How often `commit` was called.
    """

    num_slots: int = 2

    def __init__(self, sizes: Sequence[int], heads: Sequence[int] = ()) -> None:
        self.sizes, self.heads = tuple(sizes), tuple(heads) or (0,) * len(sizes)
        assert all(
            size > 0 and size % PAGE == head % PAGE == 0 for size, head in zip(self.sizes, self.heads, strict=True)
        )
        *self.offsets, self.num_bytes = itertools.accumulate(self.sizes, initial=0)
        self.slot = self.generation = 0
        self._pins: collections.Counter[int] = collections.Counter()  # by slot
        self._unpinned = threading.Condition()  # reentrant: a pin may end by garbage collection, at any line

    @abc.abstractmethod
    def read(self, record: int, buffer: np.ndarray, *, slot: int | None = None) -> None:
        """Reads a record.

        Args:
          record: Its number.
          buffer: Where to, uint8 `[sizes[record]]` or, for its head alone, `[heads[record]]`; page-aligned.
          slot: By default the current one.

        Raises:
          DiskError: The disk fails, or returns other bytes than were written.
        """

    @abc.abstractmethod
    def write(self, record: int, buffer: np.ndarray) -> None:
        """Writes a record into the slot that is not current.

        Args:
          record: Its number.
          buffer: Where from, uint8 `[sizes[record]]`, page-aligned.

        Raises:
          DiskError: The disk fails, or is full.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives all space back. Nothing may be under way."""

    @property
    def next_slot(self) -> int:
        """The slot that a step writes."""
        return (self.slot + 1) % self.num_slots

    def check_whole(self) -> None:
        """Raises a `DiskError` if the current slot is no state, since an update was interrupted."""
        return  # one slot is always whole

    def begin(self) -> None:
        """Waits until the slot to write is unpinned. Call it before the writes of a step."""
        with self._unpinned:
            self._unpinned.wait_for(lambda: not self._pins[self.next_slot])

    def commit(self) -> None:
        """Makes what was written current. All records must have been."""
        with self._unpinned:
            self.slot, self.generation = self.next_slot, self.generation + 1

    def pin(self) -> Pin:
        """Returns the current generation, which keeps its bytes until it is released: for a `with` statement."""
        with self._unpinned:
            self._pins[self.slot] += 1
            return Pin(self, self.slot, self.generation)

    def wait_for_pins(self) -> None:
        """Waits until nothing is pinned, so that `close` interrupts no reader."""
        with self._unpinned:
            self._unpinned.wait_for(lambda: not any(self._pins.values()))

    def _unpin(self, slot: int) -> None:
        with self._unpinned:
            self._pins[slot] -= 1
            self._unpinned.notify_all()


class Pin:
    """A generation of a store, which can be read until `release`, or the end of the last reference."""

    def __init__(self, store: Store, slot: int, generation: int) -> None:
        self._store, self._slot, self.generation = store, slot, generation
        self._release = weakref.finalize(self, store._unpin, slot)
        self._release.atexit = False

    def read(self, record: int, buffer: np.ndarray) -> None:
        """Reads a record of this generation, see `Store.read`."""
        assert self._release.alive, "read after release"
        self._store.read(record, buffer, slot=self._slot)

    def release(self) -> None:
        """Lets later steps write over this generation. Any thread may call it, and more than once."""
        self._release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: types.TracebackType | None
    ) -> None:
        self.release()


class RamStore(Store):
    """Records in memory.

    Args:
      sizes: Bytes of each record, multiples of 4096.
      num_slots: 2, or 1 to save the memory: then a step replaces what it reads, and until `commit` there is no state.
    """

    def __init__(self, sizes: Sequence[int], num_slots: int = 2) -> None:
        super().__init__(sizes)
        self.num_slots = num_slots
        self._slots = [np.zeros(self.num_bytes, np.uint8) for _ in range(num_slots)]
        self._is_torn = False

    def begin(self) -> None:
        """Waits until the slot to write is unpinned, see `Store.begin`."""
        super().begin()
        self._is_torn = self.num_slots == 1

    def commit(self) -> None:
        """Makes what was written current, see `Store.commit`."""
        super().commit()
        self._is_torn = False

    def check_whole(self) -> None:
        """Raises if an update was interrupted, see `Store.check_whole`."""
        if self._is_torn:
            raise DiskError(
                "An update of optimizer state in the host's memory was interrupted, so some of it is new and some old: "
                "restore a checkpoint."
            )

    def read(self, record: int, buffer: np.ndarray, *, slot: int | None = None) -> None:
        """Copies a record into a buffer, see `Store.read`."""
        buffer[:] = self._bytes(record, self.slot if slot is None else slot)[: buffer.size]

    def write(self, record: int, buffer: np.ndarray) -> None:
        """Copies a buffer into a record of the next slot, see `Store.write`."""
        self._bytes(record, self.next_slot)[:] = buffer

    def close(self) -> None:
        """Gives the memory back."""
        self._slots = []

    def _bytes(self, record: int, slot: int) -> np.ndarray:
        return self._slots[slot][self.offsets[record] :][: self.sizes[record]]


class CopyingStore(Store):
    """Reads the records of one store, and writes those of another one: a step on a copy.

    Args:
      source: Where records are read. It stays as it is.
      target: Where they are written, with records of the same sizes.
    """

    def __init__(self, source: Store, target: Store) -> None:
        super().__init__(source.sizes)
        self._source, self._target = source, target

    def begin(self) -> None:
        """Prepares the target, see `Store.begin`."""
        self._target.begin()

    def commit(self) -> None:
        """Makes what was written current in the target, see `Store.commit`."""
        self._target.commit()

    def read(self, record: int, buffer: np.ndarray, *, slot: int | None = None) -> None:
        """Reads a record of the source, see `Store.read`."""
        self._source.read(record, buffer, slot=slot)

    def write(self, record: int, buffer: np.ndarray) -> None:
        """Writes a record of the target, see `Store.write`."""
        self._target.write(record, buffer)

    def close(self) -> None:
        """Does nothing: the two stores belong to others."""


class IoStats(NamedTuple):
    """Traffic of a store since it was made.

    Attributes:
      read_seconds: Seconds in which at least one read was under way, so that their quotient is a rate.
      write_seconds: Likewise.
    """

    read_bytes: int
    read_seconds: float
    written_bytes: int
    write_seconds: float


class DiskStore(Store):
    """Records in two unnamed files, see [Note: Unnamed files] in `jzero.core.disk.files`.

    Args:
      folder: Where, as `check_folder` returns it.
      sizes: Bytes of each record, multiples of 4096.
      heads: As for `Store`.
      checksum: Whether to compare what is read with what was written. The sums, of the 64-bit words of a record modulo
        2^64, are in memory. They find flipped bits and blocks that are torn, lost or old, but not exchanged words.

    Raises:
      DiskError: There is too little space, or no file can be made.
    """

    def __init__(self, folder: str, sizes: Sequence[int], heads: Sequence[int] = (), *, checksum: bool = True) -> None:
        super().__init__(sizes, heads)
        self.folder = folder
        # By slot and record: of its head, and of all of it. New files are zeros.
        self._sums = [[(0, 0)] * len(sizes) for _ in range(2)] if checksum else None
        self._reads, self._writes = _Meter(), _Meter()
        self._files: list[UnnamedFile] = []
        needed, free = 2 * self.num_bytes, free_bytes(folder)
        if needed > free:
            raise DiskError(
                f"{folder} is too small for the optimizer state: two slots of {self.num_bytes:,} bytes take "
                f"{needed:,}, and {free:,} are free. Free some, or choose another folder."
            )
        try:
            for _ in range(2):
                self._files.append(UnnamedFile(folder, self.num_bytes))
        except BaseException:
            self.close()  # the first file would live as long as the error's traceback
            raise

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What the file system cannot do, with its reason, see `UnnamedFile`."""
        return self._files[0].fallbacks if self._files else ()

    @property
    def stats(self) -> IoStats:
        """The traffic so far."""
        return IoStats(self._reads.num_bytes, self._reads.seconds, self._writes.num_bytes, self._writes.seconds)

    def read(self, record: int, buffer: np.ndarray, *, slot: int | None = None) -> None:
        """Reads a record and compares its checksum, see `Store.read`."""
        slot = self.slot if slot is None else slot
        with self._reads.count(buffer.size):
            self._files[slot].read(buffer, self.offsets[record])
        is_whole = buffer.size == self.sizes[record]
        if self._sums is not None and _sum(buffer) != self._sums[slot][record][is_whole]:
            raise DiskError(
                f"Record {record} in {self.folder} is not what was written there: the checksum of its {buffer.size:,} "
                f"bytes at {self.offsets[record]:,} differs. Do not train on: restore a checkpoint, and check the disk."
            )

    def write(self, record: int, buffer: np.ndarray) -> None:
        """Writes a record and keeps its checksum, see `Store.write`."""
        slot = self.next_slot
        if self._sums is not None:
            head = _sum(buffer[: self.heads[record]])
            self._sums[slot][record] = head, (head + _sum(buffer[self.heads[record] :])) % 2**64
        with self._writes.count(self.sizes[record]):
            self._files[slot].write(buffer, self.offsets[record])

    def close(self) -> None:
        """Gives the space back."""
        for file in self._files:
            file.close()


class _Meter:
    """Bytes moved by calls that overlap, and the seconds in which any was under way."""

    def __init__(self) -> None:
        self.num_bytes, self.seconds = 0, 0.0
        self._lock, self._under_way, self._since = threading.Lock(), 0, 0.0

    @contextlib.contextmanager
    def count(self, num_bytes: int) -> Iterator[None]:
        """Counts a call; the bytes only if it succeeds."""
        with self._lock:
            self._since = self._since if self._under_way else time.perf_counter()
            self._under_way += 1
        moved = 0
        try:
            yield
            moved = num_bytes
        finally:
            with self._lock:
                self._under_way -= 1
                self.num_bytes += moved
                self.seconds += 0.0 if self._under_way else time.perf_counter() - self._since


def _sum(buffer: np.ndarray) -> int:
    return int(np.add.reduce(buffer.view(np.uint64)))
