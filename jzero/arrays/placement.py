"""Moves single leaves between natural and stored arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.layout.casts import apply_edits
from jzero.layout.cut import Cut
from jzero.layout.leaves import LeafPlan, Memory, StateLeaf
from jzero.layout.mesh import HOST_MEMORY, AnyMesh, mesh_platform
from jzero.layout.misfits import describe_misfit
from jzero.layout.on_disk import OnDisk
from jzero.layout.padded import is_padded, pack_shard, to_natural, to_stored
from jzero.plan.plan import ZeroPlan

Look: TypeAlias = Callable[[np.ndarray], None]
"""A function that gets a whole value, on the host."""


def memory_of(x: Any) -> Memory:
    """Returns where an array, a tracer, or a leaf in records is."""
    if isinstance(x, OnDisk):
        return "disk"
    if isinstance(x, jax.core.Tracer):
        return "host" if jax.typeof(x).memory_space == jax.memory.Space.Host else "device"
    return "host" if isinstance(x, jax.Array) and x.sharding.memory_kind == HOST_MEMORY else "device"


def on_device(x: jax.Array | OnDisk) -> jax.Array:
    """Returns an array in device memory, as programs need it; copies it from the host or reads it from disk."""
    if isinstance(x, OnDisk):
        return x.read()
    if memory_of(x) == "device":
        return x
    if isinstance(x, jax.core.Tracer):
        return jax.device_put(x, jax.memory.Space.Device)
    device: Any = next(iter(x.sharding.addressable_devices))
    return jax.device_put(x, x.sharding.with_memory_kind(device.default_memory().kind))


def plain_leaf(leaf: StateLeaf) -> StateLeaf:
    """Returns the layout of a leaf as numbers on the devices, if it is stored in blocks."""
    if leaf.cut is None or leaf.cut.blocks is None:
        return leaf
    return dataclasses.replace(leaf, cut=leaf.cut.unpacked(), memory="device")


def natural_leaf(x: jax.Array, leaf: StateLeaf, plan: ZeroPlan) -> jax.Array:
    """Returns a leaf, given in natural or stored shape, in its natural shape on the devices, cut if possible.

    Inside `jit`.
    """
    cut, x = leaf.cut, on_device(x)
    if cut is None:
        return x
    check_leaf_shape(x, leaf)
    if cut.blocks is not None:  # each device unpacks its own shard
        leaf = plain_leaf(leaf)
        x = unpack_leaf(x, cut, leaf.device_sharding) if tuple(x.shape) == cut.stored_shape else x
        return natural_leaf(x, leaf, plan)
    if tuple(x.shape) == cut.stored_shape:
        x = to_natural(x, cut)
    # A flattened leaf has no natural dimension to cut: the compiler chooses its layout.
    return x if cut.flat else lax.with_sharding_constraint(x, leaf.device_sharding)


def stored_leaf(x: jax.Array, leaf: StateLeaf, plan: ZeroPlan) -> jax.Array:
    """Returns a leaf, given in natural or stored shape, as the plan stores it. Inside `jit`."""
    memory = leaf.array_memory
    if isinstance(x, OnDisk) or (memory == "host" and memory_of(x) == "host"):
        return x
    if leaf.cut is not None and tuple(x.shape) == leaf.cut.shape and not leaf.cut.is_stored_naturally:
        if leaf.cut.blocks is not None:  # each device packs its own shard
            x = pack_leaf(stored_leaf(x, plain_leaf(leaf), plan), leaf.cut, leaf.device_sharding)
        else:
            x = to_stored(x, leaf.cut)
    x = lax.with_sharding_constraint(x, leaf.device_sharding)
    return jax.device_put(x, jax.memory.Space.Host) if memory == "host" else x


def check_leaf_shape(x: jax.Array, leaf: StateLeaf) -> None:
    """Raises unless an array has a leaf's natural or stored shape."""
    if tuple(x.shape) not in (leaf.shape, leaf.stored_shape):
        if tuple(x.shape[1:]) == leaf.shape:
            raise ValueError(
                f"{leaf.path!r} has shape {tuple(x.shape)}, that of the parameter with one more dimension in front: a "
                "gradient of each example? A sharded state takes one gradient per parameter. Aggregate them first, for "
                "example by `update` of `optax.contrib.differentially_private_aggregate` on gradients and parameters "
                "of `jzero.natural_params(state)`, and hand the result to an optimizer without that transformation."
            )
        raise ValueError(
            f"{leaf.path!r} has shape {tuple(x.shape)}; the plan knows it as {leaf.shape} (natural) or "
            f"{leaf.stored_shape} (stored). Hand over "
            "gradients of `jzero.natural_params(state)` or those that `value_and_grad` returns."
        )


