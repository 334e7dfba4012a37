"""Global batches from a source of examples: each process loads its own rows, ahead of the steps that need them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jzero.core.config.settings import check, integer, optional
from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.mesh import make_mesh
from jzero.core.processes.agree import agree
from jzero.data.iterator import LoaderIterator
from jzero.data.pipeline import BatchPipeline, OrderedExamples, local_rows
from jzero.data.position import MAX_SHUFFLED, BatchSchedule, EpochOrder, Position


def make_loader(
    source: Any,
    *,
    batch_size: int,
    mesh: Mesh | None = None,
    axis: str = "data",
    replica_axis: str | None = None,
    node_axis: str | None = None,
    num_epochs: int | None = 1,
    shuffle: bool = False,
    shuffle_window: int | None = None,
    seed: int = 0,
    transform: Callable[[Any, np.random.Generator], Any] | None = None,
    drop_remainder: bool = False,
    prefetch: int = 2,
    num_workers: int = 0,
) -> Loader:
    """Returns an iterable of global batches, laid out as ZeRO's steps expect them.

    Each batch takes the next `batch_size` examples of the epoch's order, which depends only on `seed` and the epoch.
    Each process loads the rows of its own devices. Copies of example 0 with weight 0 fill the last batch of an epoch.
    So all processes make the same batches, however many processes there are. Each process must call this, with equal
    arguments.

    Args:
      source: The examples: anything with `__len__` and `__getitem__`, safe to read from several threads, such as a
        list, a Grain data source, a `grain.MapDataset` or a `FileSource`. An example is a dict (it may be nested) of
        arrays and numbers, of equal shapes and dtypes.
      batch_size: Rows of all processes together; a multiple of the devices that share a batch (times
        `accumulate_steps`, if the step has micro-batches).
      mesh: The mesh of the train state. By default all devices on one axis, as everywhere.
      axis: As in `ZeroConfig`.
      replica_axis: As in `ZeroConfig`.
      node_axis: As in `ZeroConfig`.
      num_epochs: How often to go through the source; `None` for no end.
      shuffle: Whether to shuffle, differently in each epoch.
      shuffle_window: Shuffle within windows of that many neighbors, and then the windows, so that the examples of a
        batch are in few files. Use a few thousand or more: Grain's permutation is slow for fewer. `None` to shuffle
        over all examples.
      seed: Seed of the order and of `transform`.
      transform: Turns what the source returns into an example: `transform(x, rng)`. The numbers of `rng` depend on
        `seed`, the epoch and the index of the example; do not keep `rng`.
      drop_remainder: Whether to drop the examples of an epoch that do not fill a batch, instead of padding.
      prefetch: How many batches to make ahead, on the devices, each in its own thread; 0 for none.
      num_workers: Load batches in this many processes instead of threads, for a slow `transform` in Python. They are
        Grain's, and get copies of the source; a script needs `if __name__ == "__main__":`. Each makes at least one
        batch ahead, in host memory.

    Returns:
      A `Loader`; each `iter` of it starts at the beginning. A batch has the keys of the examples, each leaf
      `[batch_size, ...]`, and `weights`, float32 `[batch_size]`: 1 for an example, 0 for padding. 64-bit numbers become
      32-bit ones, unless jax enables 64.

    Raises:
      ValueError: The source is empty, too long to shuffle, or its examples have a key `weights`; `batch_size` cannot be
        divided evenly; an argument is impossible, or differs between processes.
      TypeError: Examples are not dicts, or hold text or objects; the message names the leaves.

    Example:
      >>> source = [{"x": np.full(3, i)} for i in range(20)]
      >>> loader = jzero.data.make_loader(source, batch_size=16)
      >>> [(batch["x"].shape, int(batch["weights"].sum())) for batch in loader]
      [((16, 3), 16), ((16, 3), 4)]

    References:
      Grain's `ElasticIterator`, PyTorch's `DistributedSampler`.
    """
    mesh = make_mesh() if mesh is None else mesh

    def make() -> BatchPipeline:
        size = check("batch_size", batch_size, integer(1))
        epochs = check("num_epochs", num_epochs, optional(integer(1)))
        window = check("shuffle_window", shuffle_window, optional(integer(1)))
        start = check("seed", seed, integer(0))
        ahead = check("prefetch", prefetch, integer(0))
        workers = check("num_workers", num_workers, integer(0))
        if window is not None and not shuffle:
            raise ValueError(f"`shuffle_window={window}` means nothing without `shuffle=True`.")
        rows = local_rows(mesh, size, ZeroConfig(axis=axis, node_axis=node_axis, replica_axis=replica_axis))
        order = EpochOrder(num_examples=len(source), seed=start, shuffle=shuffle, window=window)
        schedule = BatchSchedule(
            num_examples=len(source), batch_size=size, num_epochs=epochs, drop_remainder=drop_remainder
        )
        _check_source(source, order, schedule)
        if getattr(source, "sequential", False):
            _check_sequential(order, workers)
        return BatchPipeline(OrderedExamples(source, transform, order), schedule, rows, ahead, workers)

    return Loader(agree("make_loader", mesh, make, lambda made: {"the data": made.description()}, wait_s=math.inf))


def _check_source(source: Any, order: EpochOrder, schedule: BatchSchedule) -> None:
    if not order.num_examples:
        raise ValueError("`source` is empty: there must be at least one example.")
    if order.num_examples == sys.maxsize:
        raise ValueError("`source` repeats itself without end: leave `.repeat()` out and set `num_epochs`.")
    if not schedule.batches_per_epoch:
        raise ValueError(
            f"`drop_remainder=True` would leave out all {order.num_examples} examples, which are fewer than "
            f"`batch_size={schedule.batch_size}`. Set it to False: the batch is then padded."
        )
    if order.shuffle and order.num_examples > MAX_SHUFFLED:
        raise ValueError(
            f"Grain shuffles up to {MAX_SHUFFLED} examples: `source` has {order.num_examples}. Make examples larger, "
            "or shuffle the files and set `shuffle=False`."
        )


def _check_sequential(order: EpochOrder, num_workers: int) -> None:
    if order.shuffle:
        raise ValueError(
            "Files that are read from their start cannot be shuffled by example: each would be read again for each of "
            "its examples. Shuffle `paths` and set `shuffle=False`; or, if a file fits in memory, open it whole, "
            "`FileSource(paths, open_file=lambda path: list(read(path)))`, and set a `shuffle_window`."
        )
    if num_workers:
        raise ValueError(
            f"`num_workers={num_workers}`: files that are read from their start would be read by each worker. Set it "
            "to 0, or give the files an `open_file`."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Loader:
    """Global batches of a source, see `make_loader`. Each `iter` starts at the beginning, or where you move it.

    `len(loader)` is the number of batches of all epochs.

    Example:
      >>> loader = jzero.data.make_loader([{"x": i} for i in range(20)], batch_size=8, num_epochs=2)
      >>> len(loader), loader.batches_per_epoch
      (6, 3)
    """

    _pipeline: BatchPipeline

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch."""
        return self._pipeline.schedule.batches_per_epoch

    @property
    def num_examples(self) -> int:
        """Number of examples of the source."""
        return self._pipeline.schedule.num_examples

    def __len__(self) -> int:
        total = self._pipeline.schedule.num_batches(Position())
        if total is None:
            raise TypeError("A loader with `num_epochs=None` has no length; see `batches_per_epoch`.")
        return total

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self._pipeline)
