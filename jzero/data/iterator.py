"""How far the batches of a loader have been handed out."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeAlias

import grain

from jzero.config.settings import check, whole
from jzero.data.pipeline import Pipeline
from jzero.data.position import Position

__all__ = ["LoaderIterator"]

PyTree = Any
Batches: TypeAlias = grain.DatasetIterator[tuple[PyTree, Position]]


class LoaderIterator:
    """The batches of a `Loader`, one after the other, and how far they have been handed out.

    What was made ahead does not count as handed out. An error of the source is raised by the `next` that needed the
    example, with its index in a note; the position stays, so a further `next` tries again.

    Example:
      >>> loader = jzero.data.make_loader([{"x": i} for i in range(20)], batch_size=8)
      >>> with iter(loader) as batches:
      ...     _ = next(batches)
      ...     batches.get_state()["example"]
      8
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._position = Position()
        self._ahead: list[Batches] = []  # one at most, while batches are made ahead
        self._closed = False
        # Also when a loop leaves this iterator behind, and at the end of a program that does not close it.
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
        except BaseException:  # the end included: nothing is left for the threads
            _close(self._ahead)
            raise
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position: epochs that are through, examples handed out of this one, and what they are of.

        It is the same in all processes, small, and what JSON can hold; `CheckpointManager.save` takes the iterator as
        `data_iterator`.
        """
        return {**dataclasses.asdict(self._position), **self._pipeline.identity()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position, which may come from a run with other processes, another mesh or another batch size.

        Args:
          state: What `get_state` returned.

        Raises:
          ValueError: It is a position in another source or another order, or none.
          TypeError: It is no dictionary.
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
        epoch, example = (check(f"state[{name!r}]", state[name], whole(0)) for name in ("epoch", "example"))
        _close(self._ahead)
        self._position = Position(epoch, example)

    def close(self) -> None:
        """Drops what was made ahead and ends the threads; nothing more can be read."""
        _close(self._ahead)
        self._closed = True

    def __enter__(self) -> LoaderIterator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _close(ahead: list[Batches]) -> None:
    # Dropped, too: Grain's iterators over processes say so if they outlive its modules at the end of a program.
    while ahead:
        ahead.pop().close()
