"""`make_train_step`: the core's training step, which asks estimates what it may keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from jzero.core.config.zero import refers_to_config
from jzero.core.engine.recompute import Remat
from jzero.core.state.adapter import Loss
from jzero.core.step.compiler_options import CompilerOptions
from jzero.core.step.options import StepOptions
from jzero.core.step.train_step import TrainStep
from jzero.estimate.keeping import choose_kept


@refers_to_config("shard_train_state")
def make_train_step(  # noqa: PLR0913  # the options of a step
    loss_fn: Loss,
    has_aux: bool = False,
    *,
    accumulate_steps: int = 1,
    clip_norm: float | None = None,
    reduce: Literal["each", "last"] = "each",
    remat: Remat | None = None,
    mutable: Sequence[str] = (),
    merge: Mapping[str, str] | None = None,
    compiler_options: CompilerOptions | None = None,
    check_processes: bool | float = True,
    check_rows: bool = True,
) -> TrainStep:
    """Returns a jitted training step: loss, gradients, clipping, update, with the collectives of the state's stage.

    Args:
      loss_fn: As for `value_and_grad`.
      has_aux: As for `value_and_grad`.
      accumulate_steps: Number of micro-batches in each device's part of the batch. With more than one, stage 1 sums
        whole local gradients and reduces once; stages 2 and 3 reduce each micro-batch and sum shards. With `Weighted`
        the result is that of one large batch; means are averaged.
      clip_norm: Scales gradients whose global norm exceeds it by `clip_norm / (norm + 1e-6)`, as DeepSpeed does.
      reduce: "last" makes stages 2 and 3 sum whole local gradients over the micro-batches and reduce once: less
        communication for the memory of whole gradients. "each" reduces every micro-batch.
      remat: As for `value_and_grad`. With `None`, a step at stage 3 on GPUs or TPUs keeps what is estimated to fit well
        into what a device has left: all parameters between their uses, and the products of all repeated blocks and
        scanned layers, or of as many as fit. "cheap" asks for the smaller peak, which the step also falls back to.
      mutable: As for `value_and_grad`; the step writes the new values into the state.
      merge: As for `value_and_grad`.
      compiler_options: XLA options for this step only, as for `jax.jit`; unused if the step is called inside another
        `jax.jit`. "recommended" sets one: on GPUs the compiler gathers scanned layers one ahead if jzero does not, at
        stage 3 with `prefetch_bytes=0`.
      check_processes: As for `value_and_grad`.
      check_rows: As for `value_and_grad`.

    Returns:
      `step(state, batch, *, rng=None)`, which consumes `state` and returns `(state, metrics)`. `metrics` holds `loss`,
      `grad_norm` (before clipping, over all parameters), `step_applied`, `loss_scale` (that of this step, if there is
      one) and, with `has_aux`, `aux`. A step is not applied if a `Weighted` batch has no weight, or if a gradient is
      not finite and the precision policy skips such steps; then only the loss scale changes (with `Offload(delay=1)`
      its gradients are dropped, and those of the step before are applied). Of optax's extra
      arguments, an optimizer gets `value`, the loss, and `grad`, the clipped gradients, if all of its parts take them.
      The step has `lower`, `trace`, `eval_shape` and `clear_cache` like a jitted function, and `plan(state, batch)` and
      `recomputation(state, batch)`.

    Raises:
      ValueError: An argument is out of range.
      TypeError: `loss_fn` is not callable; (when called) the optimizer asks for what a step does not have, such
        as `value_fn`.
      LossScaleError: (when called) Gradients overflow at the minimum loss scale. The error carries the state.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> new_state, metrics = step(jzero.shard_train_state(plain_state, stage=2), jnp.ones((8, 512)))
      >>> bool(metrics["step_applied"])
      True
    """
    options = StepOptions(
        has_aux=has_aux,
        accumulate_steps=accumulate_steps,
        clip_norm=clip_norm,
        reduce=reduce,
        remat=remat,
        mutable=mutable,
        merge=merge or {},
        compiler_options=compiler_options,
        check_processes=check_processes,
        check_rows=check_rows,
    )
    return TrainStep(loss_fn, options, choose_kept)
