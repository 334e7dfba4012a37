"""The rows of a global batch in this process, and global arrays made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.core.config.zero import ZeroConfig
from jzero.core.layout.mesh import batch_axes, check_mesh, num_batch_shards


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
