"""Writes what a state has on disk to a checkpoint: one generation of records, and its chunks.

[Note: Saving records]
A save pins a generation: one later step may run, the next waits until the save is done. A pass in the background puts
chunks together and writes them, all fields of a parameter at once, so each record is read once. If 16-bit parameters
are in memory and their masters on disk, a pass before that, while nothing is written, sees which were edited: their
masters take that up as the optimizer would. Both take the memory of a few records. Only edited parameters stay in host
memory until the writing has ended, since a step may overwrite them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.disk_places import chunk_shape, in_stored, is_streamed
from jzero.core.base.types import DType
from jzero.core.disk.files import page_aligned
from jzero.core.layout.box import Box
from jzero.core.layout.casts import apply_edits
from jzero.core.plan.plan import ZeroPlan
from jzero.core.records.records import Records, first_holders

KEPT_RECORDS = 3
"""Records of a parameter that stay in memory while chunks are put together; most chunks take no more."""


def owned_records(records: Records) -> dict[int, list[int]]:
    """Returns, by parameter, the records whose part no earlier device has: no two processes own one."""
    owned = {}
    for i, numbers in records.of_param.items():
        holders = first_holders(records.plan, records.plan.leaves[i].grad, everywhere=True)
        owned[i] = [n for n in numbers if holders[records.index[n].device] == records.index[n].device]
    return owned


def masters_on_disk(plan: ZeroPlan) -> dict[int, int]:
    """Returns, by parameter, the number of the field on disk that is its master."""
    masters = plan.view.params.flat(plan.view.opt_state.tree(plan.opt_leaves).masters)
    return {i: fields.index(masters[i]) for i, fields in plan.record_fields.items() if masters[i] in fields}


def one_device(plan: ZeroPlan) -> jax.Device:
    """Returns the device for programs over records. It is faster than a disk, and others would compile them again."""
    return plan.mesh.local_devices[0]


class Snapshot:
    """A generation of the records of a state, which stays until `release`, see [Note: Saving records].

    Args:
      records: The records.

    Attributes:
      records: The same.
      owned: The records that this process saves, by parameter.
      masters: See `masters_on_disk`.
      edited: The edited 16-bit parameters, by number and device, laid out like their gradients.
    """

    def __init__(self, records: Records) -> None:
        self.records, self.plan = records, records.plan
        self.owned = owned_records(records)
        self.masters = masters_on_disk(records.plan)
        self.edited: dict[int, dict[jax.Device, np.ndarray]] = {}
        self._pin = records.pipeline.store.pin()

    def release(self) -> None:
        """Lets steps overwrite this generation."""
        self._pin.release()
        self.edited.clear()

    def examine(self, params: Sequence[jax.Array]) -> None:
        """Notes edits of parameters.

        Args:
          params: The parameters as stored; those in memory with a master on disk count.
        """
        plan = self.plan
        for i in plan.record_fields:
            if i in self.masters and is_streamed(plan.leaves[i].grad) and not plan.leaves[i].param.in_records:
                self._examine(i, params[i])

    def _examine(self, i: int, param: jax.Array) -> None:
        leaf, master = self.plan.leaves[i], self.masters[i]
        param_parts = _host_parts(leaf.param_as_gradient(param))
        device = one_device(self.plan)
        edited: list[jax.Array] = []

        def visit(number: int, buffer: np.ndarray) -> Callable[[np.ndarray], None]:
            record = self.records.index[number]
            field = jax.device_put(self.records.views(number, buffer)[master], device)
            found = _is_edited(field, param_parts[record.device][record.place.slices])
            edited.append(found)
            # The record's bytes may be the operands themselves.
            return lambda buffer: jax.block_until_ready(found) and None

        self.records.pipeline.run(visit, self.owned[i], writes=False)
        if any(map(bool, edited)):
            self.edited[i] = {device: x.copy() for device, x in param_parts.items()}

    def read(self, number: int, buffer: np.ndarray) -> None:
        """Reads a record, with the edits of its parameter."""
        self._pin.read(number, buffer)
        record = self.records.index[number]
        if record.param in self.edited:
            master = self.records.views(number, buffer)[self.masters[record.param]]
            piece = self.edited[record.param][record.device][record.place.slices]
            master[...] = np.asarray(apply_edits(jax.device_put(master.copy(), one_device(self.plan)), piece))

    def chunk_shape(self, i: int) -> tuple[int, ...]:
        """Returns the shape of a parameter's chunks."""
        return chunk_shape(self.plan, i)

    def chunks(self, i: int) -> Iterator[tuple[Box, list[np.ndarray]]]:
        """Yields the chunks of a parameter that this process writes: places in the natural array, and all fields."""
        leaf = self.plan.leaves[i].grad
        records = _Records(self, i)
        for chunk in Box.whole(leaf.shape).split(self.chunk_shape(i)):
            place = in_stored(chunk, leaf)
            if records.at(Box(place.start, tuple(1 for _ in place.start))):
                yield chunk, [x.reshape(chunk.shape) for x in records.read(place)]


