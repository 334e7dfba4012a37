"""Where an epoch is cut into batches, and how far training has come: arithmetic alone."""

from __future__ import annotations

import dataclasses

__all__ = ["Position", "Schedule", "Span"]


@dataclasses.dataclass(frozen=True)
class Position:
    """How far training has come, in examples, so that another batch size can go on from there.

    Attributes:
      epoch: Number of epochs that are through.
      example: How many places of this epoch's order have been handed out.
    """

    epoch: int = 0
    example: int = 0


@dataclasses.dataclass(frozen=True)
class Span:
    """The places `[start, stop)` of an epoch's order that make up one batch; fewer than its rows in a remainder."""

    epoch: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Epochs cut into batches. No batch spans two epochs.

    Attributes:
      num_examples: Examples of an epoch.
      batch_size: Rows of a batch.
      num_epochs: How many epochs; `None` for no end.
      drop_remainder: Whether the examples that do not fill a batch are left out; else it is padded.
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
        """Returns how many batches are left from a position on; `None` if there is no end."""
        if self.num_epochs is None:
            return None
        if start.epoch >= self.num_epochs:
            return 0
        whole = self.num_epochs - start.epoch - 1
        return self._num_batches(self.num_examples - start.example) + whole * self.batches_per_epoch

    def span(self, number: int, start: Position) -> Span:
        """Returns the places of the `number`-th batch from a position on."""
        epoch, first = start.epoch, start.example + number * self.batch_size
        left = self._num_batches(self.num_examples - start.example)
        if number >= left:
            further, number = divmod(number - left, self.batches_per_epoch)
            epoch, first = epoch + 1 + further, number * self.batch_size
        return Span(epoch, first, min(first + self.batch_size, self.num_examples))

    def after(self, span: Span) -> Position:
        """Returns the position once a batch has been handed out."""
        if self._num_batches(self.num_examples - span.stop):
            return Position(span.epoch, span.stop)
        return Position(span.epoch + 1, 0)

    def _num_batches(self, num_examples: int) -> int:
        return num_examples // self.batch_size if self.drop_remainder else -(-num_examples // self.batch_size)
