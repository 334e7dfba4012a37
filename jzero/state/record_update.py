"""The update of a state in records, outside of `jit`: programs of numbers and of the rest, around the passes.

In: a state and the gradients of a step. Out: the state after it. See [Note: Records outside of a program].
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jzero import _compat
from jzero._types import PyTree, State
from jzero.arrays.disk_files import StateFiles
from jzero.config.precision import wide_dtype
from jzero.engine.written_variables import Changed
from jzero.layout.leaves import StateLeaf
from jzero.plan.plan import ZeroPlan
from jzero.state.next_state import StepGrads, next_state, settled_state
from jzero.state.train_state import map_state
from jzero.update.columns import Columns
from jzero.update.find_visits import NextPass, find_visits
from jzero.update.records import PartsOnHost, RecordRun, StepArrays
from jzero.update.transformation import ZeroTransformation
from jzero.update.visits import FromDisk
from jzero.update.whole import Grad


class Prepared(NamedTuple):
    """An update whose last pass is ready to run.

    Attributes:
      run: The pass, which makes new records.
      sums: Numbers over parameters in records.
      step_grads: The gradients that the rest of the update needs.
    """

    run: RecordRun
    sums: dict[int, jax.Array]
    step_grads: StepGrads


class RecordUpdate:
    """The programs of the update of all states of one plan and optimizer.

    Args:
      plan: The plan.

    Attributes:
      next_pass: The jitted program before a pass, given the state, the gradients and the sums so far.
      rest: The jitted program after the last pass.
      is_one_pass: Whether one pass over all records was enough for the last step, as it probably is for the next one.
    """

    def __init__(self, plan: ZeroPlan) -> None:
        self.plan = plan
        # Nothing reads the old parameters, whose memory the new ones take over: unused arguments would not be donated.
        self.rest = jax.jit(self._rest, donate_argnums=0, keep_unused=True)
        self.settled = jax.jit(self._settled, donate_argnums=0, keep_unused=True)
        self.settled_copy = jax.jit(self._settled)
        self.rest_with_columns = jax.jit(self._rest_with_columns, donate_argnums=(0, 6), keep_unused=True)
        self.land = jax.jit(self._land, donate_argnums=0)
        self.land_copy = jax.jit(self._land)
        self.next_pass = jax.jit(self._find)
        self._late_pass = jax.jit(self._find_late)
        self.is_one_pass = False

    def prepare(self, files: StateFiles, state: State, step_grads: StepGrads) -> Prepared:
        """Runs the passes that only read, and everything that the last one reads beside records.

        Args:
          files: The files of the state.
          state: The state, detached.
          step_grads: The gradients, which are to be applied.
        """
        without_records = [
            Grad(cast("jax.Array", None), g.factors) if i in self.plan.disk_fields else g
            for i, g in enumerate(step_grads.grads)
        ]
        params = self.plan.flat_params(state.params)
        arrays = StepArrays(
            {i: step_grads.grads[i].reduced for i in self.plan.disk_fields},
            {i: params[i] for i in self.plan.disk_fields},
        )
        sums: dict[int, jax.Array] = {}
        self.is_one_pass = True
        while True:
            found: NextPass = self.next_pass(state, step_grads, sums)
            self.wait(found)
            run = RecordRun(files, found.programs, found.operands, arrays)
            if run.writes:
                light = step_grads if found.needs_grads else step_grads._replace(grads=without_records)
                return Prepared(run, found.sums, light)
            run.run()
            sums, self.is_one_pass = found.sums | run.sums(), False

    def numbers_of_late(self, state: State, step_grads: StepGrads) -> tuple[NextPass, dict[int, jax.Array]]:
        """Returns a pass with other gradients than those of a step, and sums of the step.

        Args:
          state: The state, detached.
          step_grads: The gradients of the step, whose numbers count.
        """
        found: NextPass = self.next_pass(state, step_grads, {})
        self.wait(found)
        return self.late_pass(state, step_grads._replace(grads=[]), found.sums), found.sums

    def late_pass(self, state: State, step_grads: StepGrads, sums: dict[int, jax.Array]) -> NextPass:
        """Returns such a pass, given sums; `step_grads` has no gradients."""
        found: NextPass = self._late_pass(state, step_grads, sums)
        self.wait(found)
        return found

    def late_run(self, files: StateFiles, state: State, late: NextPass, grads: Mapping[int, PartsOnHost]) -> RecordRun:
        """Returns a pass with gradients in float32 from the host, by parameter and device, ready to run."""
        params = self.plan.flat_params(state.params)
        arrays = StepArrays(grads, {i: params[i] for i in self.plan.disk_fields})
        return RecordRun(files, late.programs, late.operands, arrays)

    def wait(self, x: PyTree) -> None:
        """Waits for arrays where programs in flight could deadlock."""
        if _compat.starves_steps(self.plan.mesh):
            jax.block_until_ready(x)

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        for program in (x for x in vars(self).values() if hasattr(x, "clear_cache")):
            program.clear_cache()

    @jax.named_scope("zero_update")
    def _find(self, state: State, step_grads: StepGrads, sums: dict[int, jax.Array]) -> NextPass:
        return _find_visits(state, step_grads, step_grads.grads, sums)

    @jax.named_scope("zero_update")
    def _rest(
        self, state: State, step_grads: StepGrads, changed: Changed, update: StepGrads | None, disk: FromDisk
    ) -> State:
        return self._laid_out(next_state(state, step_grads, changed, update and self._with_zeros(update), disk))

    @jax.named_scope("zero_update")
    def _find_late(self, state: State, step_grads: StepGrads, sums: dict[int, jax.Array]) -> NextPass:
        """Finds a pass whose gradients are float32, without factors."""
        leaves = (leaf.grad for leaf in self.plan.leaves)
        grads = [Grad(jnp.zeros(leaf.stored_shape, wide_dtype(leaf.dtype))) for leaf in leaves]
        return _find_visits(state, step_grads, grads, sums)

    def _rest_with_columns(  # noqa: PLR0913  # operands of a program
        self,
        state: State,
        step_grads: StepGrads,
        changed: Changed,
        sums: dict[int, jax.Array],
        chosen: dict[int, jax.Array],
        light: StepGrads,
        near: dict[int, list[jax.Array]],
    ) -> tuple[State, dict[int, list[jax.Array]]]:
        columns = Columns(self.plan, chosen, near)
        new = self._rest(state, light, changed, step_grads, FromDisk(sums, {}, columns))
        return new, columns.new

    @jax.named_scope("zero_update")
    def _land(self, state: State, results: dict[int, jax.Array], chosen: dict[int, jax.Array]) -> State:
        return self._laid_out(state.replace(params=state.tx.with_late_results(state.params, results, chosen)))

    @jax.named_scope("zero_update")
    def _settled(self, state: State, update: StepGrads, disk: FromDisk) -> State:
        return self._laid_out(settled_state(state, self._with_zeros(update), disk))

    def _laid_out(self, new: State) -> State:
        return map_state(lambda x, leaf: jax.lax.with_sharding_constraint(x, leaf.sharding), self.plan, new)

    def _with_zeros(self, update: StepGrads) -> StepGrads:
        """Returns gradients with zeros in place of those that nothing needs."""
        pairs = zip(update.grads, self.plan.leaves, strict=True)
        grads = [g if g.reduced is not None else _zeros(g, leaf.grad) for g, leaf in pairs]
        return update._replace(grads=grads)


def _find_visits(
    state: State, step: StepGrads, grads: Sequence[Grad[jax.Array]], sums: Mapping[int, jax.Array]
) -> NextPass:
    """Returns the next pass over records that the update of a step needs, with these gradients."""
    update, before = state.tx.update_of_step(grads, state.opt_state, state.params, step.applied, step.value)
    return find_visits(update, before, sums)


def _zeros(grad: Grad[jax.Array], leaf: StateLeaf) -> Grad[jax.Array]:
    return grad._replace(reduced=jnp.zeros(leaf.stored_shape, leaf.dtype))


@functools.lru_cache(maxsize=8)
def record_update(tx: ZeroTransformation) -> RecordUpdate:
    """Returns the programs of the update of all states of one plan and optimizer."""
    return RecordUpdate(tx.plan)
