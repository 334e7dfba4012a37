"""How gradients leave a program: reduced where they are made, or later.

    GradientExit = Reduction | Unreduced

A whole gradient of one device's rows, [D, F], leaves with a `Reduction` as this device's shard of the sum over all
devices, [D/N, F]; with an `Unreduced` it leaves as it is, to be reduced later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jzero.core.base import compat
from jzero.core.base.types import DType
from jzero.core.layout.cut import Cut
from jzero.core.layout.route import Route
from jzero.core.layout.sums import Sums


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A gradient that is reduced where it is made.

    Attributes:
      path: The parameter.
      cut: How it is cut.
      route: How it travels.
      sums: How it is summed.
      dtype: The dtype of its shards.
      by_use: Whether to reduce for each use if a loop stands between the uses.
      to_host: Whether shards move to host memory at once.
      is_awaited: Whether a loop, or the first block, waits for it if it is made outside blocks.
    """

    path: str
    cut: Cut
    route: Route
    sums: Sums
    dtype: DType
    by_use: bool
    to_host: bool = False
    is_awaited: bool = True

    def place(self, shard: jax.Array) -> jax.Array:
        """Returns a shard in its destination memory."""
        return jax.device_put(shard, jax.memory.Space.Host) if self.to_host else shard

    def on_device(self) -> Reduction:
        """Returns the reduction to device memory, for shards that equations still compute on: hosts only copy."""
        return dataclasses.replace(self, to_host=False)

    def shard_type(self) -> jax.core.ShapedArray:
        """Returns the type of its shards. [D/N, F]."""
        memory = jax.memory.Space.Host if self.to_host else jax.memory.Space.Device
        return compat.array_type(self.cut.shard_shape, self.dtype, memory)

    def zeros(self) -> jax.Array:
        """Returns the shard of a gradient that is zero."""
        return jnp.zeros(self.cut.shard_shape, self.dtype)  # [D/N, F]

    def for_row(self) -> Reduction | None:
        """Returns the reduction of one row of a stack; `None` if the rows are cut."""
        # An iteration makes one row, [D, F]. If the stack is cut over its rows, [L/N, D, F], one device holds that row.
        return None if self.cut.dim == 0 else dataclasses.replace(self, cut=self.cut.drop_leading())

    def for_shape(self, shape: Sequence[int], dims: Sequence[int] | None = None) -> Reduction:
        """Returns the reduction of an array of another shape, whose dimension `i` was `dims[i]` here."""
        cut = self.cut.for_shape(shape, range(len(shape)) if dims is None else dims)
        return dataclasses.replace(self, cut=cut)


@dataclasses.dataclass(frozen=True)
class Unreduced:
    """A whole gradient, or a summand of one, that is reduced later.

    Attributes:
      path: The parameter.
      is_awaited: Whether a loop, or the first block, waits for it if it is made outside blocks.
    """

    path: str
    is_awaited: bool = True


GradientExit: TypeAlias = Reduction | Unreduced
