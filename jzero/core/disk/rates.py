"""Measures the rates of a disk alone: of reads, of writes, and of both at once.

    measure_rates(folder, num_bytes) -> tuple[DiskRates, tuple[str, ...]]

Nothing is computed and nothing waits for anything else, so no `Pipeline` can be faster for long. Rates for both
directions at once are what counts: an update reads and writes as many bytes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jzero.core.disk.files import PAGE, UnnamedFile, page_aligned

BLOCK = 16 * 2**20
"""Bytes of one request, as many as a record of `Offload.chunk_bytes` has by default."""

DIRECTIONS = ((True, False), (False, True), (True, True))  # read, write


@dataclasses.dataclass(frozen=True)
class DiskRates:
    """Rates of a disk, bytes per second.

    Attributes:
      num_bytes: How many bytes were moved in each direction.
      read: Reads alone.
      write: Writes alone.
      duplex: Both at once, in each direction.
    """

    num_bytes: int
    read: float
    write: float
    duplex: float


class PlainFiles:
    """Two files of random bytes, of which one is read and the other written, several blocks at a time.

    Args:
      folder: Where, as `check_folder` returns it.
      num_bytes: Size of each, a multiple of 4096.
      threads: How many blocks are read at a time, and how many written.
      block: Bytes of a block, likewise.

    Attributes:
      fallbacks: What the file system cannot do, see `UnnamedFile`.

    Raises:
      DiskError: There is too little space.
    """

    def __init__(self, folder: str, num_bytes: int, *, threads: int = 2, block: int = BLOCK) -> None:
        self._num_bytes, self._block, self._threads = num_bytes, block, threads
        self._source, self._target = UnnamedFile(folder, num_bytes), UnnamedFile(folder, num_bytes)
        self.fallbacks = self._source.fallbacks
        self._buffers = [page_aligned(min(block, num_bytes)) for _ in range(2 * threads)]
        for buffer in self._buffers:  # random, since file systems may compress
            buffer[:] = np.random.default_rng(0).integers(256, size=buffer.size, dtype=np.uint8)
        # A first write also allocates the space, and reads of unwritten space would not touch the disk.
        for file in (self._source, self._target):
            self._run([(file.write, self._buffers)])

    def seconds(self, *, read: bool, write: bool) -> float:
        """Returns the seconds to move all bytes once in the given directions, at once if both."""
        # Only readers fill buffers, so writers write random bytes.
        reads, writes = self._buffers[: self._threads], self._buffers[self._threads :]
        return self._run([(self._source.read, reads)] * read + [(self._target.write, writes)] * write)

    def close(self) -> None:
        """Gives the space back."""
        self._source.close()
        self._target.close()

    def _run(self, jobs: list[tuple[Callable[[np.ndarray, int], None], list[np.ndarray]]]) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(2 * self._threads) as pool:
            moves = []
            for call, buffers in jobs:
                offsets = iter(range(0, self._num_bytes, self._block))
                moves += [pool.submit(self._move, call, offsets, buffer) for buffer in buffers]
        seconds = time.perf_counter() - started
        for move in moves:
            move.result()
        return seconds

    def _move(self, call: Callable[[np.ndarray, int], None], offsets: Iterator[int], buffer: np.ndarray) -> None:
        for offset in offsets:
            call(buffer[: self._num_bytes - offset], offset)


def measure_rates(folder: str, num_bytes: int) -> tuple[DiskRates, tuple[str, ...]]:
    """Measures a disk, in about five times the time of one read or write of all bytes.

    Args:
      folder: Where, as `check_folder` returns it.
      num_bytes: Space to take meanwhile; half of it is moved in each direction.

    Returns:
      The rates, and what the file system cannot do, see `UnnamedFile`.

    Raises:
      DiskError: There is too little space.
    """
    moved = max(num_bytes // 2 // PAGE, 1) * PAGE
    plain = PlainFiles(folder, moved)
    try:
        rates = [moved / plain.seconds(read=read, write=write) for read, write in DIRECTIONS]
    finally:
        plain.close()
    return DiskRates(moved, *rates), plain.fallbacks