def check_names_host_memory(plan: ZeroPlan) -> None:
    """Raises if a plan uses host memory on devices that report no memories: they would keep the arrays themselves."""
    if not plan.names_host_memory and any(plan.host_bytes_per_device):
        raise ValueError(
            f"The plan keeps {plan.host_bytes_per_device.total} bytes per device in host memory, but these devices "
            f"({mesh_platform(plan.mesh)}) do not say what memories they have, so nothing can be placed "
            "there. Set `offload=jzero.Offload()`."
        )


def device_sharding(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in device memory."""
    return NamedSharding(sharding.mesh, sharding.spec)


def make_strongly_typed(x: Any, dtype: Any) -> jax.Array:
    """Returns a number or array as an array of exactly `dtype`, so that the next step sees the same type again."""
    is_plain = isinstance(x, jax.Array) and x.dtype == dtype and not getattr(x, "weak_type", False)
    return x if is_plain else lax.convert_element_type(x, dtype)


def overwrite(x: jax.Array, new: jax.Array) -> jax.Array:
    """Returns `new` in the dtype of `x`; if it has fewer bits, takes only the elements that differ from `x`."""
    floats = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(new.dtype, jnp.floating)
    return apply_edits(x, new) if floats and x.dtype != new.dtype else make_strongly_typed(new, x.dtype)


def place_leaf(x: Any, leaf: StateLeaf, plan: ZeroPlan, *, look: Look | None = None) -> jax.Array:
    """Returns a leaf given in natural shape as the plan stores it: committed, strongly typed, no buffer shared.

    Args:
      x: An array of any kind, or a number; with several processes, each must pass the same whole value,
        or `x` must be a global array.
      leaf: Its layout.
      plan: The plan of `leaf`.
      look: Gets the whole value if this process supplies its own to a mesh of several processes.
    """
    check_names_host_memory(plan)
    is_whole = not isinstance(x, jax.Array) and jnp.issubdtype(leaf.dtype, np.integer)
    if is_whole and (why := describe_misfit(np.asarray(x), leaf.dtype)):
        raise ValueError(f"{leaf.path} holds {why}: enable wider numbers, `jax.config.update('jax_enable_x64', True)`.")
    if leaf.cut is not None and leaf.cut.blocks is not None:  # packed where it lies: each device its own shard
        exact = place_leaf(x, plain_leaf(leaf), plan, look=look)
        packed = pack_leaf(exact, leaf.cut, leaf.device_sharding)
        return jax.device_put(packed, leaf.sharding) if leaf.memory == "host" else packed
    sharding = leaf.sharding
    cut = leaf.cut if leaf.cut is not None and not leaf.cut.is_stored_naturally else None
    return place_array(x, leaf.dtype, sharding, cut, look=look)


@functools.partial(jax.jit, static_argnums=(1, 2))
def pack_leaf(x: jax.Array, cut: Cut, sharding: NamedSharding) -> jax.Array:
    """Returns a stored leaf of numbers in blocks, as `cut` says; each device packs its own shard."""
    plain = cut.unpacked()
    spec = PartitionSpec(*[None] * plain.dim, sharding.spec[cut.dim])
    packed: jax.Array = jax.shard_map(
        lambda shard: pack_shard(shard, plain, cut), mesh=sharding.mesh, in_specs=spec, out_specs=sharding.spec
    )(x)
    return packed


@functools.partial(jax.jit, static_argnums=(1, 2))
def unpack_leaf(x: jax.Array, cut: Cut, sharding: NamedSharding) -> jax.Array:
    """Returns a leaf stored in blocks as one of numbers, stored by `cut.unpacked()`; each device unpacks its shard."""
    part = cut.for_one_shard()
    spec = PartitionSpec(*[None] * cut.dim, sharding.spec[cut.packed_dim])
    plain: jax.Array = jax.shard_map(
        lambda shard: to_natural(shard, part), mesh=sharding.mesh, in_specs=spec, out_specs=sharding.spec
    )(x)
    return plain


def place_array(
    x: Any, dtype: Any, sharding: NamedSharding, cut: Cut | None = None, *, look: Look | None = None
) -> jax.Array:
    """Returns `x` placed by `sharding`, in the stored shape of `cut` if one is given; `look` as for `place_leaf`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        if sharding.is_fully_addressable:
            return _put(x, sharding)
        data = place_array(jax.random.key_data(x), np.dtype(np.uint32), sharding, look=look)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array):
        x = make_strongly_typed(x, dtype)
        if not x.is_fully_addressable:
            near = _relayout(on_device(x), device_sharding(sharding), cut)
            return jax.device_put(near, sharding) if sharding.memory_kind == HOST_MEMORY else near
        if sharding.is_fully_addressable and cut is None:
            return _put(x, sharding)
    host = np.asarray(x, dtype)
    if look is not None and not sharding.is_fully_addressable:
        look(host)
    shape = host.shape if cut is None else cut.stored_shape

    def part(index: Any) -> np.ndarray:
        # A copy, since the runtime may keep a reference to its input.
        return np.array(host[index]) if cut is None else _stored_part(host, cut, index)

    return jax.make_array_from_callback(shape, sharding, part)


