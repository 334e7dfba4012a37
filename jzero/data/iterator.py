"""The iterator over a loader's batches, with its position."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeAlias

import grain

from jzero.core.config.settings import check, integer
from jzero.data.pipeline import BatchPipeline
from jzero.data.position import Position

PyTree = Any
Batches: TypeAlias = grain.DatasetIterator[tuple[PyTree, Position]]


class LoaderIterator:
    """The batches of a `Loader`, one after another, with the position of the last one returned.

    Batches made ahead do not count. If the source raises, the `next` that needed the example raises its error, with the
    index in a note; the position does not move, so another `next` tries again.

    Example:
      >>> loader = jzero.data.make_loader([{"x": i} for i in range(20)], batch_size=8)
      >>> with iter(loader) as batches:
      ...     _ = next(batches)
      ...     batches.get_state()["example"]
      8
    """

    def __init__(self, pipeline: BatchPipeline) -> None:
        self._pipeline = pipeline
        self._position = Position()
        self._ahead: list[Batches] = []  # at most one, while batches are made ahead
        self._closed = False
        # Also if a loop drops this iterator, and at the end of a program that does not close it.
        weakref.finalize(self, _close, self._ahead)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> PyTree:
        if self._closed:
            raise ValueError("This iterator is closed. Make another one: `iter(loader)`.")
        if not self._ahead:
            self._ahead.append(self._pipeline.batches_from(self._position))
        try:
            batch, self._position = next(self._ahead[0])
        except BaseException:  # also at the end: the threads have nothing left to do
            _close(self._ahead)
            raise
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position: finished epochs, examples returned from this one, and the identity of the source.

        It is the same in all processes, small, and data for JSON; `CheckpointManager.save` takes the iterator as
        `data_iterator`.
        """
        return {**dataclasses.asdict(self._position), **self._pipeline.identity()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position, which may come from a run with other processes, another mesh or another batch size.

        Args:
          state: A result of `get_state`.

        Raises:
          ValueError: It is not a position, or one in another source or order.
          TypeError: It is not a dictionary.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"`state` must be a position, which `get_state` returns, a dictionary: got {state!r:.200}.")
        mine, missing = self._pipeline.identity(), {"epoch", "example"} - state.keys()
        if missing:
            raise ValueError(f"This is no position of a loader: it has no {sorted(missing)}, only {sorted(state)}.")
        names = [name for name in mine if state.get(name) != mine[name]]
        if names:
            rows = [f"  {name}: saved {state.get(name)!r}, here {mine[name]!r}" for name in names]
            raise ValueError(
                "The saved position is of other data, so that examples would be repeated or left out:\n"
                + "\n".join(rows)
                + "\nMake the loader as it was, or restore without `data_iterator` to start from the beginning."
            )
        epoch, example = (check(f"state[{name!r}]", state[name], integer(0)) for name in ("epoch", "example"))
        _close(self._ahead)
        self._position = Position(epoch, example)

    def close(self) -> None:
        """Drops the batches made ahead and ends the threads; nothing more can be read."""
        _close(self._ahead)
        self._closed = True

    def __enter__(self) -> LoaderIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _close(ahead: list[Batches]) -> None:
    # Drop the iterator, too: Grain's iterators over processes complain if they outlive its modules at exit.
    while ahead:
        ahead.pop().close()
