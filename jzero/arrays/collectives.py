"""The collectives of ZeRO, and the padding that goes with them. The only caller of `all_gather` and `psum_scatter`.

Shape legend: `D` is the natural size of the cut dimension, `P` the padded one, `N` the devices on
the ZeRO axis, `...` all other dimensions.

[Note: Collectives beside other mesh axes]
If other mesh axes cut a parameter (tensor parallelism), the compiler handles that in the loss. But it does not split an
`all_gather` or `psum_scatter` over other axes: it gathers the operand over those first, so every device would send and
hold the whole parameter. So these two run in a `shard_map` over the other axes, each device on its own part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jzero.config.precision import cast_dtype, is_float8
from jzero.plan.layout import Cut
from jzero.plan.padded import to_natural, to_stored

__all__ = [
    "Wire",
    "batch_index",
    "from_first",
    "gather_param",
    "gather_rows",
    "mean",
    "own_shard",
    "reduce_shard",
    "reduce_whole",
    "sum_along",
    "sum_over",
]

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Wire:
    """How parameters and gradients travel between devices.

    Attributes:
      axis: The mesh axis that cuts parameters into shards.
      replica_axis: The mesh axis that repeats the shards, if any.
      reduce_scatter: Whether gradients are reduced by a reduce-scatter, or by all-reduce and slice.
      reduce_dtype: The dtype of reductions of gradients; `None`: their own.
      reduce_last: Whether gradients stay whole and local, to be reduced once after all uses and micro-batches.
      predivide: The divisor of gradients before their reduction, so that a sum over many devices does not overflow
        fp16.
      widen_bf16: Whether bf16 is summed over devices as fp32, because the backend cannot sum bf16.
    """

    axis: str
    replica_axis: str | None
    reduce_scatter: bool
    reduce_dtype: Any = None
    reduce_last: bool = False
    predivide: int = 1
    widen_bf16: bool = False

    def to_reduce(self, x: jax.Array) -> jax.Array:
        """Returns a gradient in the dtype of its reduction."""
        x = self.summable(x.astype(cast_dtype(x.dtype, self.reduce_dtype)))
        return x if self.predivide == 1 else x / self.predivide

    def summable(self, x: jax.Array) -> jax.Array:
        """Returns `x` in a dtype that the backend can sum over devices; 8 bits have no room for a sum."""
        widens = (self.widen_bf16 and x.dtype == jnp.bfloat16) or is_float8(x.dtype)
        return x.astype(jnp.float32) if widens else x

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the batch is split."""
        return (self.axis,) if self.replica_axis is None else (self.replica_axis, self.axis)


def gather_param(shard: jax.Array, cut: Cut, wire: Wire) -> jax.Array:
    """Returns a whole parameter from its shards. [..., P/N] -> [..., D]."""
    with jax.named_scope("zero_gather"):
        # Collectives do not support booleans.
        bits = shard.astype(jnp.int8) if shard.dtype == jnp.bool_ else shard
        whole = _apply_to_parts(lambda x: lax.all_gather(x, wire.axis, axis=cut.dim, tiled=True), bits, cut)
        return to_natural(whole.astype(shard.dtype), cut)


def reduce_shard(x: jax.Array, cut: Cut, wire: Wire) -> jax.Array:
    """Sums `x` over all devices with a part of the batch; returns this device's shard. [..., D] -> [..., P/N]."""
    with jax.named_scope("zero_reduce"):
        x = to_stored(wire.to_reduce(x), cut)
        if wire.reduce_scatter:
            shard = _apply_to_parts(
                lambda x: lax.psum_scatter(x, wire.axis, scatter_dimension=cut.dim, tiled=True), x, cut
            )
        else:
            shard = _own_part(sum_along(x, wire.axis), cut, wire)
        return shard if wire.replica_axis is None else sum_along(shard, wire.replica_axis)


def own_shard(x: jax.Array, cut: Cut, wire: Wire) -> jax.Array:
    """Returns this device's shard of a value that all devices hold. [..., D] -> [..., P/N]."""
    return _own_part(to_stored(x, cut), cut, wire)


def _own_part(stored: jax.Array, cut: Cut, wire: Wire) -> jax.Array:
    size = cut.stored_size // cut.num_shards
    return lax.dynamic_slice_in_dim(stored, lax.axis_index(wire.axis) * size, size, axis=cut.dim)


def _apply_to_parts(collective: Callable[[jax.Array], jax.Array], x: jax.Array, cut: Cut) -> jax.Array:
    """Applies a collective over the ZeRO axis, see [Note: Collectives beside other mesh axes]."""
    if not cut.other_axes:
        return collective(x)
    spec = PartitionSpec(*cut.other_axes[: x.ndim])
    axes = {name for names in cut.other_axes for name in names or ()}
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)(x)


def reduce_whole(x: jax.Array, wire: Wire) -> jax.Array:
    """Sums the gradient `x` over all devices with a part of the batch; every device gets all of it."""
    return sum_over(wire.to_reduce(x), wire)


def sum_over(x: jax.Array, wire: Wire) -> jax.Array:
    """Sums `x` over all devices that hold a part of the batch."""
    with jax.named_scope("zero_reduce"):
        return jnp.asarray(sum_along(wire.summable(x), *wire.batch_axes), x.dtype)


def mean(x: jax.Array, wire: Wire) -> jax.Array:
    """Averages `x` over all devices that hold a part of the batch."""
    with jax.named_scope("zero_reduce"):
        axes = _shared_axes(wire.batch_axes)
        return jnp.asarray(lax.pmean(wire.summable(x), axes), x.dtype) if axes else x


def from_first(x: jax.Array, wire: Wire) -> jax.Array:
    """Returns the `x` of the first device that holds a part of the batch."""
    with jax.named_scope("zero_reduce"):
        axes = _shared_axes(wire.batch_axes)
        if not axes:
            return x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # keys have no sum
            bits = from_first(jax.random.key_data(x), wire)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
        small = wire.summable(x.astype(jnp.int8) if x.dtype == jnp.bool_ else x)
        return lax.psum(jnp.where(lax.axis_index(axes) == 0, small, 0), axes).astype(x.dtype)


def gather_rows(x: jax.Array, wire: Wire) -> jax.Array:
    """Returns the rows of all devices, in the order of the batch. [B, ...] -> [n B, ...]."""
    with jax.named_scope("zero_reduce"):
        axes = _shared_axes(wire.batch_axes)
        bits = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
        return lax.all_gather(bits, axes, axis=0, tiled=True).astype(x.dtype) if axes else x


def sum_along(x: PyTree, *axes: str) -> PyTree:
    """Sums arrays along mesh axes, except those with one device, where XLA for CPUs would copy all arrays."""
    shared = _shared_axes(axes)
    return lax.psum(x, shared) if shared else x


def _shared_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes with more than one device."""
    return tuple(axis for axis in axes if lax.axis_size(axis) > 1)


def batch_index(wire: Wire, sizes: dict[str, int]) -> jax.Array:
    """Returns the index of this device among those that hold a part of the batch."""
    index = jnp.zeros((), jnp.int32)
    for name in wire.batch_axes:
        index = index * sizes[name] + lax.axis_index(name)
    return index
