"""The state that jzero adds to the optimizer's own: masters, loss scale, records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jzero.core.base import flax_types
from jzero.core.base.types import PyTree
from jzero.core.config.precision import MAX_LOSS_SCALE, DynamicLossScale


@flax_types.register_fields
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScaleState:
    """State of a dynamic loss scale.

    Attributes:
      scale: The factor of the loss, float32.
      good_steps: Steps since the last overflow, int32.
      hysteresis: Overflows left before the scale is halved, plus one, int32.
      exhausted: Whether the last step overflowed at the minimum scale, with no hysteresis left.
      overflowed: One boolean per parameter leaf: whether its gradient was not finite in the last step.
    """

    scale: jax.Array
    good_steps: jax.Array
    hysteresis: jax.Array
    exhausted: jax.Array
    overflowed: jax.Array


@flax_types.register_fields
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiskState:
    """What a state knows about its records, see `Offload.optimizer` and `Offload.delay`.

    Attributes:
      generation: Number of times that the state changed in its records, int32, see [Note: The newest state].
      waiting: With `Offload(delay=1)` or `zenflow`, whether gradients wait for a later step, a 0-d boolean;
        else `None`.
    """

    generation: jax.Array
    waiting: jax.Array | None = None


@flax_types.register_fields
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroOptState:
    """Replaces `opt_state` if a precision policy, or state in records, needs its own state.

    Attributes:
      inner: The state of the user's optax transformation.
      masters: The master copy of each parameter that is stored in 16 bits, in the structure of the parameters;
        `None` if the stored parameter is its own master (stage 3) or is not trained.
      loss_scale: State of a dynamic loss scale, else `None`.
      num_updates: Number of optimizer steps, int32; seeds stochastic rounding. `None` if nothing is rounded that way.
      disk: State of the records, on disk or with `Offload(delay=1)` or `zenflow`; else `None`.

    Example:
      >>> config = jzero.ZeroConfig(stage=2, precision="bf16")
      >>> mixed = jzero.shard_train_state(plain_state, config=config)
      >>> mixed.params["w"].dtype, mixed.opt_state.masters["w"].dtype
      (dtype(bfloat16), dtype('float32'))
    """

    inner: PyTree
    masters: PyTree
    loss_scale: LossScaleState | None
    num_updates: jax.Array | None
    disk: DiskState | None = None

    def continuing(self, before: ZeroOptState) -> ZeroOptState:
        """Returns the state of a new layout, with loss scale and counter of an earlier one where both have them."""
        scales, counts = (self.loss_scale, before.loss_scale), (self.num_updates, before.num_updates)
        return dataclasses.replace(
            self,
            loss_scale=self.loss_scale if any(x is None for x in scales) else before.loss_scale,
            num_updates=self.num_updates if any(x is None for x in counts) else before.num_updates,
        )


def host_array(value: ArrayLike | Sequence[bool], dtype: DTypeLike) -> Any:
    """Returns a leaf of the state on the host, before it is placed."""
    return np.array(value, dtype)


def initial_loss_scale(rules: DynamicLossScale, num_leaves: int) -> LossScaleState:
    """Returns the loss scale of the first step, as host arrays."""
    return LossScaleState(
        scale=host_array(rules.initial, np.float32),
        good_steps=host_array(0, np.int32),
        hysteresis=host_array(rules.hysteresis, np.int32),
        exhausted=host_array(False, np.bool_),
        overflowed=host_array([False] * num_leaves, np.bool_),
    )


def next_loss_scale(state: LossScaleState, rules: DynamicLossScale, overflowed: jax.Array) -> LossScaleState:
    """Returns the loss scale after a step, by DeepSpeed's rules; `overflowed` has one boolean per parameter leaf."""
    overflow = jnp.any(overflowed)
    good_steps = jnp.where(overflow, 0, state.good_steps + 1)
    # The first good step after an overflow, or at the start, does not count.
    grow = ~overflow & (state.good_steps > 0) & (state.good_steps % rules.window == 0)
    halve = overflow & (state.hysteresis <= 1)
    restore = ~overflow if rules.consecutive_hysteresis else grow
    hysteresis = jnp.where(overflow & ~halve, state.hysteresis - 1, state.hysteresis)
    scale = jnp.where(halve, jnp.maximum(state.scale / 2, rules.minimum), state.scale)
    return LossScaleState(
        scale=jnp.where(grow, jnp.minimum(scale * 2, MAX_LOSS_SCALE), scale),
        good_steps=good_steps,
        hysteresis=jnp.where(restore, rules.hysteresis, hysteresis),
        exhausted=halve & (state.scale <= rules.minimum),
        overflowed=overflowed,
    )


def with_next_loss_scale(old: ZeroOptState, new: ZeroOptState, rules: object, overflowed: jax.Array) -> ZeroOptState:
    """Returns the optimizer state `new`; a dynamic loss scale follows that of `old` by `rules`."""
    if not isinstance(rules, DynamicLossScale) or old.loss_scale is None:
        return new
    return dataclasses.replace(new, loss_scale=next_loss_scale(old.loss_scale, rules, overflowed))
