"""From the arrays of a checkpoint to arrays on devices, each process its own shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jzero._types import DType
from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.leaves import TargetLeaf
from jzero.checkpoint.parts import Part, read_parts
from jzero.layout.cut import Index
from jzero.layout.placement import copy_array

AHEAD_BYTES = 1 << 28
"""Most bytes of shards that are in host memory at once, beside those that stay there."""


def read_shards(contents: Contents, leaves: Mapping[int, tuple[TargetLeaf, StoredLeaf]]) -> dict[int, jax.Array]:
    """Returns arrays of a checkpoint in the forms of the state's leaves, zero beyond the natural array; no random keys.

    Raises:
      CheckpointError: An array cannot be read.
      ValueError: It holds integers that jax, in its current configuration, would truncate.
    """
    opened = contents.open({stored.keys: () for _, stored in leaves.values()})
    parts = (
        Part(opened[stored.keys], inside) for target_leaf, stored in leaves.values() for inside in _parts(target_leaf)
    )
    values = read_parts(contents, parts, AHEAD_BYTES)
    return {i: _from_parts(target_leaf, stored, values) for i, (target_leaf, stored) in leaves.items()}


def placed(shape: tuple[int, ...], sharding: NamedSharding, part: Callable[[Index], np.ndarray]) -> jax.Array:
    """Returns an array in buffers of its own, which can be donated, made of what `part` returns for each index.

    Calls `part` once per index, in the order of `_indices`, and keeps none of the results.
    """
    arrays = []
    for index, devices in _indices(shape, sharding):
        host = part(index)
        for device in devices:
            x = jax.device_put(host, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
            # On CPUs it may use the memory of `host`, which cannot be donated. The copy is cheap while the numbers are
            # in the cache, and the next part gets that memory.
            arrays.append(jax.block_until_ready(copy_array(x)) if device.platform == "cpu" else x)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _indices(shape: tuple[int, ...], sharding: NamedSharding) -> list[tuple[Index, list[jax.Device]]]:
    """Returns each different part of an array on this process's devices, with bounds, and the devices that hold it."""
    devices_at: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        devices_at.setdefault(bounds, []).append(device)
    return [(tuple(slice(*x) for x in bounds), devices) for bounds, devices in devices_at.items()]


def _inside(index: Index, target_leaf: TargetLeaf) -> Index | None:
    """Returns the part without its padding; `None` if it is all padding."""
    inside = index if target_leaf.cut is None else target_leaf.cut.inside(index)
    return inside if inside is not None and all(s.start < s.stop for s in inside) else None


def _parts(target_leaf: TargetLeaf) -> Iterator[Index]:
    indices = (_inside(index, target_leaf) for index, _ in _indices(target_leaf.shape, target_leaf.sharding))
    return (x for x in indices if x is not None)


def _from_parts(target_leaf: TargetLeaf, stored: StoredLeaf, values: Iterator[np.ndarray]) -> jax.Array:
    dtype = jax.dtypes.canonicalize_dtype(stored.dtype)

    def part(index: Index) -> np.ndarray:
        shape = tuple(s.stop - s.start for s in index)
        if _inside(index, target_leaf) is None:
            return np.zeros(shape, dtype)
        values_here = _narrowed(next(values), dtype, target_leaf)
        padding = [(0, n - m) for n, m in zip(shape, values_here.shape, strict=True)]
        return values_here if values_here.shape == shape else np.pad(values_here, padding)

    return placed(target_leaf.shape, target_leaf.sharding, part)


def _narrowed(x: np.ndarray, dtype: DType, target_leaf: TargetLeaf) -> np.ndarray:
    narrow = x.astype(dtype, copy=False)
    if narrow is not x and jax.numpy.issubdtype(dtype, np.integer) and (narrow != x).any():
        raise ValueError(
            f"{target_leaf.path} holds {x.dtype} numbers that need more than 32 bits: enable them, "
            "`jax.config.update('jax_enable_x64', True)`."
        )
    return narrow
