"""From a checkpoint to records on disk: makes the records of a new state from the arrays of a checkpoint.

    restore_records(contents, plan, leaves, old) -> RestoredRecords

[Note: Restoring records]
The new state gets records of its own, which are committed once all is read; until then the state to restore
into is as it was. Records are written in the order of the natural arrays, all fields of a parameter at once: what is
restored comes from the checkpoint, cast as arrays in memory are, the rest from the other state's records. A 16-bit
parameter whose master is on disk is rounded from the same numbers on the way. Memory: a few records, and of each field
of one parameter the chunks that a record takes part in. Chunks that a state on disk has written are about as large as
its records; those from a state in memory are as large as a device's part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.damage import reading
from jzero.checkpoint.disk_places import PlacedBox, in_natural
from jzero.checkpoint.disk_saving import masters_on_disk, one_device
from jzero.core.base.types import DType
from jzero.core.layout.casts import describe_misfit, round_to
from jzero.core.plan.plan import ZeroPlan
from jzero.core.processes.exchange import succeed_together
from jzero.core.records.records import Records
from jzero.core.state.record_states import open_records


class RestoredRecords(NamedTuple):
    """What is on disk of a restored state.

    Attributes:
      records: Its records, committed.
      rounded: By number, the 16-bit parameters in memory whose master was restored, laid out like their gradients.
    """

    records: Records
    rounded: dict[int, jax.Array]


def restore_records(
    contents: Contents, plan: ZeroPlan, leaves: Mapping[str, StoredLeaf], old: Records | None
) -> RestoredRecords:
    """Returns new records with the leaves of a checkpoint. Each process must call it.

    Args:
      contents: The checkpoint.
      plan: The plan of the state.
      leaves: What to restore of the leaves on disk, by path.
      old: Files of the same plan, for the other leaves.

    Raises:
      CheckpointError: The checkpoint cannot be read, or is damaged. The new records are gone again.
      DiskError: There is no space for them, or the disk fails.
      ValueError: Numbers do not fit the state's dtypes.
    """
    records = succeed_together(lambda: open_records(plan))
    try:
        run = succeed_together(lambda: _run(contents, records, leaves, old))
        records.pipeline.store.commit()
    except BaseException:
        records.close()
        raise
    return RestoredRecords(records, run.rounded)


def _run(contents: Contents, records: Records, leaves: Mapping[str, StoredLeaf], old: Records | None) -> _Run:
    run = _Run(contents, records, leaves, old)
    for i in records.plan.record_fields:
        run.restore(i)
    return run


class _Run:
    """A pass over all records of new records.

    Attributes:
      rounded: As for `RestoredRecords`.
    """

    def __init__(
        self, contents: Contents, records: Records, matched: Mapping[str, StoredLeaf], old: Records | None
    ) -> None:
        self.records, self.plan, self.matched, self.old = records, records.plan, matched, old
        self.contents = contents
        self.masters = masters_on_disk(records.plan)
        self.rounded: dict[int, jax.Array] = {}
        pieces = {
            matched[x.path].keys: self._piece(i)
            for i, fields in self.plan.record_fields.items()
            for x in fields
            if x.path in matched
        }
        self._opened = contents.open(pieces)

    def restore(self, i: int) -> None:
        """Writes the records of a parameter."""
        fields, leaf = self.plan.record_fields[i], self.plan.leaves[i]
        numbers = sorted(self.records.of_param[i], key=lambda n: self.records.index[n].stored.start)
        keys_of = {k: self.matched[x.path].keys for k, x in enumerate(fields) if x.path in self.matched}
        arrays = {k: self._opened.pop(keys) for k, keys in keys_of.items()}  # with the chunks that they keep
        rounds = self.masters.get(i) in arrays  # into a field of the record, or into an array
        to_record = rounds and leaf.param.in_records
        devices = dict.fromkeys(self.records.index[n].device for n in numbers)
        shape = leaf.grad.part_shape
        parts = {d: np.empty(shape, leaf.param.dtype) for d in devices} if rounds and not to_record else {}

        def visit(number: int, buffer: np.ndarray) -> None:
            record = self.records.index[number]
            read = self._read(arrays, in_natural(record.stored, leaf.grad), record.place.shape)
            if len(arrays) + to_record < len(fields):
                self._copy(number, buffer)
            views = self.records.views(number, buffer)
            for k, x in read.items():
                rounded = leaf.param.dtype if rounds and k == self.masters[i] else None
                cast = self._cast(number, k, x, rounded)
                views[k][...] = cast[0]
                if rounded is not None:
                    target = views[0] if to_record else parts[record.device][record.place.slices]
                    target[...] = cast[1]

        self.records.pipeline.run(visit, numbers, reads=False)
        if parts:
            stored = dataclasses.replace(leaf.grad, dtype=leaf.param.dtype)
            self.rounded[i] = self.records.assembled(stored, parts, leaf.param.array_memory)

    def _piece(self, i: int) -> tuple[int, ...]:
        """Returns the largest shape that is read at once for a record of a parameter."""
        leaf = self.plan.leaves[i].grad
        pieces = in_natural(self.records.index[self.records.of_param[i][0]].stored, leaf)
        return max((x.natural.shape for x in pieces), key=math.prod, default=leaf.shape)

    def _read(
        self, arrays: Mapping[int, Any], pieces: Sequence[PlacedBox], shape: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Returns one record of each array from the checkpoint, zero in the padding."""
        read = {}
        with reading(self.contents.state_directory):
            begun = {k: [array[x.natural.slices].read() for x in pieces] for k, array in arrays.items()}
            for k, futures in begun.items():
                read[k] = np.zeros(shape, arrays[k].dtype.numpy_dtype)
                for future, (_, inside) in zip(futures, pieces, strict=True):
                    read[k][inside] = future.result().reshape(read[k][inside].shape)
        return read

    def _cast(self, number: int, k: int, x: np.ndarray, rounded: Any) -> list[np.ndarray]:
        """Returns a field of a record in its dtype, and in `rounded` if given."""
        leaf = self.plan.record_fields[self.records.index[number].param][k]
        dtypes = (leaf.dtype, *([] if rounded is None else [rounded]))
        if why := describe_misfit(x, leaf.dtype):
            raise ValueError(
                "These leaves cannot be read into the state, which does not hold their numbers:\n"
                f"  {self.matched[leaf.path].path}: {why}\nRead them into a state of a wider dtype."
            )
        on_device = jax.device_put(x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False), one_device(self.plan))
        return [np.asarray(y) for y in _rounded(on_device, dtypes)]

    def _copy(self, number: int, buffer: np.ndarray) -> None:
        """Takes a whole record from the old records."""
        assert self.old is not None
        self.old.read(number, buffer)


@functools.partial(jax.jit, static_argnums=1)
def _rounded(x: jax.Array, dtypes: tuple[DType, ...]) -> list[jax.Array]:
    return [round_to(x, dtype) for dtype in dtypes]
