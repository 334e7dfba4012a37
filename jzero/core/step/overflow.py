"""The error for gradients that overflow at the minimum loss scale, and the watch that notices it."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import jax
import numpy as np

from jzero.core.base.text import few
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.precision import DynamicLossScale
from jzero.core.plan.plan import ZeroPlan

LAG = 2
"""Number of remembered loss scales: one step may be running while the one before it is checked."""


MAX_RUNS = 16
"""Training runs that may alternate on one step; one that is evicted starts anew."""


class LossScaleError(FloatingPointError):
    """Gradients overflowed at the minimum loss scale, so the run cannot continue unchanged.

    Attributes:
      state: The state after the skipped step: parameters and optimizer are those before it (with
        `Offload(delay=1)`, after the update with the previous gradients). Save it.
      step: Its `step`.
      leaves: Key paths of the parameters whose gradients were not finite.

    Example:
      >>> def train(step, state, batches, save):
      ...     try:
      ...         for batch in batches:
      ...             state, metrics = step(state, batch)
      ...     except jzero.LossScaleError as error:
      ...         save(error.state)  # `state` itself was consumed by the step
      ...         raise
    """

    def __init__(self, message: str, *, state: State, step: int, leaves: list[str]) -> None:
        super().__init__(message)
        self.state = state
        self.step = step
        self.leaves = leaves


class OverflowWatch:
    """Follows the loss scale of one training loop from the host.

    Reading a result waits for it. So the watch reads the scale of an earlier step, and reads the step that just started
    only if the scale may have reached its minimum since. All processes see the same numbers and do the same.
    """

    def __init__(self) -> None:
        # By the `id` of the scale that the next step starts from; the scale is kept so that its `id` stays unique. Only
        # `is_exhausted` reads and writes it, once after each step, in the thread that called the step. A state that
        # this step did not return (a new or restored one) has no entry: its run starts anew.
        self._runs: dict[int, tuple[jax.Array, collections.deque[jax.Array]]] = {}

    def is_exhausted(self, old: TrainStateLike, new: TrainStateLike, metrics: Mapping[str, PyTree]) -> bool:
        """Returns whether a step overflowed at the minimum scale, with no hysteresis left.

        Args:
          old: The train state before the step; its arrays may be consumed.
          new: The train state after the step.
          metrics: The metrics of the step.
        """
        if "loss_scale" not in metrics:
            return False
        rules = new.tx.plan.config.policy.loss_scale
        if not isinstance(rules, DynamicLossScale) or isinstance(metrics["loss_scale"], jax.core.Tracer):
            return False
        _, scales = self._runs.pop(id(old.opt_state.loss_scale.scale), (None, None))
        scales = collections.deque(maxlen=LAG) if scales is None else scales
        scales.append(metrics["loss_scale"])
        self._runs[id(new.opt_state.loss_scale.scale)] = (new.opt_state.loss_scale.scale, scales)
        while len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        if float(scales[0]) > rules.minimum * 2 ** (LAG - 1):
            return False
        return bool(new.opt_state.loss_scale.exhausted)


def loss_scale_error(plan: ZeroPlan, new: TrainStateLike, state: State) -> LossScaleError:
    """Returns the error for a step that overflowed at the minimum scale; `state` is the one for the caller."""
    rules = plan.config.policy.loss_scale
    assert isinstance(rules, DynamicLossScale)
    overflowed = np.asarray(new.opt_state.loss_scale.overflowed)
    leaves = [leaf.path for leaf, over in zip(plan.leaves, overflowed, strict=True) if over]
    step = int(new.step)
    listed = "  " + few(leaves, 20, between="\n  ")
    return LossScaleError(
        f"Step {step}: gradients are not finite at the minimum loss scale ({rules.minimum}), in {len(leaves)} of "
        f"{len(plan.leaves)} parameters:\n{listed}\nThe step was skipped; `error.state` is the state before it. Lower "
        'the learning rate, train in "bf16", keep these leaves in float32 (`LeafRule(compute_dtype="float32")`), or '
        "look for the operation that makes NaN.",
        state=state,
        step=step,
        leaves=leaves,
    )
