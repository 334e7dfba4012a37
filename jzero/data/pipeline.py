"""Makes batches: from indices of examples to global arrays, in threads or processes that work ahead."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.mesh import batch_axes, check_mesh, num_batch_shards
from jzero.data.examples import WEIGHTS, Example, ExampleSpec, example_spec, stack
from jzero.data.position import BatchSchedule, EpochOrder, Position

PyTree = Any


class OrderedExamples:
    """A source's examples by epoch and place, as leaves that can be stacked."""

    def __init__(self, source: Any, transform: Callable[..., Any] | None, order: EpochOrder) -> None:
        self.order = order
        self.fingerprint = str(getattr(source, "fingerprint", ""))
        self.sequential = bool(getattr(source, "sequential", False))
        if transform is not None:
            dataset = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
            source = dataset.random_map(transform, seed=order.seed)
        self._source = source
        first = self._read(0, 0)
        self.spec: ExampleSpec = example_spec(first)
        self.filler = self.spec.leaves(first, 0)

    def at(self, epoch: int, place: int) -> tuple[int, Example]:
        """Returns the index of the example at a place of an epoch's order, and its leaves."""
        index = self.order.example(epoch, place)
        return index, self.spec.leaves(self._read(epoch, index), index)

    def _read(self, epoch: int, index: int) -> Any:
        # Grain's datasets keep counting in later epochs, and seed their random transformations by that.
        further = epoch * self.order.num_examples if isinstance(self._source, grain.MapDataset) else 0
        try:
            example = self._source[index + further]
        except StopIteration as error:  # which would look like the end of the data
            raise RuntimeError(f"Example {index} of epoch {epoch} raised StopIteration.") from error
        except Exception as error:
            error.add_note(f"This was example {index} of epoch {epoch}.")
            raise
        if example is None:
            raise ValueError(
                f"Example {index} is None: a source that filters cannot be counted. Filter before, or give the example "
                "a field with the weight 0."
            )
        return example


