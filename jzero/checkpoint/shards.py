"""From the arrays of a checkpoint to arrays on devices, each process its own shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.leaves import TargetLeaf
from jzero.checkpoint.parts import ArrayPart, read_parts
from jzero.core.base.types import DType
from jzero.core.layout.box import Box, padded
from jzero.core.layout.placement import copy_array

AHEAD_BYTES = 1 << 28
"""Most bytes of shards that are in host memory at once, if no two are larger, beside those that stay there."""


def read_shards(
    contents: Contents, leaves: Mapping[int, tuple[TargetLeaf, StoredLeaf]], note: Callable[[int, jax.Array], None]
) -> None:
    """Reads arrays of a checkpoint in the forms of the state's leaves; no random keys.

    Args:
      contents: The checkpoint.
      leaves: The leaves, by number.
      note: Takes the number and the array of each, in order.

    Raises:
      CheckpointError: An array cannot be read.
      ValueError: It holds integers that jax, in its current configuration, would truncate.
    """
    boxes = ((stored, x, Box.whole(stored.shape)) for leaf, stored in leaves.values() for x in _boxes_here(leaf))
    parts = (ArrayPart(contents.arrays[stored.keys], inside) for stored, box, whole in boxes if (inside := box & whole))
    values = read_parts(contents, parts, AHEAD_BYTES)

    def read(target_leaf: TargetLeaf, dtype: DType) -> jax.Array:
        return place(target_leaf, dtype, lambda _: _narrowed(next(values), dtype, target_leaf))

    for i, (leaf, stored) in leaves.items():
        note(i, read(leaf, jax.dtypes.canonicalize_dtype(stored.dtype)))


def place(target_leaf: TargetLeaf, dtype: DType, read: Callable[[Box], np.ndarray]) -> jax.Array:
    """Returns an array in the form of a leaf, in buffers of its own, which can be donated; zero in the padding.

    Args:
      target_leaf: The leaf.
      dtype: Of the array.
      read: Returns a box of the natural array. Called once per box, in the order of `_boxes_here`; nothing is kept.
    """
    shape, sharding, arrays = target_leaf.shape, target_leaf.sharding, []
    for box, devices in _boxes_here(target_leaf).items():
        host = padded(read, box, target_leaf.leaf.shape, dtype)
        for device in devices:
            x = jax.device_put(host, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
            # On CPUs it may use the memory of `host`, which cannot be donated. The copy is cheap while the numbers are
            # in the cache, and the next part gets that memory.
            arrays.append(jax.block_until_ready(copy_array(x)) if device.platform == "cpu" else x)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _boxes_here(target_leaf: TargetLeaf) -> dict[Box, list[jax.Device]]:
    """Returns each different part of an array on this process's devices, and the devices that hold it."""
    shape, sharding = target_leaf.shape, target_leaf.sharding
    devices_at: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_at.setdefault(Box.of(index or (), shape), []).append(device)
    return devices_at


def _narrowed(x: np.ndarray, dtype: DType, target_leaf: TargetLeaf) -> np.ndarray:
    narrow = x.astype(dtype, copy=False)
    if narrow is not x and jax.numpy.issubdtype(dtype, np.integer) and (narrow != x).any():
        raise ValueError(
            f"{target_leaf.path} holds {x.dtype} numbers that need more than 32 bits: enable them, "
            "`jax.config.update('jax_enable_x64', True)`."
        )
    return narrow
