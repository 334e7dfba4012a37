"""How gradients leave the walk.

In: a whole gradient of one device's rows, [D, F]. Out: this device's shard of the sum over all devices, [D/N, F], where
the gradient is made (`Reduction`); or the gradient as it is, to be reduced later (`Part`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jzero.arrays.collectives import Wire, reduce_shard
from jzero.plan.layout import Cut

__all__ = ["Leaving", "OnShards", "Part", "Reduction"]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a gradient leaves: reduced where it is made.

    Attributes:
      cut: How it is cut.
      wire: The axes that it is reduced over, and how.
      dtype: What its shards are kept in.
      by_use: Whether those of uses with a loop between them are reduced one by one.
      to_host: Whether shards go to the host's memory at once.
      is_awaited: Whether a loop, or the first block, waits for it, if it is made outside of blocks.
    """

    cut: Cut
    wire: Wire
    dtype: Any
    by_use: bool
    to_host: bool = False
    is_awaited: bool = True

    def __call__(self, grad: jax.Array) -> jax.Array:
        """Returns this device's shard of the sum over all devices. [..., D] -> [..., P/N]."""
        return self.placed(reduce_shard(grad, self.cut, self.wire).astype(self.dtype))

    def placed(self, shard: jax.Array) -> jax.Array:
        """Returns a shard in the memory that it leaves for."""
        return jax.device_put(shard, jax.memory.Space.Host) if self.to_host else shard

    def on_device(self) -> Reduction:
        """Returns the same for what is still computed on: hosts only copy."""
        return dataclasses.replace(self, to_host=False)

    def zeros(self) -> jax.Array:
        """Returns the shard of a gradient that is zero."""
        return jnp.zeros(self.cut.shard_shape, self.dtype)

    def row(self) -> Reduction | None:
        """Returns how a row of a stack leaves, if rows can."""
        return None if self.cut.dim == 0 else dataclasses.replace(self, cut=self.cut.drop_leading())

    def of(self, shape: Sequence[int], dims: Sequence[int] | None = None) -> Reduction:
        """Returns the same of an array of another shape; `dims` says which dimension each of its own was."""
        old, dims = self.cut, list(range(len(shape)) if dims is None else dims)
        other_axes = [
            old.other_axes[d] if old.other_axes and shape[i] == old.shape[d] else None for i, d in enumerate(dims)
        ]
        kept = tuple(other_axes) if any(other_axes) else ()
        cut = Cut(dims.index(old.dim), tuple(shape), old.num_shards, old.flat, kept)
        return dataclasses.replace(self, cut=cut)

    def own(self, values: Sequence[Any], untouched: Any) -> list[Any]:
        """Returns of one value for each dimension those of a shard's: `untouched` for what is cut."""
        cut = self.cut
        return [*values[: cut.dim], untouched, *(() if cut.flat else values[cut.dim + 1 :])]

    def leaves_alone(self, dims: Sequence[bool]) -> bool:
        """Whether those dimensions of a shard that are cut are left alone; `dims` says of each whether it is."""
        return all(dims[self.cut.dim :]) if self.cut.flat else dims[self.cut.dim]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a gradient, or a whole one, that is reduced later.

    Attributes:
      is_awaited: Whether a loop, or the first block, waits for it, if it is made outside of blocks.
    """

    is_awaited: bool = True


Leaving: TypeAlias = Reduction | Part


class OnShards(NamedTuple):
    """An equation that is done to shards.

    Attributes:
      inputs: How those of its inputs leave that are gradients.
      apply: Given all inputs, shards among them, returns the shard of the result.
    """

    inputs: Mapping[int, Reduction]
    apply: Callable[[list[Any]], jax.Array]
