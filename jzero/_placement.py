"""Moves single leaves between natural and stored arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero._collectives import to_natural, to_stored
from jzero._layout import Cut
from jzero._mesh import AnyMesh
from jzero._plan import StateLeaf, ZeroPlan

__all__ = ["HOST_MEMORY", "gather_leaves", "is_on_host", "on_device", "place_array", "place_leaf", "strong"]

HOST_MEMORY = "pinned_host"
"""The memory of a device's host that the device copies from and to by itself: page-locked."""


def is_on_host(x: Any) -> bool:
    """Whether an array lies in a device's host memory."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.sharding.memory_kind == HOST_MEMORY


def on_device(x: jax.Array) -> jax.Array:
    """Returns an array as it is, or a copy in device memory of one that lies on the host: programs want it there."""
    if not is_on_host(x):
        return x
    device: Any = next(iter(x.sharding.addressable_devices))
    return jax.device_put(x, x.sharding.with_memory_kind(device.default_memory().kind))


def strong(x: Any, dtype: Any) -> jax.Array:
    """Returns a number or array as an array of exactly `dtype`, so that the next step sees the same type again."""
    is_plain = isinstance(x, jax.Array) and x.dtype == dtype and not getattr(x, "weak_type", False)
    return x if is_plain else lax.convert_element_type(x, dtype)


def place_leaf(x: Any, leaf: StateLeaf, plan: ZeroPlan) -> jax.Array:
    """Returns a leaf given in natural shape as the plan stores it: committed, strongly typed, no buffer shared.

    Args:
      x: An array of any kind, or a number; in several processes each must hold the same whole value,
        or `x` must be a global array.
      leaf: Its layout.
      plan: The plan that `leaf` belongs to.
    """
    sharding = plan.sharding(leaf)
    cut = leaf.cut if leaf.cut is not None and not leaf.cut.is_stored_naturally else None
    return place_array(x, leaf.dtype, sharding, cut)


def place_array(x: Any, dtype: Any, sharding: NamedSharding, cut: Cut | None = None) -> jax.Array:
    """Returns `x` placed by `sharding`, in the stored shape of `cut` if one is given."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        if sharding.is_fully_addressable:
            return _put(x, sharding)
        data = place_array(jax.random.key_data(x), np.dtype(np.uint32), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array):
        x = strong(x, dtype)
        if not x.is_fully_addressable:
            return _relayout(x, sharding, cut)
        if sharding.is_fully_addressable and cut is None:
            return _put(x, sharding)
    host = np.asarray(x, dtype)
    shape = host.shape if cut is None else cut.stored_shape

    def part(index: Any) -> np.ndarray:
        # A copy, since the runtime may keep a reference to what it is given.
        return np.array(host[index]) if cut is None else _stored_part(host, cut, index)

    return jax.make_array_from_callback(shape, sharding, part)


def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    # `device_put` hands on the buffer of a device that has its part already, whatever `may_alias` says.
    same_parts = sharding.shard_shape(x.shape) == x.sharding.shard_shape(x.shape)
    return jax.device_put(x.copy() if same_parts else x, sharding)


def _stored_part(host: np.ndarray, cut: Cut, index: tuple[slice, ...]) -> np.ndarray:
    """One device's part of the stored array, padded with zeros beyond the natural size."""
    flat = host.reshape(*cut.shape[: cut.dim], cut.natural_size) if cut.flat else host
    start, stop, _ = index[cut.dim].indices(cut.stored_size)
    found = flat[(*index[: cut.dim], slice(start, min(stop, cut.natural_size)), *index[cut.dim + 1 :])]
    widths = [(0, 0)] * flat.ndim
    widths[cut.dim] = (0, stop - start - found.shape[cut.dim])
    return np.pad(found, widths)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _relayout(x: jax.Array, sharding: NamedSharding, cut: Cut | None) -> jax.Array:
    return lax.with_sharding_constraint(x if cut is None else to_stored(x, cut), sharding)


def gather_leaves(arrays: Sequence[jax.Array], leaves: Sequence[StateLeaf], mesh: AnyMesh) -> list[jax.Array]:
    """Returns stored leaves whole on every device, in their natural shapes, gathered by one program."""
    if not arrays:
        return []
    sharding = NamedSharding(mesh, PartitionSpec())
    return _gather(list(arrays), tuple(leaf.cut for leaf in leaves), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gather(arrays: list[jax.Array], cuts: tuple[Cut | None, ...], sharding: NamedSharding) -> list[jax.Array]:
    def gather(x: jax.Array, cut: Cut | None) -> jax.Array:
        # Whole first, then sliced: an uneven array may not leave `jit`.
        whole = lax.with_sharding_constraint(x, sharding)
        return whole if cut is None else lax.with_sharding_constraint(to_natural(whole, cut), sharding)

    return [gather(x, cut) for x, cut in zip(arrays, cuts, strict=True)]
