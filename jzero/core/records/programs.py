"""The programs around the passes over records, compiled once for all states with an optimizer and a plan.

    update = RecordUpdate(tx, next_state, with_params)
    program = update.program(state, grads)                                analysed, from shapes
    operands, sums = update.scalars(program, level, state, grads, sums)   what a pass reads beside records
    state = update.finish(state, grads, changed, done)                    after the last pass

See [Note: Records outside of a program].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jzero.core.base import compat
from jzero.core.base.types import PyTree, State
from jzero.core.config.precision import wide_dtype
from jzero.core.engine.written_variables import Changed
from jzero.core.layout.leaves import StateLeaf
from jzero.core.records.run import RecordPrograms
from jzero.core.update.columns import update_columns
from jzero.core.update.program import UpdateProgram, inputs_of, record_program
from jzero.core.update.run import Done, Operands, Run
from jzero.core.update.transformation import ZeroTransformation
from jzero.core.update.whole import Grad, StepGrads


class RecordUpdate:
    """The compiled update of all states with an optimizer and a plan; programs see states without records.

    Args:
      tx: The optimizer and the plan.
      next_state: Returns the state after a step, laid out as planned, inside `jit`.
      with_params: Returns a state with other parameters, likewise.
    """

    def __init__(
        self, tx: ZeroTransformation, next_state: Callable[..., State], with_params: Callable[[State, PyTree], State]
    ) -> None:
        self.tx, self.plan, self.programs = tx, tx.plan, RecordPrograms(tx.plan)
        self._next_state, self._with_params = next_state, with_params
        # Nothing reads the old parameters, whose memory the new ones take over: unused arguments would not be donated.
        self.finish = jax.jit(self._finish, donate_argnums=0, keep_unused=True)
        self.finish_columns = jax.jit(self._finish_columns, donate_argnums=(0, 1), keep_unused=True)
        self.apply_sums = jax.jit(self._apply_sums, donate_argnums=0)
        self.scalars = jax.jit(self._scalars, static_argnums=(0, 1))
        self._analysed = jax.jit(self._analyse, static_argnames="means")

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        for program in (x for x in vars(self).values() if hasattr(x, "clear_cache")):
            program.clear_cache()
        self.programs = RecordPrograms(self.plan)

    def program(self, state: State, step: StepGrads, *, means: bool = False) -> UpdateProgram:
        """Returns the update by the gradients of a step, or by means of gradients in float32, analysed."""
        program: UpdateProgram = self._analysed.eval_shape(state, step, means=means)  # jax knows all that it depends on
        return program

    def _analyse(self, state: State, step: StepGrads, *, means: bool) -> UpdateProgram:
        grads = [Grad(_mean(leaf.grad)) for leaf in self.plan.leaves] if means else step.grads
        return record_program(*self.tx.update_of_step(grads, state.opt_state, state.params, step.applied, step.value))

    def params(self, state: State) -> list[jax.Array]:
        """Returns the parameters as stored."""
        return self.plan.view.params.flat(state.params)

    def wait(self, x: PyTree) -> None:
        """Waits for arrays where programs in flight could deadlock."""
        if compat.starves_steps(self.plan.mesh):
            jax.block_until_ready(x)

    @jax.named_scope("zero_update")
    def _scalars(
        self, program: UpdateProgram, level: int, state: State, step: StepGrads, sums: Mapping[int, jax.Array]
    ) -> tuple[list[Operands], dict[int, jax.Array]]:
        grads = step.grads or [Grad(jnp.zeros(x.grad.stored_shape, _mean(x.grad).dtype)) for x in self.plan.leaves]
        _, before = self.tx.update_of_step(grads, state.opt_state, state.params, step.applied, step.value)
        run = Run(program, inputs_of(self.plan, before, StateLeaf.load), sums)
        run.evaluate(level)
        return list(map(run.operands, program.passes[level])), run.sums

    @jax.named_scope("zero_update")
    def _finish(self, state: State, step: StepGrads, changed: Changed, done: Done | None) -> State:
        """Returns the state after a step, and after an update if one is done."""
        return self._next_state(state, step, changed, None if done is None else done.grads, done)

    def _finish_columns(
        self,
        state: State,
        on_device: dict[int, list[jax.Array]],
        chosen: dict[int, jax.Array],
        changed: Changed,
        done: Done,
    ) -> tuple[State, dict[int, list[jax.Array]]]:
        operands, _ = self._scalars(done.program, 0, state, done.grads, done.sums)
        params, new_params, new = self.params(state), {}, {}
        for kernel, of in zip(done.program.passes[0], operands, strict=True):
            if (i := kernel.param) in chosen:
                grad = done.grads.grads[i].reduced
                new[i], new_params[i] = update_columns(self.plan, kernel, of, grad, params[i], chosen[i], on_device[i])
        light = done.grads.without_grads
        return self._finish(state, light, changed, dataclasses.replace(done, params=new_params)), new

    @jax.named_scope("zero_update")
    def _apply_sums(self, state: State, results: dict[int, jax.Array], chosen: dict[int, jax.Array]) -> State:
        return self._with_params(state, self.tx.with_record_results(state.params, results, chosen))


def _mean(leaf: StateLeaf) -> jax.ShapeDtypeStruct:
    """Returns the shape of a mean of gradients."""
    return jax.ShapeDtypeStruct(leaf.stored_shape, wide_dtype(leaf.dtype))
