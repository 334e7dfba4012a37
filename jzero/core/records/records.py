"""The records of one state, in the host's memory or on a disk: what each holds, and reads of leaves.

records.views(number, buffer)       the fields of a record, in its bytes
records.read_leaf(path)             a whole leaf, as stored
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike

from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.rows import RowReader, StoredRow
from jzero.core.layout.box import Box, field_offsets
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.placement import Memory
from jzero.core.layout.stored import InRecords
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.table import format_bytes
from jzero.core.processes.exchange import succeed_together

Parts: TypeAlias = Mapping[jax.Device, ArrayLike]
"""The parts of an array, by the first device that has each."""

QUIET_S = 30.0
"""Seconds between two lines in the log while a state is laid out."""


class Record(NamedTuple):
    """Which box of a parameter a record holds.

    Attributes:
      param: The number of its parameter in the plan.
      device: The device whose part it belongs to; the first of this process if several have the same part.
      first: The index of the part's first element in the stored array.
      place: Its place in the part.
    """

    param: int
    device: jax.Device
    first: tuple[int, ...]
    place: Box

    @property
    def stored(self) -> Box:
        """Its place in the stored array."""
        return self.place.beyond(self.first)


def first_holders(plan: ZeroPlan, leaf: StateLeaf, *, everywhere: bool = False) -> dict[jax.Device, jax.Device]:
    """Returns for each device the first one with the same part of a leaf, of this process or, `everywhere`, of all."""
    sharding = leaf.device_sharding
    index_of = sharding.devices_indices_map(leaf.stored_shape)
    mine = sharding.addressable_devices
    firsts: dict[str, jax.Device] = {}
    holders = {d: firsts.setdefault(str(index), d) for d, index in index_of.items() if everywhere or d in mine}
    return {d: holder for d, holder in holders.items() if d in mine}


def layout(plan: ZeroPlan) -> list[Record]:
    """Returns the records of this process: by parameter, then by place, so that devices take turns."""
    records = []
    for i in plan.record_fields:
        leaf = plan.leaves[i].grad
        index = leaf.device_sharding.devices_indices_map(leaf.stored_shape)
        devices = list(dict.fromkeys(first_holders(plan, leaf).values()))
        starts = {d: tuple(s.start or 0 for s in index[d]) for d in devices}
        records += [Record(i, d, starts[d], place) for place in plan.record_boxes(i) for d in devices]
    return records


class Pending:
    """What later steps apply to the records of a state. Of this kind is a state whose steps apply all at once: nothing.

    Attributes:
      version: How often columns that are on the devices, or gradients that wait, changed.
    """

    version: int = 0

    def waits(self) -> bool:
        """Whether gradients wait."""
        return False

    def wait(self) -> None:
        """Waits for an update that runs beside other steps and has the records for itself."""

    def overlay(self, record: Record, views: Sequence[np.ndarray]) -> None:
        """Writes the columns that are on the devices into the fields of a record."""


@dataclasses.dataclass(eq=False)
class Records:
    """The records of one state.

    Attributes:
      index: What each record of the store holds.
      pipeline: Reads and writes the records of its store.
      pending: What later steps apply.
      is_released: Whether the space was given back, so that nothing can be read any more.
    """

    plan: ZeroPlan
    index: Sequence[Record]
    pipeline: Pipeline
    pending: Pending = dataclasses.field(default_factory=Pending)
    is_released: bool = False
    _filled: int = 0  # bytes, while the state is laid out
    _tells_at: float = 0.0

    @property
    def generation(self) -> int:
        """The number of times that the state changed after it was first filled, see [Note: The newest state]."""
        return self.pipeline.store.generation - 1 + self.pending.version

    @property
    def where(self) -> str:
        """Where they are: in the memory of the host, or on a disk."""
        return self.plan.config.offload.records_in

    def require_not_released(self) -> None:
        """Raises if the space was given back."""
        if self.is_released:
            raise RuntimeError(
                "What this state had on disk is gone: `jzero.release_disk` freed the space. Make the state anew, or "
                "restore a checkpoint into one."
            )

    @functools.cached_property
    def of_param(self) -> dict[int, list[int]]:
        """The numbers of each parameter's records."""
        numbers: dict[int, list[int]] = {i: [] for i in self.plan.record_fields}
        for number, record in enumerate(self.index):
            numbers[record.param].append(number)
        return numbers

    def read(self, number: int, buffer: np.ndarray) -> None:
        """Reads a record, with the columns that are on the devices."""
        self.pipeline.store.read(number, buffer)
        self.pending.overlay(self.index[number], self.views(number, buffer))

    def views(self, number: int, buffer: np.ndarray) -> list[np.ndarray]:
        """Returns the fields of a record as arrays of the record's shape, which share its bytes."""
        record = self.index[number]
        dtypes = [leaf.dtype for leaf in self.plan.record_fields[record.param]]
        offsets, size = field_offsets(dtypes, record.place.size), record.place.size
        return [
            buffer[at : at + size * dtype.itemsize].view(dtype).reshape(record.place.shape)
            for at, dtype in zip(offsets, dtypes, strict=False)
        ]

    def fill(self, params: Iterable[tuple[int, Sequence[jax.Array]]]) -> None:
        """Writes the records of parameters, given with their fields as stored, into the other slot; does not commit."""
        for i, fields in params:
            parts = [{x.device: np.asarray(x.data) for x in field.addressable_shards} for field in fields]

            def copy(number: int, buffer: np.ndarray, parts: Sequence[Mapping[jax.Device, np.ndarray]] = parts) -> None:
                record = self.index[number]
                for view, of_device in zip(self.views(number, buffer), parts, strict=True):
                    view[...] = of_device[record.device][record.place.slices]

            self._tell(self.pipeline.run(copy, self.of_param[i], reads=False).written_bytes)

    def _tell(self, num_bytes: int) -> None:
        """Counts bytes that were laid out, and logs progress if that takes long."""
        now, total = time.monotonic(), self.pipeline.store.num_bytes
        if not self._filled:
            self._tells_at = now + QUIET_S
        self._filled = (self._filled + num_bytes) % total  # the next state begins anew
        if self._filled and now > self._tells_at:
            self._tells_at = now + QUIET_S
            written = format_bytes(self._filled), format_bytes(total)
            logging.getLogger("jzero").warning("Laying out records of optimizer state: %s of %s are written.", *written)

    def rewrite(self, new: Mapping[str, jax.Array]) -> None:
        """Writes all records anew, with new values of some leaves, by path, as stored; nothing may wait for a step."""
        assert not self.pending.waits(), "what waits would overwrite the new values"
        parts = {path: {x.device: np.asarray(x.data) for x in array.addressable_shards} for path, array in new.items()}

        def change(number: int, buffer: np.ndarray) -> None:
            record = self.index[number]
            fields = self.plan.record_fields[record.param]
            for view, leaf in zip(self.views(number, buffer), fields, strict=True):
                if leaf.path in parts:
                    view[...] = parts[leaf.path][record.device][record.place.slices]

        succeed_together(lambda: self.pipeline.run(change))
        self.pipeline.store.commit()

    def place_of(self, path: str) -> tuple[int, int]:
        """Returns the parameter, and the number of the field, of a leaf in records."""
        return next(
            (i, k) for i, fields in self.plan.record_fields.items() for k, x in enumerate(fields) if x.path == path
        )

    def read_leaf(self, path: str) -> jax.Array:
        """Returns a leaf as stored, in the devices' memory."""
        self.require_not_released()
        self.pending.wait()
        self.pipeline.store.check_whole()
        i, k = self.place_of(path)
        leaf = self.plan.record_fields[i][k]
        shape = leaf.part_shape
        parts = {self.index[number].device: np.zeros(shape, leaf.dtype) for number in self.of_param[i]}

        def copy(number: int, buffer: np.ndarray) -> None:
            record = self.index[number]
            views = self.views(number, buffer)
            self.pending.overlay(record, views)
            parts[record.device][record.place.slices] = views[k]

        self.pipeline.run(copy, self.of_param[i], writes=False)
        return self.assembled(leaf, parts)

    def assembled(self, leaf: StateLeaf, parts: Parts, memory: Memory = "device") -> jax.Array:
        """Returns a stored array from the parts of the first devices that have them."""
        sharding = dataclasses.replace(leaf, memory=memory).sharding
        kind = sharding.memory_kind
        arrays = [
            jax.device_put(parts[first], SingleDeviceSharding(d, memory_kind=kind))
            for d, first in first_holders(self.plan, leaf).items()
        ]
        return jax.make_array_from_single_device_arrays(leaf.stored_shape, sharding, arrays)

    @functools.cached_property
    def rows(self) -> StateRows:
        """Reads parameters in records for programs."""
        return StateRows(self)

    def release(self) -> None:
        """Gives the space back, once no update and no save uses it."""
        self.pending.wait()
        self.pipeline.store.wait_for_pins()
        self.is_released, self.pending = True, Pending()
        self.close()

    def close(self) -> None:
        """Gives the space back. Nothing may be under way."""
        if self.plan.params_on_disk:
            self.rows.reader.close()
        self.pipeline.close()
        self.pipeline.store.close()

    def node(self, leaf: StateLeaf) -> InRecords:
        """Returns what stands for a leaf in the state."""
        return InRecords(leaf.path, leaf.stored_shape, leaf.dtype, self)