@dataclasses.dataclass(frozen=True, eq=False)
class LocalBatches:
    """Loads this process's rows of the batches after a position; uses no device, so that it can run elsewhere.

    Attributes:
      examples: The examples.
      schedule: The split of epochs into batches.
      rows: The rows of a batch in this process.
      start: The position of the first batch.
    """

    examples: OrderedExamples
    schedule: BatchSchedule
    rows: tuple[int, ...]
    start: Position

    def __call__(self, number: int) -> tuple[list[np.ndarray], Position]:
        """Returns the rows of a batch, leaf by leaf with the weights last, and the position after it."""
        span = self.schedule.span(number, self.start)
        places = [span.start + row for row in self.rows]
        real = [place < span.stop for place in places]
        examples = [self.examples.at(span.epoch, place) for place in itertools.compress(places, real)]
        missing = len(places) - len(examples)  # at the end, since rows and places are in order
        leaves = [leaf for _, leaf in examples] + [self.examples.filler] * missing
        stacked = stack(leaves, [index for index, _ in examples] + [0] * missing, self.examples.spec)
        return [*stacked, np.array(real, np.float32)], self.schedule.after(span)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPipeline:
    """Makes the batches of a loader.

    Attributes:
      examples: The examples.
      schedule: The split of epochs into batches.
      rows: The rows of a batch in this process, with their devices.
      prefetch: Number of batches to make ahead.
      num_workers: Number of processes that load them; 0 for threads.
    """

    examples: OrderedExamples
    schedule: BatchSchedule
    rows: LocalRows
    prefetch: int
    num_workers: int

    def identity(self) -> dict[str, Any]:
        """Returns the facts that a position depends on: in another source or order it means other examples."""
        return {
            "num_examples": self.schedule.num_examples,
            "source": self.examples.fingerprint,
            "seed": self.examples.order.seed,
            "shuffle": self.examples.order.shuffle,
            "shuffle_window": self.examples.order.window,
        }

    def description(self) -> str:
        """Returns the facts that processes must agree on, one per line."""
        facts = {**self.identity(), **dataclasses.asdict(self.schedule), "examples": str(self.examples.spec)}
        return "\n".join(f"{name}={fact!r}" for name, fact in facts.items())

    def batches_from(self, start: Position) -> grain.DatasetIterator[tuple[PyTree, Position]]:
        """Returns the batches after a position, made ahead, each with the position after it."""
        total = self.schedule.num_batches(start)
        numbers = grain.MapDataset.range(sys.maxsize if total is None else total)
        load = LocalBatches(self.examples, self.schedule, self.rows.rows, start)
        if self.num_workers:
            return iter(self._loaded_by_workers(numbers.map(load)).map(self._place))
        # One thread for files that are read from their start: several would wait for each other.
        num_threads = min(self.prefetch, 1) if self.examples.sequential else self.prefetch
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=self.prefetch)
        return iter(numbers.map(lambda number: self._place(load(number))).to_iter_dataset(options))

    def _loaded_by_workers(self, loaded: grain.MapDataset[Any]) -> grain.IterDataset[Any]:
        if not flags.FLAGS.is_parsed():  # Grain's workers get absl's flags, which only `absl.app` would parse
            flags.FLAGS.mark_as_parsed()
        one_by_one = loaded.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        ahead = max(1, -(-self.prefetch // self.num_workers))
        options = grain.MultiprocessingOptions(num_workers=self.num_workers, per_worker_buffer_size=ahead)
        return one_by_one.mp_prefetch(options, worker_init_fn=_end_with_the_parent)

    def _place(self, loaded: tuple[list[np.ndarray], Position]) -> tuple[PyTree, Position]:
        """Puts the rows of a batch on the devices."""
        local, position = loaded
        *leaves, weights = map(self.rows.global_array, local)
        return {**jax.tree.unflatten(self.examples.spec.treedef, leaves), WEIGHTS: weights}, position


def _end_with_the_parent(worker: int, count: int) -> None:
    """Has a worker end with a program that was killed, which cannot end it: it would wait to hand over its batches."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """The rows of a batch on the devices of this process.

    Attributes:
      sharding: The sharding of a batch, as the steps expect it.
      batch_size: Rows of all processes.
      rows: Rows of this process, in order, each once.
    """

    sharding: NamedSharding
    batch_size: int
    rows: tuple[int, ...]

    def global_array(self, local: np.ndarray) -> jax.Array:
        """Returns the global array whose rows of this process are `local`."""
        places = {row: place for place, row in enumerate(self.rows)}

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self.batch_size)
            # `local` has all rows of a device, in order, so they are neighbors.
            return local[places[start] : places[start] + stop - start]

        return jax.make_array_from_callback((self.batch_size, *local.shape[1:]), self.sharding, part)


def local_rows(mesh: Mesh, batch_size: int, config: ZeroConfig) -> LocalRows:
    """Returns this process's rows of batches, split as the steps of a configuration split them.

    Raises:
      ValueError: The mesh lacks an axis, the rows cannot be divided evenly, or this process has no device.
    """
    check_mesh(mesh, config)
    num_shards = num_batch_shards(mesh, config)
    if batch_size % num_shards:
        below = batch_size // num_shards * num_shards
        nearest = " or ".join(str(size) for size in (below, below + num_shards) if size)
        raise ValueError(
            f"`batch_size` must be a multiple of the {num_shards} parts that the mesh splits a batch into (axes "
            f"{batch_axes(config)}): got {batch_size}. The nearest are {nearest}."
        )
    sharding = NamedSharding(mesh, PartitionSpec(batch_axes(config)))
    indices: Any = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = sorted({row for (index,) in indices for row in range(*index.indices(batch_size))})
    if not rows:
        raise ValueError(
            f"Process {jax.process_index()} has none of the mesh's devices, so no rows of a batch: call this in the "
            "processes of the mesh only, and make a mesh that has devices of all of them."
        )
    return LocalRows(sharding, batch_size, tuple(rows))
