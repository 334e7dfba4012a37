"""How one stored parameter reaches the loss: by which hops, once or at each use, and in which dtype or blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jzero._types import DType
from jzero.config.leaf_rule import LeafRule
from jzero.jaxpr.sizes import itemsize
from jzero.layout.blocks import LEAST
from jzero.layout.comm import Comm, Hop
from jzero.layout.leaves import StateLeaf


class Way(NamedTuple):
    """How a partitioned parameter travels.

    Attributes:
      leaf: The parameter as stored.
      comm: How its shards travel.
      kind: In which blocks they travel, `int8`, or "none".
      is_secondary: Whether it is gathered between nodes once per step, before all uses.
      stays: Whether it stays whole from its first to its last use, in both passes.
    """

    leaf: StateLeaf
    comm: Comm
    kind: str = "none"
    is_secondary: bool = False
    stays: bool = False

    def hops(self, dtype: DType) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
        """Returns the collectives once per step, and those of each use in a dtype; none if it stays whole."""
        cut, mesh = self.leaf.cut_for_collectives, self.leaf.mesh
        if cut is None:
            return (), ()
        cut = cut if self.kind == "none" or cut.blocks else cut.in_blocks(self.kind, dtype, mesh.shape)
        cut, levels = cut.of_part(mesh.shape), self.comm.split() if self.is_secondary else None
        if levels is None:
            return (), self.comm.gather_hops(cut, dtype)
        once = levels.between.gather_hops(levels.cut_between(cut), cut.dtype_sent(dtype))
        return once, levels.within.gather_hops(levels.cut_within(cut), dtype)


def why_not_stored(leaf: StateLeaf, rule: LeafRule) -> str:
    """Returns why a frozen parameter cannot be stored in blocks; an empty string if it can."""
    return why_exact(leaf, rule) if not any(leaf.base) else "cut over other mesh axes, too"


def why_exact(leaf: StateLeaf, rule: LeafRule) -> str:
    """Returns why a leaf cannot travel in blocks; an empty string if it can."""
    cut = leaf.cut
    if cut is None or rule.quantize is False:
        return "by rule" if cut else "whole"
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or itemsize(leaf.dtype) < 2:
        return f"{leaf.dtype} is no floating-point dtype of 16 bits or more"
    if cut.blocks is not None:
        return ""
    if cut.flat:
        return "flattened"
    if cut.num_stacked > 1:  # a loop would transpose it, and blocks cannot be
        return f"scanned over dimension {cut.num_stacked - 1}, not 0"
    beside = cut.with_other_axes(leaf.base, leaf.mesh.shape).of_part(leaf.mesh.shape).size_beside
    return f"{beside} elements beside the cut, fewer than {LEAST}" if beside < LEAST else ""
