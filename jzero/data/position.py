"""The split of epochs into batches, and positions in it. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import functools

import grain
import numpy as np


@dataclasses.dataclass(frozen=True)
class Position:
    """The progress of training, in examples, so that a run can resume with another batch size.

    Attributes:
      epoch: Number of finished epochs.
      example: Number of examples returned from this epoch.
    """

    epoch: int = 0
    example: int = 0


@dataclasses.dataclass(frozen=True)
class BatchSpan:
    """The places `[start, stop)` of an epoch's order that make up one batch; fewer than its rows in a remainder."""

    epoch: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Epochs split into batches. No batch spans two epochs.

    Attributes:
      num_examples: Examples of an epoch.
      batch_size: Rows of a batch.
      num_epochs: Number of epochs; `None` for no end.
      drop_remainder: Whether to drop the examples that do not fill a batch; otherwise it is padded.
    """

    num_examples: int
    batch_size: int
    num_epochs: int | None
    drop_remainder: bool

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch."""
        return self._num_batches(self.num_examples)

    def num_batches(self, start: Position) -> int | None:
        """Returns the number of batches after a position; `None` if there is no end."""
        if self.num_epochs is None:
            return None
        if start.epoch >= self.num_epochs:
            return 0
        full_epochs = self.num_epochs - start.epoch - 1
        return self._num_batches(self.num_examples - start.example) + full_epochs * self.batches_per_epoch

    def span(self, number: int, start: Position) -> BatchSpan:
        """Returns the places of the `number`-th batch after a position."""
        epoch, first = start.epoch, start.example + number * self.batch_size
        remaining = self._num_batches(self.num_examples - start.example)
        if number >= remaining:
            further, number = divmod(number - remaining, self.batches_per_epoch)
            epoch, first = epoch + 1 + further, number * self.batch_size
        return BatchSpan(epoch, first, min(first + self.batch_size, self.num_examples))

    def after(self, span: BatchSpan) -> Position:
        """Returns the position after a batch."""
        if self._num_batches(self.num_examples - span.stop):
            return Position(span.epoch, span.stop)
        return Position(span.epoch + 1, 0)

    def _num_batches(self, num_examples: int) -> int:
        return num_examples // self.batch_size if self.drop_remainder else -(-num_examples // self.batch_size)


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
