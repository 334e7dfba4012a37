"""Functions of one device's part of an array that other mesh axes cut, too.

[Note: Collectives beside other mesh axes]
If other mesh axes cut a parameter (tensor parallelism), the compiler handles that in the loss. But it does not split an
`all_gather` or `psum_scatter` over other axes: it gathers the operand over those first, so every device would send and
hold the whole parameter. So these two run in a `shard_map` over the other axes, each device on its own part. So does
the packing of blocks, which would join parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec

from jzero.core.base.types import AxisNames

Axes: TypeAlias = tuple[AxisNames, ...]
"""The mesh axes of each dimension."""


def apply_to_parts(fn: Callable[[jax.Array], jax.Array], x: jax.Array, before: Axes, after: Axes) -> jax.Array:
    """Applies a function to each device's part of an array.

    Args:
      fn: The function.
      x: The array.
      before: The other mesh axes that cut each dimension of `x`, if any.
      after: Those of the result.
    """
    if not before:
        return fn(x)
    axes = set(jax.tree.leaves(before))
    mapped = jax.shard_map(
        fn, in_specs=PartitionSpec(*before), out_specs=PartitionSpec(*after), axis_names=axes, check_vma=False
    )
    result: jax.Array = mapped(x)
    return result
