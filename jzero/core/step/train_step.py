"""`value_and_grad` and training steps: jitted functions that differentiate a loss at a sharded train state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.base.types import Jitted, PyTree, State, TrainStateLike
from jzero.core.config.zero import refers_to_config
from jzero.core.engine.gradients import LossResult, loss_and_grads
from jzero.core.engine.outputs import Weighted
from jzero.core.engine.recompute import Remat
from jzero.core.engine.written_variables import Changed
from jzero.core.layout.set_mesh import for_program
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.adapter import Loss, Metrics, adapt_sharded
from jzero.core.state.next_state import check_can_compute, next_state, scaled_grads
from jzero.core.state.train_state import write_fields
from jzero.core.step.base import Step, one_batch
from jzero.core.step.compiler_options import compiler_options as make_compiler_options
from jzero.core.step.metrics import step_metrics
from jzero.core.step.options import StepOptions
from jzero.core.step.overflow import OverflowWatch, loss_scale_error
from jzero.core.step.record_step import RecordStep
from jzero.core.update.whole import StepGrads


class ValueAndGrad(Step):
    """The callable that `value_and_grad` returns."""

    maker = "value_and_grad"

    @one_batch
    def __call__(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> tuple[PyTree, PyTree]:
        """Returns `(loss, grads)`, or `((loss, aux), grads)`; see `value_and_grad`."""
        adapted = adapt_sharded(state)
        value, aux, changed, grads = self._dispatch(adapted.state, batch, rng)
        if self.mutable:
            aux = {**aux, **changed}
        else:
            adapted.update_model(changed)
        return for_program((value, aux) if self.has_aux else value), adapted.wrap_grads(grads)

    def _compute(self, state: TrainStateLike, batch: PyTree, *, rng: jax.Array | None = None) -> PyTree:
        plan = state.tx.plan
        traced, inputs = self.loss.checked_trace(state, batch, rng)
        inputs = inputs._replace(loss_scale=state.tx.loss_scale(state.opt_state))
        result = loss_and_grads(traced, plan, inputs)
        changed = traced.by_field(result.written)
        if self.mutable:  # whole fields, as `aux` has them
            new = write_fields(state, changed)
            changed = {name: getattr(new, name) for name in self.mutable}
        grads = result.grads
        if inputs.loss_scale is None:  # else 16 bits would lose the small gradients that the scale saved
            grads = [g.astype(leaf.grad.dtype) for g, leaf in zip(grads, plan.leaves, strict=True)]
        return result.loss, result.aux, changed, plan.view.stored_grads(grads)


class TrainStep(Step):
    """The callable that `make_train_step` returns."""

    maker = "make_train_step"
    donated = (0,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clip_norm, self._watch = self.options.clip_norm, OverflowWatch()

    @one_batch
    def __call__(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> tuple[State, Metrics]:
        """Returns `(state, metrics)` after one step. Consumes `state`."""
        adapted = adapt_sharded(state)
        new, metrics = self._dispatch(adapted.state, batch, rng)
        rebuilt = adapted.rebuild(new)
        if self._watch.is_exhausted(adapted.state, new, metrics):
            raise loss_scale_error(new.tx.plan, new, rebuilt)
        return rebuilt, for_program(metrics)

    def _compute(self, state: TrainStateLike, batch: PyTree, *, rng: jax.Array | None = None) -> PyTree:
        if state.tx.plan.has_records:
            raise ValueError(
                f"A state outside of programs (`Offload({state.tx.plan.config.offload.made_records})`) is trained by "
                "calls of this step from Python: call it outside of `jax.jit`, or keep the state where programs see it "
                "(`Offload(optimizer='host')`)."
            )
        step_grads, changed, metrics = self._gradients(state, batch, rng=rng)
        with jax.named_scope("zero_update"):
            return next_state(state, step_grads, changed, step_grads), metrics

    def _make_jit(self, plan: ZeroPlan, state: TrainStateLike, out_shardings: PyTree = None) -> Jitted:
        if plan.has_records:
            check_can_compute(state)
            options = make_compiler_options(plan, self.options.compiler_options)
            return RecordStep(self._gradients, state.tx, options, self._directions(plan))
        # Exactly those of the input, so that the next call has the same types and compiles nothing.
        return super()._make_jit(plan, state, (plan.view.map(lambda x, leaf: leaf.sharding, state), None))

    def _gradients(
        self, state: TrainStateLike, batch: PyTree, *, rng: jax.Array | None = None
    ) -> tuple[StepGrads, Changed, Metrics]:
        """Returns the gradients of a step, what the loss wrote, and the metrics."""
        tx = state.tx
        traced, inputs = self.loss.checked_trace(state, batch, rng)
        inputs = inputs._replace(loss_scale=tx.loss_scale(state.opt_state))
        result = loss_and_grads(traced, tx.plan, inputs, self.micro, grads_to_host=True)
        weighted = isinstance(traced.out_shape[0], Weighted)
        with jax.named_scope("zero_update"):
            step_grads = self._step_grads(tx.plan, result, weighted=weighted)
        applied = jnp.ones((), jnp.bool_) if step_grads.applied is None else step_grads.applied
        metrics = {"loss": result.loss, "grad_norm": result.grad_norm, "step_applied": applied}
        if inputs.loss_scale is not None:
            metrics["loss_scale"] = inputs.loss_scale
        if self.has_aux:
            metrics["aux"] = result.aux
        return step_grads, traced.by_field(result.written), step_metrics(metrics)

    def _step_grads(self, plan: ZeroPlan, result: LossResult, *, weighted: bool) -> StepGrads:
        """Returns the gradients with their factors, and whether they are to be applied."""
        clip = [] if self.clip_norm is None else [jnp.minimum(1, self.clip_norm / (result.grad_norm + 1e-6))]
        grads = scaled_grads(plan, result.grads, result.reduced, result.factor, *clip)
        weighs = result.weight != 0 if weighted else None  # without weight there is no gradient
        applied = weighs
        if plan.config.policy.skips:
            finite = ~jnp.any(result.overflowed)
            applied = finite if applied is None else finite & applied
        return StepGrads(grads, applied, weighs, result.overflowed, result.loss)


@refers_to_config("shard_train_state")
def value_and_grad(  # noqa: PLR0913  # the options of a step
    loss_fn: Loss,
    has_aux: bool = False,
    *,
    remat: Remat | None = None,
    mutable: Sequence[str] = (),
    merge: Mapping[str, str] | None = None,
    check_processes: bool | float = True,
    check_rows: bool = True,
) -> ValueAndGrad:
    """Returns a function that evaluates a loss and its gradients with the collectives of the state's stage.

    Args:
      loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, rng)`; for NNX states
        `loss_fn(model, batch[, rng])`. Ordinary code over whole parameters and one device's part of the
        batch. Returns the mean over its examples, or `Weighted(sum, weight)`.
      has_aux: Whether it returns `(loss, aux)`. Floating leaves of `aux` are averaged over devices, computed in fp32 or
        wider and returned in their own dtype. Integers and booleans that do not depend on the batch, or on the number
        of its rows, come back as they are. Others need `Summed` (which returns narrow integers in 32 bits), `Max`,
        `Min` or `PerExample`.
      remat: What the backward pass recomputes.
        `None`: "cheap" if parameters are gathered again (stage 3), else "as_written". A training step first tries at
        stage 3 whether it can do without.
        `"cheap"`: everything but expensive results (products, convolutions, loops, random numbers, the result of
        attention but not its scores), in scans without checkpoints of their own, and in repeated blocks of unrolled
        models.
        `"as_written"`: what the loss itself says.
        `True`: every iteration of the loss's scans (scanned layers), unless the scan has its own checkpoint.
        `"offload"`: every iteration, whatever the scan says; activations between iterations wait in host memory.
        `False`: nothing, even if the loss has `jax.checkpoint`.
        `Keep(params=..., blocks=...)`: less, for memory that is free; `fill_memory` chooses what fits.
        Code inside `while_loop`, `custom_vjp` and `shard_map` does not change.
      mutable: Fields of the state that the loss changes, such as `("batch_stats",)`. The loss takes each as a keyword
        argument, and `aux` must be a dictionary with its new value, of the same structure, shapes and dtypes. Not for
        NNX states, whose model keeps the values that the loss writes into its variables.
      merge: How the values that the devices write to a field or an NNX variable become one, by regular expression over
        its whole name, such as `{"seen": "summed"}` or `{"stats/.*/count": "summed"}`. Every micro-batch starts from
        the values of the one before.
        Not named: values that cannot differ between devices (a count of calls) stay as they are; floating values are
        averaged, as batch statistics need it; random keys are those of the first device, and each device folds its
        index into the keys that it reads; others, and rows of the batch, raise an error.
        `"summed"`: what each device adds to the value before is summed.
        `"per_example"`: the rows of all devices follow each other, in batch order: the state holds `[global rows of a
        micro-batch, ...]`, a device writes `[local rows, ...]`.
        `"mean"`: floating values are averaged, whatever they are.
        `"max"`, `"min"`: the largest or smallest value, element by element. Every micro-batch starts from the value
        before the step, so these are maxima of the whole batch.
        `"equal"`: you promise that all devices write the same; the first one's value counts.
      check_processes: Whether several processes check, before they first run a program, that it is the same in all of
        them, and so are shapes and dtypes of their batches. A number says how many seconds they wait for each other,
        300 by default. Inside another `jax.jit` they compare nothing.
      check_rows: Whether to check in the traced loss that its results are means over independent rows, if the batch is
        split over devices or micro-batches. The step warns once of a result that is a sum over rows or couples them
        (in-batch negatives, batch statistics, a mean over the rows that count): its average over the parts is not the
        result of the whole batch. It refuses one value per example in `aux` unless that is `PerExample`. To tell sums
        from means, it traces a loss that does not end in a plain mean a second time, over twice as many rows.

    Returns:
      `fn(state, batch, *, rng=None)`, which returns `(loss, grads)` or `((loss, aux), grads)`. It works inside and
      outside `jax.jit`. `batch` holds arrays `[global batch, ...]` (0-d arrays go to every device). `grads` has the
      structure of `state.params`, the plan's layout (padded leaves are nodes that behave like arrays of their natural
      shape) and its dtypes (fp32 with a loss scale, which is divided out); parameters that are not trained have scalar
      zeros. Pass it to `state.apply_gradients(grads=grads)`. Each device folds its index into `rng`.

    Raises:
      ValueError: `remat` is none of these, the batch cannot be split evenly, the loss uses ZeRO's axis in an impossible
        way, or processes disagree; the message says how.
      TypeError: The state is not sharded, or the loss or `aux` is of a kind that cannot be reduced.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> loss, grads = jzero.value_and_grad(loss_fn)(state, jnp.ones((8, 512)))
      >>> int(state.apply_gradients(grads=grads).step)
      1
    """
    options = StepOptions(
        has_aux=has_aux,
        mutable=mutable,
        merge=merge or {},
        remat=remat,
        check_processes=check_processes,
        check_rows=check_rows,
    )
    return ValueAndGrad(loss_fn, options)