class StateRows:
    """Reads the rows of a state's parameters.

    Attributes:
      reader: Reads them while a program runs.
      handles: By parameter, its handles as a global array.
    """

    def __init__(self, records: Records) -> None:
        plan = records.plan
        stacks = {
            (i, device): _rows_of(records, i, first)
            for i in plan.params_on_disk
            for device, first in first_holders(plan, plan.leaves[i].grad).items()
        }
        self.reader = RowReader(records.pipeline.store, list(stacks.values()), plan.config.offload.disk_threads)
        first = dict(zip(stacks, self.reader.first, strict=True))
        self.handles = {i: self._handles(plan, i, first) for i in plan.params_on_disk}

    def _handles(self, plan: ZeroPlan, i: int, first: Mapping[tuple[int, jax.Device], int]) -> jax.Array:
        like, length = handle_shape(plan, i), plan.leaves[i].param.shape[0]

        def of_device(device: jax.Device) -> jax.Array:
            rows = np.arange(first[i, device], first[i, device] + length)
            return jax.device_put(np.stack([np.full(length, self.reader.ticket), rows], 1).astype(np.int32), device)

        parts = [of_device(device) for j, device in first if j == i]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


def handle_shape(plan: ZeroPlan, i: int) -> jax.ShapeDtypeStruct:
    """Returns shape and sharding of the handles of a parameter, [N·L, 2] over N devices."""
    sharding = NamedSharding(plan.mesh, PartitionSpec(tuple(plan.mesh.axis_names)))
    shape = (plan.mesh.size * plan.leaves[i].param.shape[0], 2)
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)


def _rows_of(records: Records, i: int, device: jax.Device) -> list[StoredRow]:
    """Returns the rows of a parameter's part of a device."""
    leaf = records.plan.leaves[i]
    _, *shape = leaf.grad.part_shape
    numbers: list[list[int]] = [[] for _ in range(leaf.param.shape[0])]
    for number in records.of_param[i]:
        if records.index[number].device == device:
            numbers[records.index[number].place.start[0]].append(number)
    sizes = [tuple(records.index[number].place.size for number in row) for row in numbers]
    dtype = np.dtype(leaf.param.dtype)
    return [StoredRow(tuple(row), size, tuple(shape), dtype) for row, size in zip(numbers, sizes, strict=True)]
