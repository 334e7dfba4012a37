"""The roles of a parameter: all that differs between ZeRO's stages.

    role                    held   the loss gets     its gradient is                    stage
    REPLICATED              whole  the array         all-reduced at the end             0; leaves too small to cut
    REDUCED_AT_END          whole  the array         reduce-scattered at the end        1 with micro-batches
    REDUCED_AS_MADE         whole  the array         reduce-scattered where it is made  1, 2; small leaves at 3
    SHARDED                 shard  a lazy parameter  reduce-scattered where it is made  3
    SHARDED_REDUCED_AT_END  shard  a lazy parameter  reduce-scattered at the end        3 with `reduce="last"`

In: a parameter's plan. Out: how the walk takes it, and how its gradient leaves. "The end" is after all micro-batches.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from jzero.arrays.casts import round_without_derivative
from jzero.arrays.collectives import Wire, reduce_shard, reduce_whole
from jzero.config.precision import is_float8, wide_dtype
from jzero.engine.lazy import Lazy
from jzero.engine.leaving import Leaving, Part, Reduction
from jzero.plan.leaves import LeafPlan
from jzero.plan.mesh import AnyMesh

__all__ = ["Parameter", "Role"]


class Role(enum.Enum):
    """What a parameter is to the loss: `(is held as a shard, its gradient is cut, and reduced as it is made)`."""

    REPLICATED = (False, False, False)
    REDUCED_AT_END = (False, True, False)
    REDUCED_AS_MADE = (False, True, True)
    SHARDED = (True, True, True)
    SHARDED_REDUCED_AT_END = (True, True, False)

    @classmethod
    def of(cls, leaf: LeafPlan, wire: Wire) -> Role:
        """Returns the role that a plan gives to a parameter."""
        is_cut = leaf.grad.cut is not None
        return cls((leaf.param.cut is not None, is_cut, is_cut and not wire.reduce_last))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter in a step.

    Attributes:
      leaf: Its layout.
      mesh: The mesh.
      wire: How it travels.
      stage: The stage.
      to_host: Whether its gradient leaves for the host as soon as it is reduced.
    """

    leaf: LeafPlan
    mesh: AnyMesh
    wire: Wire
    stage: int
    to_host: bool

    @property
    def role(self) -> Role:
        """What it is to the loss."""
        return Role.of(self.leaf, self.wire)

    @property
    def moves(self) -> bool:
        """Whether it has a gradient."""
        return self.leaf.trained and jnp.issubdtype(self.leaf.param.dtype, jnp.inexact)

    @property
    def leaving(self) -> Leaving | None:
        """How its gradient leaves in the walk; `None` if that is all-reduced."""
        is_held_cut, is_cut, as_made = self.role.value
        cut = self.leaf.grad.for_collectives(self.mesh)
        if not is_cut or cut is None:
            return None
        # At stage 3 parameters that stay whole are small: to wait for a norm beside the head exposes communication.
        is_awaited = is_held_cut or self.stage < 3
        if not as_made:
            return Part(is_awaited)
        by_use = self.stage > 1  # stage 1 has the memory to sum whole gradients
        return Reduction(cut, self.wire, self.kept_dtype, by_use, self.to_host, is_awaited)

    @property
    def kept_dtype(self) -> Any:
        """What its reduced gradient is kept and summed in: 8 bits have no room for a sum."""
        dtype = self.leaf.grad.dtype
        return wide_dtype(dtype) if is_float8(dtype) else dtype

    def like_gradient(self) -> jax.ShapeDtypeStruct:
        """Returns what the walk returns of its gradient."""
        if isinstance(self.leaving, Reduction):
            return jax.ShapeDtypeStruct(self.leaving.cut.shard_shape, self.leaving.dtype)
        return jax.ShapeDtypeStruct(self.leaf.param.shape, self.leaf.compute_dtype)

    def value(self, stored: jax.Array) -> Any:
        """Returns the parameter as the walk takes it."""
        cut = self.leaf.param.for_collectives(self.mesh)
        if cut is None:  # stored as the loss sees it, but for parameters that are not trained
            return round_without_derivative(stored, self.leaf.compute_dtype)
        dtype = jnp.dtype(self.leaf.compute_dtype)
        return Lazy(stored, None, cut, self.wire, dtype, dtype)

    def finish(self, grad: jax.Array | None) -> jax.Array:
        """Returns the gradient that the walk made, reduced over all devices, in the plan's layout."""
        cut = self.leaf.grad.for_collectives(self.mesh)
        if grad is None:  # integers, frozen parameters
            return jnp.zeros(self.leaf.grad.shape if cut is None else cut.shard_shape, self.leaf.grad.dtype)
        if isinstance(self.leaving, Reduction):
            return grad
        return reduce_whole(grad, self.wire) if cut is None else reduce_shard(grad, cut, self.wire)
