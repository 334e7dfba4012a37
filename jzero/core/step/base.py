"""The base of all steps: what a user asks of one beside calling it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import jax
from jax.sharding import AbstractMesh

from jzero.core.base.guard import attempt
from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.config.keep import Keep
from jzero.core.engine.gradients import kept_by
from jzero.core.engine.recompute import Remat
from jzero.core.engine.trace import plan_for
from jzero.core.layout.set_mesh import in_own_mesh
from jzero.core.plan.plan import ZeroPlan
from jzero.core.state.adapter import A_LOSS, Loss, adapt_sharded, plan_of
from jzero.core.state.record_states import for_loss
from jzero.core.step.agreement import StepAgreement
from jzero.core.step.choice import Choose
from jzero.core.step.inputs import abstract_inputs, find_closed_over, optional_rng
from jzero.core.step.jitted import JittedStep
from jzero.core.step.loss import Splitter, StepLoss, split_aux
from jzero.core.step.options import StepOptions
from jzero.machines.machine import Machine

F = TypeVar("F", bound=Callable[..., Any])

ABSTRACT_MESH = (
    "A program is lowered for a platform, and this state is laid out on an `AbstractMesh`, which has none. Name it: "
    "`step.trace(state, batch).lower(lowering_platforms=('tpu',))`. Or lay the state out on devices, such as "
    "`jzero.make_mesh()`. `jzero.estimate_step_memory` takes the state as it is, and `jzero.analyze` with `topology=` "
    "compiles for a machine that you do not have."
)


def one_batch(call: F) -> F:
    """Says how to pass several arrays to a step, which takes one batch."""

    @functools.wraps(call)
    def checked(self: Step, state: State, batch: PyTree, *more: object, rng: jax.Array | None = None) -> PyTree:
        if more:
            raise TypeError(f"A step takes one batch: got {1 + len(more)} arguments after the state. {A_LOSS}")
        return call(self, state, batch, rng=rng)

    return cast("F", checked)


class Step(JittedStep):
    """A function of `(state, batch, rng)`, jitted once per plan."""

    maker: str
    defaults = StepOptions()

    def __init__(self, loss_fn: Loss, options: StepOptions, choose: Choose | None = None) -> None:
        if not callable(loss_fn):
            raise TypeError(f"The loss must be callable: got {type(loss_fn).__name__}.")
        if isinstance(loss_fn, Step):
            raise TypeError(f"The loss must not be a step itself: got {loss_fn!r}. {A_LOSS}")
        self.loss = StepLoss(loss_fn, options, self._splitter(options.has_aux), self.maker, self.differentiates)
        self.has_aux, self.mutable, self.remat = options.has_aux, options.mutable, options.remat
        self._choose = choose
        super().__init__(
            options,
            StepAgreement(self.maker, loss_fn, options),
            functools.partial(choose, self) if choose is not None and self.remat is None else None,
        )

    def __repr__(self) -> str:
        return self._agreement.describe(self.defaults)

    def _splitter(self, has_aux: bool) -> Splitter:
        """Returns a function that turns what the loss returns into `(loss, aux)`."""
        return functools.partial(split_aux, has_aux=has_aux)

    def resolved(
        self,
        state: State,
        batch: PyTree,
        *,
        rng: jax.Array | None = None,
        hardware: Machine | None = None,
        hbm_bytes: float = math.inf,
    ) -> Self:
        """Returns the step that runs for these arguments; another one only if this one chooses what it keeps.

        Args:
          state: The state, concrete or abstract.
          batch: The batch, likewise.
          rng: The key, likewise.
          hardware: The machine to choose for, as if nothing else lived there; if `None`, the devices as they are.
          hbm_bytes: Most bytes of the step on one device, if that is less than it may use there.
        """
        return self._chosen(*self.abstract_arguments(state, batch, rng=rng), hardware, hbm_bytes)

    def program(self, state: State) -> Any:
        """Returns the jitted function for a state; an `RecordStep` if the update of its kind is on records."""
        train_state = adapt_sharded(state).state
        return self._jit(train_state.tx.plan, train_state)

    @one_batch
    def lower(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> jax.stages.Lowered:
        """Lowers the step for these (concrete or abstract) arguments, like `jax.jit(...).lower`."""
        traced = self.trace(state, batch, rng=rng)
        try:
            return traced.lower()
        except ValueError as error:
            if isinstance(plan_of(state).mesh, AbstractMesh):
                raise TypeError(ABSTRACT_MESH) from error
            raise

    @in_own_mesh
    def trace(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> jax.stages.Traced:
        """Traces the step for these (concrete or abstract) arguments, like `jax.jit(...).trace`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        jitted = self._chosen(train_state, batch, rng)._jit(train_state.tx.plan, train_state)
        return jitted.trace(for_loss(train_state), batch, **optional_rng(rng))

    @in_own_mesh
    def eval_shape(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> PyTree:
        """Returns the shapes of the results for these arguments, like `jax.jit(...).eval_shape`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        jitted = self._chosen(train_state, batch, rng)._jit(train_state.tx.plan, train_state)
        return jitted.eval_shape(for_loss(train_state), batch, **optional_rng(rng))

    def abstract_arguments(
        self, state: State, batch: PyTree, *, rng: jax.Array | None = None
    ) -> tuple[TrainStateLike, PyTree, PyTree]:
        """Returns `(state, batch, rng)` as shapes with the shardings that a call gives them."""
        train_state = adapt_sharded(state).state
        return abstract_inputs(train_state.tx.plan, train_state, batch, rng)

    def with_remat(self, remat: Remat | None) -> Self:
        """Returns a new step that differs in `remat` alone."""
        return type(self)(self.loss.fn, dataclasses.replace(self.options, remat=remat), self._choose)

    @in_own_mesh
    def plan(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> ZeroPlan:
        """Returns the state's plan, which also knows the loss: `plan.closed_over`, `plan.kept`, `plan.lookups`."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        plan, choice = train_state.tx.plan, self._choices.of(train_state, batch, rng)
        step = self if choice is None else cast("Self", choice.step)
        traced, inputs = step.loss.trace(train_state, batch, rng)
        plan = plan_for(plan, traced, inputs.carried)
        kept = kept_by(step.remat, traced, plan, self.micro) if isinstance(step.remat, Keep) else None
        if kept is not None and choice is not None:
            kept = kept._replace(peak=attempt(lambda: choice.peak), limit=choice.limit)
        return dataclasses.replace(plan, closed_over=tuple(find_closed_over(traced, plan)), kept=kept)

    @in_own_mesh
    def recomputation(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> Remat:
        """Returns `remat`; if it is `None`, its default for this plan and loss: "cheap" or "as_written"."""
        train_state, batch, rng = self.abstract_arguments(state, batch, rng=rng)
        return self._chosen(train_state, batch, rng).loss.trace(train_state, batch, rng)[0].remat