def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    # `device_put` reuses the buffer of a device that already has its part, whatever `may_alias` says.
    same_parts = sharding.shard_shape(x.shape) == x.sharding.shard_shape(x.shape)
    return jax.device_put(x.copy() if same_parts else x, sharding)


def _stored_part(host: np.ndarray, cut: Cut, index: tuple[slice, ...]) -> np.ndarray:
    """Returns one device's part of the stored array, padded with zeros beyond the natural size."""
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
    return _gather([on_device(x) for x in arrays], tuple(leaf.cut for leaf in leaves), sharding)


def gather_padded(x: Any) -> Any:
    """Returns a padded leaf whole on every device, in its natural shape; anything else as it is."""
    if not is_padded(x):
        return x
    x.check_alive()
    sharding = getattr(x.stored, "sharding", None)
    is_placed = isinstance(x.stored, jax.Array) and not isinstance(x.stored, jax.core.Tracer)
    if not is_placed or not isinstance(sharding, NamedSharding):
        return x.natural
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return _gather([on_device(x.stored)], (x.cut_now,), whole)[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gather(arrays: list[jax.Array], cuts: tuple[Cut | None, ...], sharding: NamedSharding) -> list[jax.Array]:
    def gather(x: jax.Array, cut: Cut | None) -> jax.Array:
        # Gather first, then slice: an uneven array cannot leave `jit`.
        whole = lax.with_sharding_constraint(x, sharding)
        return whole if cut is None else lax.with_sharding_constraint(to_natural(whole, cut), sharding)

    return [gather(x, cut) for x, cut in zip(arrays, cuts, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def edit_master(leaf: LeafPlan, plan: ZeroPlan, param: jax.Array, master: jax.Array) -> jax.Array:
    """Returns a stored master with the edits of its parameter, see [Note: Masters]."""
    assert leaf.master is not None
    cut = natural_leaf(param, leaf.grad if leaf.trained else leaf.param, plan)
    return stored_leaf(apply_edits(natural_leaf(master, leaf.grad, plan), cut), leaf.master, plan)
