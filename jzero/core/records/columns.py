"""Moves columns of a state in records to the devices, and back into the records, see [Note: ZenFlow]."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jzero.core.disk.pipeline import Pipeline
from jzero.core.plan.plan import ZeroPlan
from jzero.core.processes.exchange import succeed_together
from jzero.core.records.records import Record, Records, first_holders

DevicePart: TypeAlias = tuple[int, jax.Device]
"""One device's part of a parameter."""
Index: TypeAlias = tuple[slice | np.ndarray, ...]


@dataclasses.dataclass(eq=False)
class DeviceColumns:
    """The columns that the devices update in each step.

    Attributes:
      chosen: The columns by parameter, int32 [parts · K].
      on_device: What they have, one array per field, [..., N · K, ...].
    """

    records: Records
    chosen: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    on_device: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)

    @property
    def plan(self) -> ZeroPlan:
        """The plan of the state."""
        return self.records.plan

    def take(self, chosen: dict[int, jax.Array]) -> None:
        """Takes columns to the devices, in place of others, which go back into the records."""
        parts = self.move(self.records.pipeline, chosen)
        self.on_device = {
            i: [self._placed(i, [x[k] for x in of.values()], of) for k in range(self._num_fields(i))]
            for i in chosen
            if (of := {d: x for (j, d), x in parts.items() if j == i})
        }
        self.chosen = chosen

    def _num_fields(self, i: int) -> int:
        return len(self.plan.record_fields[i])

    def _placed(self, i: int, columns: Sequence[np.ndarray], devices: Iterable[jax.Device]) -> jax.Array:
        """Returns one field of the chosen columns as an array on the devices, from those of the first holders."""
        leaf = self.plan.leaves[i].grad
        there = dict(zip(devices, columns, strict=True))
        sharding = leaf.device_sharding
        shape = list(leaf.stored_shape)
        dim = leaf.column_dim
        part = leaf.part_shape
        shape[dim] = shape[dim] // part[dim] * columns[0].shape[dim]
        arrays = [jax.device_put(there[first], d) for d, first in first_holders(self.plan, leaf).items()]
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)

    def move(self, pipeline: Pipeline, chosen: Mapping[int, jax.Array]) -> dict[DevicePart, list[np.ndarray]]:
        """Writes the columns on the devices into records; returns those that are chosen now, by field."""
        columns_of = {(i, s.device): jax.device_get(s.data) for i, x in chosen.items() for s in x.addressable_shards}
        columns_read: dict[DevicePart, list[np.ndarray]] = {}

        def visit(number: int, buffer: np.ndarray) -> None:
            record = self.records.index[number]
            views, place = self.records.views(number, buffer), (record.param, record.device)
            self.overlay(record, views)
            if place not in columns_of:
                return
            dim, shape = (
                self.plan.leaves[record.param].grad.column_dim,
                list(self.plan.leaves[record.param].grad.part_shape),
            )
            shape[dim] = len(columns_of[place])
            into = columns_read.setdefault(place, [np.zeros(shape, view.dtype) for view in views])
            inside, columns = _overlap(record, dim, columns_of[place])
            at = _at(record, dim, inside)
            for x, view in zip(into, views, strict=True):
                x[at] = np.take(view, columns, dim)

        succeed_together(lambda: pipeline.run(visit))
        pipeline.store.commit()
        return columns_read

    def overlay(self, record: Record, views: Sequence[np.ndarray]) -> None:
        """Writes the columns on the devices into the fields of a record."""
        if record.param not in self.chosen:
            return
        chosen = _part(self.chosen[record.param], record.device)
        dim = self.plan.leaves[record.param].grad.column_dim
        inside, columns = _overlap(record, dim, chosen)
        at: Index = _at(record, dim, inside)
        there: Index = (*[slice(None)] * dim, columns)
        for x, view in zip(self.on_device[record.param], views, strict=True):
            view[there] = _part(x, record.device)[at]


def _part(x: jax.Array, device: jax.Device) -> np.ndarray:
    part: np.ndarray = jax.device_get(next(s.data for s in x.addressable_shards if s.device == device))
    return part


def _overlap(record: Record, dim: int, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which of some columns of a part a record has: their numbers among them, and their places in it."""
    start, count = record.place.start[dim], record.place.shape[dim]
    inside = np.flatnonzero((columns >= start) & (columns < start + count))
    return inside, columns[inside] - start


def _at(record: Record, dim: int, numbers: np.ndarray) -> Index:
    """Returns the place of a record in an array of columns, given the numbers of those that it has."""
    place: list[slice | np.ndarray] = list(record.place.slices)
    place[dim] = numbers
    return tuple(place)