class _Records:
    """Reads boxes of one parameter's state from disk, and caches the latest records."""

    def __init__(self, snapshot: Snapshot, i: int) -> None:
        records = snapshot.records
        self._snapshot, self._i, self._numbers = snapshot, i, snapshot.owned[i]
        places = [records.index[n].stored for n in self._numbers]
        self._starts = np.array([x.start for x in places]).reshape(len(places), -1)
        self._stops = self._starts + np.array([x.shape for x in places]).reshape(len(places), -1)
        self._kept: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        sizes = [records.pipeline.store.sizes[n] for n in self._numbers]
        self._free = [page_aligned(max(sizes, default=0)) for _ in range(KEPT_RECORDS)]

    def at(self, place: Box) -> list[int]:
        """Returns the numbers of the records that a box overlaps."""
        start, stop = np.array(place.start), np.array(place.start) + np.array(place.shape)
        hit = (self._starts < stop) & (self._stops > start)
        return [self._numbers[k] for k in np.flatnonzero(hit.all(axis=1))]

    def read(self, place: Box) -> list[np.ndarray]:
        """Returns a box of each field, in new memory."""
        records = self._snapshot.records
        fields = [np.empty(place.shape, leaf.dtype) for leaf in records.plan.record_fields[self._i]]
        for number in self.at(place):
            stored = records.index[number].stored
            common = place & stored
            assert common is not None
            for x, view in zip(fields, records.views(number, self._bytes(number)), strict=True):
                x[common.within(place).slices] = view[common.within(stored).slices]
        return fields

    def _bytes(self, number: int) -> np.ndarray:
        """Returns a record's bytes, which are valid until the next call."""
        if number not in self._kept:
            buffer = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
            self._kept[number] = buffer
            self._snapshot.read(number, buffer[: self._snapshot.records.pipeline.store.sizes[number]])
        self._kept.move_to_end(number)
        return self._kept[number][: self._snapshot.records.pipeline.store.sizes[number]]


@dataclasses.dataclass(frozen=True, eq=False)
class DiskArray:
    """A leaf on disk, written chunk by chunk. A leaf of the tree for Orbax.

    Attributes:
      snapshot: The generation that it belongs to.
      param: The number of its parameter.
      field: Its number among what is on disk of the parameter.
    """

    snapshot: Snapshot
    param: int
    field: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        return self.snapshot.plan.record_fields[self.param][self.field].shape

    @property
    def dtype(self) -> DType:
        """Its dtype."""
        return self.snapshot.plan.record_fields[self.param][self.field].dtype


def _host_parts(x: jax.Array) -> Mapping[jax.Device, np.ndarray]:
    return {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}


@jax.jit
def _is_edited(master: jax.Array, param: jax.Array) -> jax.Array:
    return jnp.any(apply_edits(master, param) != master)
