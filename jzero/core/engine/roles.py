"""The roles of a parameter in the loss: where its value is held, and where its gradient is reduced.

    Role.of(leaf, *, reduce_last) -> Role

    held    the loss gets      its gradient is                     stage
    whole   the array          all-reduced at the end              0; leaves too small to cut
    whole   the array          reduce-scattered at the end         1 with micro-batches; 2 with `reduce="last"`
    whole   the array          reduce-scattered where it is made   1, 2; small leaves at 3
    shard   a lazy parameter   reduce-scattered where it is made   3
    shard   a lazy parameter   reduce-scattered at the end         3 with `reduce="last"`

"At the end" means after all micro-batches. A `Parameter` also says how its gradient is summed and whether a step waits
for it, which differ between stages, too. Elsewhere is decided what is cut (`jzero.core.plan`), and that stage 1 reduces
at the end (`gradients`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jzero.core.arrays.collectives import reduce_whole
from jzero.core.base.types import DType
from jzero.core.config.precision import is_float8, wide_dtype
from jzero.core.engine.gradient_rules import GradientExit, Reduction, Unreduced
from jzero.core.engine.placed import reduce_p
from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import LeafPlan
from jzero.core.layout.route import Leg, Route, Sums
from jzero.core.plan.traffic import GatherPlan


class Role(NamedTuple):
    """A parameter's role.

    Attributes:
      is_sharded: Whether its value is held as a shard.
      reduces_early: Whether its gradient is reduced where it is made.
    """

    is_sharded: bool
    cuts_gradient: bool
    reduces_early: bool

    @classmethod
    def of(cls, leaf: LeafPlan, *, reduce_last: bool) -> Role:
        """Returns the role of a parameter; with `reduce_last`, gradients are reduced after all micro-batches."""
        is_cut = leaf.grad.cut is not None
        return cls(leaf.param.cut is not None, is_cut, is_cut and not reduce_last)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter in a step.

    Attributes:
      leaf: Its layout.
      gather: How it reaches the loss.
      route: How its gradient travels.
      sums: How its gradient is summed.
      reduce_last: Whether gradients are reduced once, after all micro-batches.
      to_host: Whether its gradient moves to the host as soon as it is reduced.
      reduces_once: Whether its gradient is reduced between nodes once, after all micro-batches.
    """

    leaf: LeafPlan
    gather: GatherPlan
    route: Route
    sums: Sums
    reduce_last: bool
    stage: int
    to_host: bool
    reduces_once: bool = False

    @property
    def role(self) -> Role:
        """Its role."""
        return Role.of(self.leaf, reduce_last=self.reduce_last)

    @property
    def is_differentiable(self) -> bool:
        """Whether it has a gradient."""
        return self.leaf.trained and jnp.issubdtype(self.leaf.param.dtype, jnp.inexact)

    @property
    def gradient_exit(self) -> GradientExit | None:
        """How its gradient leaves the program; `None` if it is all-reduced afterwards and nothing waits for it."""
        is_sharded, is_cut, early = self.role
        cut = self.leaf.grad.cut_for_collectives
        if not is_cut or cut is None:
            return Unreduced(self.leaf.path) if self.stage == 0 else None
        # Parameters that stay whole at stage 3 are small: waiting for that of the final norm exposes communication.
        is_awaited = is_sharded or self.stage < 3
        if not early:
            return Unreduced(self.leaf.path, is_awaited)  # [D, F]: summed over micro-batches, then reduced
        by_use = self.stage > 1  # stage 1 has the memory to sum whole gradients
        cut, route = self._legs(cut)[0]
        dtype = jnp.dtype(self.sum_dtype)
        by_rows = self.gather.lookups != "none"
        return Reduction(self.leaf.path, cut, route, self.sums, dtype, by_use, by_rows, self.to_host, is_awaited)

    def _legs(self, cut: Cut) -> tuple[Leg, ...]:
        return self.route.legs(cut) if self.reduces_once else ((cut, self.route),)

    @property
    def sum_dtype(self) -> DType:
        """The dtype of its reduced gradient, also as a sum over micro-batches: 8 bits have no room for a sum."""
        dtype = self.leaf.grad.dtype
        return wide_dtype(dtype) if is_float8(dtype) else dtype

    def like_gradient(self) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of its gradient as the walk returns it."""
        if isinstance(self.gradient_exit, Reduction):
            return jax.ShapeDtypeStruct(self.gradient_exit.cut.shard_shape, self.gradient_exit.dtype)  # [D/N, F]
        return jax.ShapeDtypeStruct(self.leaf.param.shape, self.leaf.compute_dtype)  # [D, F]

    def finish(self, grad: jax.Array | None) -> jax.Array:
        """Returns the gradient from the walk, reduced over all devices, in the plan's layout."""
        cut = self.leaf.grad.cut_for_collectives
        if grad is None:  # integers, frozen parameters
            return jnp.zeros(self.leaf.grad.shape if cut is None else cut.shard_shape, self.leaf.grad.dtype)
        if cut is None:
            return reduce_whole(grad, self.sums)
        legs, sums, dtype = self._legs(cut), self.sums, self.sums.dtype_of(grad.dtype)
        if isinstance(self.gradient_exit, Reduction):  # the program has reduced it, at least within its node
            legs, sums, dtype = legs[1:], dataclasses.replace(sums, predivide=1), self.sum_dtype
        for part, route in legs:
            how = {"cut": part, "dtype": jnp.dtype(dtype), "route": route, "sums": sums}
            grad = reduce_p.bind(grad, path=self.leaf.path, is_awaited=False, **how)
        return grad  # [D/N, F]
