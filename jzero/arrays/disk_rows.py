"""The rows of a state's parameters on disk, as programs see them: in go the files of a state, out come handles.

A handle stands for a row, int32 [2]: the ticket of a reader of this process, and the number of the row there. Each
device has its own handles of a stack, [L, 2], which a loop slices as it would the shard, [L, D/N, F].
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jzero.arrays.disk_files import StateFiles, first_holders
from jzero.disk.rows import Row, RowReader
from jzero.plan.plan import ZeroPlan


class StateRows:
    """Reads the rows of a state's parameters.

    Args:
      files: The files of the state.

    Attributes:
      reader: Reads them while a program runs.
      handles: By parameter, its handles as a global array.
    """

    def __init__(self, files: StateFiles) -> None:
        plan = files.plan
        stacks = {
            (i, device): _rows_of(files, i, first)
            for i in plan.params_on_disk
            for device, first in first_holders(plan, plan.leaves[i].grad).items()
        }
        self.reader = RowReader(files.pipeline.store, list(stacks.values()), plan.config.offload.disk_threads)
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


def _rows_of(files: StateFiles, i: int, device: jax.Device) -> list[Row]:
    """Returns the rows of a parameter's part of a device."""
    leaf = files.plan.leaves[i]
    _, *shape = leaf.grad.part_shape
    records: list[list[int]] = [[] for _ in range(leaf.param.shape[0])]
    for number in files.of_param[i]:
        if files.records[number].device == device:
            records[files.records[number].place.start[0]].append(number)
    sizes = [tuple(files.records[number].place.size for number in row) for row in records]
    dtype = np.dtype(leaf.param.dtype)
    return [Row(tuple(row), size, tuple(shape), dtype) for row, size in zip(records, sizes, strict=True)]
