"""The order of examples in an epoch, which depends only on the seed and the epoch."""

from __future__ import annotations

import dataclasses
import functools

import grain
import numpy as np

MAX_SHUFFLED = 2**32 - 1
"""Most examples that Grain can permute: it computes in 32 bits, and wraps beyond."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """A permutation of the examples for each epoch, computed place by place; nothing is stored.

    With a window, examples are shuffled within windows of that many neighbors, and the windows among themselves. The
    last window, if smaller, stays last.

    Attributes:
      num_examples: Number of examples, at least one.
      seed: Seed of the permutations.
      shuffle: Whether examples are permuted.
      window: Size of the windows; `None` to shuffle over all examples.
    """

    num_examples: int
    seed: int
    shuffle: bool
    window: int | None = None

    def example(self, epoch: int, place: int) -> int:
        """Returns the index of the example at a place of an epoch's order."""
        if not self.shuffle:
            return place
        if self.window is None or self.window >= self.num_examples:
            return _permute(place, self.num_examples, (self.seed, epoch))
        number, offset = divmod(place, self.window)
        num_full, size = self.num_examples // self.window, self.window
        if number < num_full:
            number = _permute(number, num_full, (self.seed, epoch))
        else:
            size = self.num_examples % self.window
        return number * self.window + _permute(offset, size, (self.seed, epoch, number))


# Grain is slower the fewer numbers it permutes, milliseconds for a few windows, and these are needed again and again.
@functools.lru_cache(maxsize=4096)
def _permute(place: int, size: int, seeds: tuple[int, ...]) -> int:
    return int(grain.experimental.index_shuffle(place, max_index=size - 1, seed=_mix(seeds), rounds=4))


@functools.lru_cache(maxsize=4096)
def _mix(seeds: tuple[int, ...]) -> int:
    # Mixed, not added: with Grain's own seed + epoch, runs with the seeds 0 and 1 would share all epochs but one.
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])
