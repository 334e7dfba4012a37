"""`make_eval_step`: a jitted function of a sharded train state that returns metrics."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.zero import refers_to_config
from jzero.core.engine.gradients import loss_and_grads
from jzero.core.engine.outputs import Marked, Summed, Weighted
from jzero.core.layout.set_mesh import for_program
from jzero.core.state.adapter import Loss, adapt_sharded
from jzero.core.step.base import Step, one_batch
from jzero.core.step.loss import Splitter
from jzero.core.step.options import StepOptions


class EvalStep(Step):
    """The callable that `make_eval_step` returns."""

    maker = "make_eval_step"
    defaults = StepOptions(has_aux=True, remat="as_written")  # no arguments
    differentiates = False

    @one_batch
    def __call__(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> PyTree:
        """Returns the metrics of the whole batch."""
        return for_program(self._dispatch(adapt_sharded(state).state, batch, rng))

    def _splitter(self, has_aux: bool) -> Splitter:
        return lambda metrics: (jnp.ones((), jnp.float32), jax.tree.map(_as_sums, metrics, is_leaf=_is_marked))

    def _compute(self, state: TrainStateLike, batch: PyTree, *, rng: jax.Array | None = None) -> PyTree:
        traced, inputs = self.loss.checked_trace(state, batch, rng)
        metrics = loss_and_grads(traced, state.tx.plan, inputs, differentiates=False).aux
        return jax.tree.map(_as_mean, metrics, is_leaf=_is_marked)


@refers_to_config("shard_train_state")
def make_eval_step(
    metric_fn: Loss,
    *,
    mutable: Sequence[str] = (),
    check_processes: bool | float = True,
    check_rows: bool = True,
) -> EvalStep:
    """Returns a jitted evaluation step: no gradients, each partitioned parameter gathered once per use.

    Args:
      metric_fn: `metric_fn(params, batch)` or `metric_fn(params, batch, rng)`; for NNX states with the model instead of
        the parameters. Returns a tree of metrics: floating values are averaged over devices, unless `Weighted`,
        `Summed`, `Max`, `Min` or `PerExample` says otherwise. Its changes to an NNX model are dropped.
      mutable: Fields of the state, such as `("batch_stats",)`, to pass to it as keyword arguments.
      check_processes: As for `value_and_grad`.
      check_rows: As for `value_and_grad`, for metrics that are averaged: a mean is right, but the perplexity, which is
        `exp` of one, is not. Return the mean and apply the function to the result, or sums as `Weighted` or `Summed`.

    Returns:
      `eval_step(state, batch, *, rng=None)`, which returns the metrics of the whole batch.

    Example:
      >>> eval_step = jzero.make_eval_step(lambda params, batch: {"size": jnp.square(batch @ params["w"]).mean()})
      >>> sorted(eval_step(state, jnp.ones((8, 512))))
      ['size']
    """
    options = StepOptions(
        has_aux=True, mutable=mutable, remat="as_written", check_processes=check_processes, check_rows=check_rows
    )
    return EvalStep(metric_fn, options)


def _is_marked(x: object) -> bool:
    return isinstance(x, Weighted | Marked)


def _as_sums(x: PyTree) -> PyTree:
    """Returns a weighted mean as two sums, which are divided after their reduction."""
    return Weighted(Summed(x.sum), Summed(x.weight)) if isinstance(x, Weighted) else x  # type: ignore[arg-type]


def _as_mean(x: PyTree) -> PyTree:
    return x.sum / x.weight if isinstance(x, Weighted) else x
