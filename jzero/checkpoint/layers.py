"""Parameters on the host layer by layer, in their natural shapes: of a state, and of a checkpoint."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.checkpoint.checksum import host_checksum
from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.damage import wrong_checksums
from jzero.checkpoint.leaves import TargetLeaf
from jzero.layout.placement import on_device
from jzero.layout.stored import Stored

At = tuple[int, ...]


class Layers(Protocol):
    """Where an export gets parameters from."""

    def get(self, path: str, at: At) -> np.ndarray:
        """Returns what lies at an index of a parameter's leading dimensions."""

    def keep(self, paths: Collection[str]) -> None:
        """Says which parameters the next calls are about."""


class StateLayers:
    """The parameters of a state. With several processes, each must ask for the same, and gets it."""

    def __init__(self, arrays: Mapping[str, tuple[Stored, TargetLeaf]]) -> None:
        """`arrays` are stored arrays, with how they are stored."""
        self._arrays = arrays
        self._near: dict[str, jax.Array] = {}

    def keep(self, paths: Collection[str]) -> None:
        """Keeps these in device memory, and no others that are stored elsewhere."""
        self._near = {
            path: self._near[path] if path in self._near else on_device(self._arrays[path][0]) for path in paths
        }

    def get(self, path: str, at: At) -> np.ndarray:
        """Returns a layer; caches nothing."""
        x, target_leaf = self._near[path], self._arrays[path][1]
        natural = target_leaf.leaf.shape[len(at) :]
        spec = PartitionSpec(*target_leaf.sharding.spec[len(at) :])
        if not x.is_fully_addressable:
            replicated = _layer(x, at, NamedSharding(target_leaf.sharding.mesh, PartitionSpec()))
            host = np.asarray(replicated.addressable_data(0))
        else:
            layer = _layer(x, at, NamedSharding(target_leaf.sharding.mesh, spec))
            host = np.empty(layer.shape, layer.dtype)
            for shard in layer.addressable_shards:
                if shard.replica_id == 0:
                    host[shard.index] = np.asarray(shard.data)
        return host[tuple(slice(0, size) for size in natural)]


@functools.partial(jax.jit, static_argnums=2)
def _layer(x: jax.Array, at: At, sharding: NamedSharding) -> jax.Array:
    """Returns a layer as an array of its own, since jax keeps the NumPy array that an array was converted to."""
    for i in at:
        x = lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
    return lax.with_sharding_constraint(x, sharding)


class CheckpointLayers:
    """The parameters of a checkpoint; each is compared with its checksum when all its layers have been read."""

    def __init__(self, contents: Contents, leaves: Mapping[str, StoredLeaf], num_stacked: Mapping[str, int]) -> None:
        """`num_stacked` says of each leaf how many leading dimensions `at` has."""
        self._contents, self._leaves = contents, leaves
        pieces = {
            leaf.keys: (*[1] * num_stacked[path], *leaf.shape[num_stacked[path] :]) for path, leaf in leaves.items()
        }
        self._opened = contents.open(pieces)
        self._sums: dict[str, dict[At, int]] = {path: {} for path in leaves}

    def keep(self, paths: Collection[str]) -> None:
        """Does nothing: layers are read when they are asked for."""

    def get(self, path: str, at: At) -> np.ndarray:
        """Returns a layer."""
        leaf, sums = self._leaves[path], self._sums[path]
        with self._contents.errors():
            layer = np.asarray(self._opened[leaf.keys][at].read().result())
        if leaf.checksum is not None and at not in sums:
            stack = leaf.shape[: len(at)]
            first = int(np.ravel_multi_index(at, stack)) * layer.size if at else 0
            sums[at] = host_checksum(layer, first=first)
            if len(sums) == math.prod(stack) and sum(sums.values()) % 2**32 != leaf.checksum:
                raise wrong_checksums(self._contents.state_directory, [leaf.path])
        return layer
