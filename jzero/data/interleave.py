"""Files read side by side: the order in which lanes of unequal length take turns."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np


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
