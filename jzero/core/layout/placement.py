"""Moves single arrays: between memories, from the host onto a mesh, from a mesh to every device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jzero.core.base.types import DType
from jzero.core.layout.box import Box, Index, padded
from jzero.core.layout.casts import apply_edits, round_to
from jzero.core.layout.cut import Cut
from jzero.core.layout.mesh import HOST_MEMORY
from jzero.core.layout.padded import Padded
from jzero.core.layout.stored import InRecords, Stored

T = TypeVar("T")

Memory = Literal["device", "host", "records"]
"""On the devices, in pinned memory of each device's host, or in records, which programs do not see."""

Look: TypeAlias = Callable[[np.ndarray], None]
"""A function that gets a whole value, on the host."""


def memory_of(x: object) -> Memory:
    """Returns where an array, a tracer, or a leaf in records is."""
    if isinstance(x, InRecords):
        return "records"
    if isinstance(x, jax.core.Tracer):
        return "host" if jax.typeof(x).memory_space == jax.memory.Space.Host else "device"
    return "host" if isinstance(x, jax.Array) and x.sharding.memory_kind == HOST_MEMORY else "device"


def on_device(x: Stored) -> jax.Array:
    """Returns an array in device memory, as programs need it; copies it from the host or reads it from disk."""
    if isinstance(x, InRecords):
        return x.read()
    if memory_of(x) == "device":
        return x
    if isinstance(x, jax.core.Tracer):
        return jax.device_put(x, jax.memory.Space.Device)
    device: jax.Device = next(iter(x.sharding.addressable_devices))
    return jax.device_put(x, x.sharding.with_memory_kind(device.default_memory().kind))


def to_memory(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array on the devices in the memory of a sharding; waits for copies to the host."""
    return x if x.sharding.memory_kind == sharding.memory_kind else jax.block_until_ready(jax.device_put(x, sharding))


def copy_array(x: jax.Array) -> jax.Array:
    """Returns a copy of an array, in its place, in buffers that can be donated; compiles nothing."""
    return jax.device_put(x, x.sharding, may_alias=False)


def device_sharding(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in device memory."""
    return NamedSharding(sharding.mesh, sharding.spec)


def make_strongly_typed(x: ArrayLike, dtype: DType) -> jax.Array:
    """Returns a number or array as an array of exactly `dtype`, so that the next step sees the same type again."""
    if isinstance(x, jax.Array) and x.dtype == dtype and not getattr(x, "weak_type", False):
        return x
    return lax.convert_element_type(x, dtype)


def overwrite(x: jax.Array, new: jax.Array) -> jax.Array:
    """Returns `new` in the dtype of `x`; if it has fewer bits, takes only the elements that differ from `x`."""
    floats = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(new.dtype, jnp.floating)
    return apply_edits(x, new) if floats and x.dtype != new.dtype else make_strongly_typed(new, x.dtype)


def place_array(
    x: ArrayLike, dtype: DType, sharding: NamedSharding, cut: Cut | None = None, *, look: Look | None = None
) -> jax.Array:
    """Returns an array or a number placed by a sharding: committed, strongly typed, no buffer shared.

    Args:
      x: With several processes, each must pass the same whole value, or `x` must be a global array.
      dtype: The dtype of the result.
      sharding: Its sharding.
      cut: How the result is stored; `None` if in its natural shape.
      look: Gets the whole value if this process supplies its own to a mesh of several processes.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        if sharding.is_fully_addressable and isinstance(x, jax.Array):
            return _put(x, sharding)
        data = place_array(jax.random.key_data(x), np.dtype(np.uint32), sharding, look=look)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    # What is in the host's memory is cut there: the devices would compile a program for each shape.
    if isinstance(x, jax.Array) and not (x.is_fully_addressable and is_on_cpu(x)):
        x = make_strongly_typed(x, dtype)
        if not x.is_fully_addressable:
            on_devices = relayout(on_device(x), None, cut, dtype, device_sharding(sharding))
            return jax.device_put(on_devices, sharding) if sharding.memory_kind == HOST_MEMORY else on_devices
        if sharding.is_fully_addressable and cut is None:
            return _put(x, sharding)
    host = np.asarray(x, dtype)
    if look is not None and not sharding.is_fully_addressable:
        look(host)
    shape = host.shape if cut is None else cut.stored_shape
    flat = host if cut is None else host.reshape(cut.unpadded_shape)

    def part(index: Index | None) -> np.ndarray:
        # A copy, since the runtime may keep a reference to its input.
        return padded(lambda box: np.array(box.take(flat)), Box.of(index or (), shape), flat.shape, host.dtype)

    placed = jax.make_array_from_callback(shape, sharding, part)
    return copy_array(placed) if is_on_cpu(placed) else placed  # it may use a part's memory, which cannot be donated


def is_on_cpu(x: jax.Array) -> bool:
    """Whether all devices of an array are CPUs, so that NumPy can read it where it lies."""
    devices: set[jax.Device] = x.sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    # To another sharding, `device_put` reuses the buffer of a device that has its part, whatever `may_alias` says.
    same_parts = sharding.shard_shape(x.shape) == x.sharding.shard_shape(x.shape)
    return jax.device_put(copy_array(x) if same_parts else x, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def relayout(x: jax.Array, cut: Cut | None, new: Cut | None, dtype: DType, sharding: NamedSharding) -> jax.Array:
    """Returns an array stored by `cut` as `new` stores it, cast to a dtype; `None` stands for the natural shape."""
    x = round_to(x, dtype)
    if cut != new:
        x = x if cut is None else cut.to_natural(x)
        x = x if new is None else new.to_stored(x)
    return lax.with_sharding_constraint(x, sharding)


def gather_padded(x: T | Padded) -> T | jax.Array:
    """Returns a padded leaf whole on every device, in its natural shape; anything else as it is."""
    if not isinstance(x, Padded):
        return x
    x.check_alive()
    sharding = getattr(x.stored, "sharding", None)
    is_placed = isinstance(x.stored, jax.Array) and not isinstance(x.stored, jax.core.Tracer)
    if not is_placed or not isinstance(sharding, NamedSharding):
        return x.natural
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    return gather_arrays([on_device(x.stored)], (x.cut_now,), replicated)[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def gather_arrays(arrays: list[jax.Array], cuts: tuple[Cut | None, ...], sharding: NamedSharding) -> list[jax.Array]:
    """Returns stored arrays in natural shapes, whole on every device as `sharding` says."""

    def gather(x: jax.Array, cut: Cut | None) -> jax.Array:
        # Gather first, then slice: an uneven array cannot leave `jit`.
        gathered = lax.with_sharding_constraint(x, sharding)
        return gathered if cut is None else lax.with_sharding_constraint(cut.to_natural(gathered), sharding)

    return [gather(x, cut) for x, cut in zip(arrays, cuts, strict=True)]
