"""Many files as one source of examples, with the same numbers in every process."""

from __future__ import annotations

import bisect
import functools
import hashlib
import heapq
import json
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.core.config.settings import check, integer
from jzero.core.processes.exchange import exchange


class FileSource:
    """The examples of many files, numbered consecutively; for `make_loader`, or for Grain.

    Put the files on storage that every process can read. Each process counts the examples of some files, once, and
    shares its counts, so that all processes know the same order and end an epoch together. A file is opened when one of
    its examples is first needed. Each process must make the source, at the same point.

    Args:
      paths: The files. Processes may name all of them or a part each: if lists differ, the source is their union,
        sorted by path.
      open_file: Opens a file as a sequence of examples: something with `__len__` and `__getitem__`, such as a memory
        map, safe to read from several threads.
      read: Instead of `open_file`, for formats without random access: yields the examples of a file, in the same
        order each time. Such files are read in order, without shuffling.
      counts: Known counts of examples by path, such as `dict(zip(source.paths, source.counts))` of an earlier run. Only
        other files are counted.
      interleave: How many files to read side by side: their examples take turns. With the batch size here, and without
        shuffling, each row of a batch comes from its own chain of files, so a process reads only the files of its rows,
        until the first chain ends.
      max_open_files: Most files that a process keeps open; it closes the least recently used one first.

    Attributes:
      paths: The files, in order.
      counts: Examples of each.
      sequential: Whether the files can only be read from their start.
      fingerprint: A digest of names, counts and interleaving, which identifies this source in saved positions.

    Raises:
      ValueError: There are no files, no examples, a file cannot be counted, or an argument is impossible.

    Example:
      >>> for name in "ab":
      ...     np.save(tmp / f"{name}.npy", np.arange(3))
      >>> source = jzero.data.FileSource(sorted(tmp.glob("*.npy")), open_file=np.load)
      >>> len(source), [int(x) for x in source]
      (6, [0, 1, 2, 0, 1, 2])
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        open_file: Callable[[str], Sequence[Any]] | None = None,
        read: Callable[[str], Iterable[Any]] | None = None,
        counts: Mapping[str, int] | None = None,
        interleave: int = 1,
        max_open_files: int = 256,
    ) -> None:
        interleave = check("interleave", interleave, integer(1))
        self._max_open_files = check("max_open_files", max_open_files, integer(1))
        self.sequential = read is not None
        self._open_file, self._count_file = _reader(open_file, read)
        self.paths = _unite([os.fspath(path) for path in paths])
        self.counts = self._count(counts or {})
        if not sum(self.counts):
            raise ValueError(f"The {len(self.paths)} files hold no examples: the first is {self.paths[0]!r}.")
        self.fingerprint = _fingerprint(self.paths, self.counts, interleave)
        self._lanes = Lanes(self.counts, interleave)
        self.__setstate__(self.__dict__)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_opened")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # in a worker, too: each process opens its own files
        self._lock = threading.Lock()
        self._opened = functools.lru_cache(maxsize=self._max_open_files)(self._open_file)

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: int) -> Any:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} examples: got the index {index}.")
        file, number = self._lanes.locate(index)
        path = self.paths[file]
        try:
            with self._lock:  # so that two threads do not open the same file
                opened = self._opened(path)
            return opened[number]
        except IndexError as error:
            raise ValueError(
                f"{path!r} had {self.counts[file]} examples when they were counted, but example {number} is not "
                f"there now: {error}. Files must not change while they are read, nor from one run to the next."
            ) from error
        except Exception as error:
            error.add_note(f"This was example {number} of {path!r}.")
            raise

    def _count(self, counts: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the number of examples of each file; the processes share the counting of unknown ones."""
        unknown = [path for path in self.paths if path not in counts]
        mine = unknown[jax.process_index() :: jax.process_count()]
        answers = exchange(lambda: [(path, self._count_one(path)) for path in mine])
        counted = {path: count for answer in answers for path, count in answer}
        return tuple(int(counts[path]) if path in counts else counted[path] for path in self.paths)

    def _count_one(self, path: str) -> int:
        try:
            return self._count_file(path)
        except Exception as error:
            raise ValueError(
                f"{path!r} could not be counted: {type(error).__name__}: {error}. Every file must be readable by every "
                "process: put them on storage that all share."
            ) from error


def _reader(
    open_file: Callable[[str], Any] | None, read: Callable[[str], Iterable[Any]] | None
) -> tuple[Callable[[str], Any], Callable[[str], int]]:
    """Returns how to open a file as a sequence, and how to count its examples."""
    if open_file is not None and read is None:
        return open_file, lambda path: len(open_file(path))
    if read is not None and open_file is None:
        return functools.partial(SequentialFile, read), lambda path: sum(1 for _ in read(path))
    raise ValueError("Say how to read a file: either `open_file` (random access) or `read` (from its start).")


def _unite(paths: list[str]) -> tuple[str, ...]:
    """Returns the files of all processes; in the given order, if all processes gave the same."""
    digests = exchange(lambda: hashlib.sha256(json.dumps(paths).encode()).hexdigest())
    if any(digest != digests[0] for digest in digests):
        paths = sorted({path for some in exchange(lambda: paths) for path in some})
    if not paths:
        raise ValueError("`paths` is empty: there must be at least one file.")
    twice = [path for path, after in zip(sorted(paths), sorted(paths)[1:], strict=False) if path == after]
    if twice:
        raise ValueError(f"`paths` names {twice[0]!r} twice, so its examples would be seen twice in an epoch.")
    return tuple(paths)


def _fingerprint(paths: Sequence[str], counts: Sequence[int], interleave: int) -> str:
    # Only the names, since the folder may be elsewhere on another machine.
    files = [[os.path.basename(path), count] for path, count in zip(paths, counts, strict=True)]
    return hashlib.sha256(json.dumps([files, interleave]).encode()).hexdigest()[:16]


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


class Lanes:
    """Files dealt out to lanes that take turns: the first example of each lane, then the second of each, and so on.

    A lane is a chain of files; each file goes to the lane that is shortest so far. A lane that has ended is skipped.

    Args:
      counts: Examples of each file.
      num_lanes: Number of lanes; with one, the files follow each other.
    """

    def __init__(self, counts: Sequence[int], num_lanes: int) -> None:
        lengths = [(0, lane) for lane in range(num_lanes)]
        self._files: list[list[int]] = [[] for _ in range(num_lanes)]
        self._starts: list[list[int]] = [[] for _ in range(num_lanes)]
        for file, count in enumerate(counts):
            length, lane = lengths[0]
            heapq.heapreplace(lengths, (length + count, lane))
            self._files[lane].append(file)
            self._starts[lane].append(length)
        self._lengths = np.zeros(num_lanes, np.int64)
        for length, lane in lengths:
            self._lengths[lane] = length
        # Between two of these rounds the same lanes take part; `_before` counts the examples before each.
        self._rounds = np.unique(np.append(self._lengths, 0))
        self._before = [int(np.minimum(self._lengths, number).sum()) for number in self._rounds]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the file that holds an example, and the example's number in that file."""
        phase = bisect.bisect_right(self._before, index) - 1
        first = int(self._rounds[phase])
        taking_part = np.flatnonzero(self._lengths > first)
        further, turn = divmod(index - self._before[phase], len(taking_part))
        lane, place = int(taking_part[turn]), first + further
        # If several files start at the same place, all but the last are empty.
        number = bisect.bisect_right(self._starts[lane], place) - 1
        return self._files[lane][number], place - self._starts[lane][number]
