"""A train step whose update runs outside of `jit`, on records on disk: four programs, driven by Python.

    gradients  loss and reduced gradients; keeps the state
    numbers    what the pass over records reads beside them: counters, factors; once more after each pass of sums
    records    new records and parameters, see `jzero.update.records`
    rest       the new state, from the parameters and everything near; takes over the memory of the old one

Until `rest` has begun nothing has changed: an error, or Ctrl-C, leaves the state as it was. A step that is not applied
has no records. See [Note: Records outside of a program].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jzero import _compat
from jzero.arrays.disk_files import StateFiles
from jzero.arrays.processes import succeed_together
from jzero.plan.plan import ZeroPlan
from jzero.state.disk import attached, check_newest, detached, files_of
from jzero.state.next_state import StepGrads, next_state
from jzero.state.train_state import map_state
from jzero.step.inputs import optional_rng
from jzero.update.records import GivenArrays, PassResults, Programs, RecordRun
from jzero.update.visits import FromDisk, Visit

__all__ = ["OutsideStep"]

PyTree = Any
State = Any


class OutsideStep:
    """Looks like a jitted function of `(state, batch, rng)` that returns `(state, metrics)`.

    Args:
      gradients: `fn(state, batch, rng=None)`: the step's gradients, what the loss wrote, and the metrics.
      plan: The plan of the state.
      compiler_options: XLA options for its programs.
    """

    def __init__(
        self, gradients: Callable[..., Any], plan: ZeroPlan, compiler_options: Mapping[str, Any] | None
    ) -> None:
        jit: Any = functools.partial(jax.jit, compiler_options=compiler_options)
        self.plan = plan
        self.gradients = jit(gradients)
        self.rest = jit(self._rest, donate_argnums=(0, 1))
        self.numbers = jit(self._numbers, static_argnums=0)
        self.programs = Programs(plan)
        self.visits: dict[int, list[Visit]] = {}  # by the number of the pass, from its trace

    def __call__(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> tuple[State, dict[str, Any]]:
        """Returns the state after a step, and metrics; consumes `state`."""
        files = files_of(state)
        check_newest(state)
        inside = detached(state)
        found, changed, metrics = self.gradients(inside, batch, **optional_rng(rng))
        if self.is_one_pass:
            files.pipeline.start_reading()
        is_applied = found.applied is None or bool(found.applied)
        disk = FromDisk({}, {})
        if is_applied:
            disk = succeed_together(lambda: self._passes(files, inside, found))
        self._wait((found, disk))
        new = self.rest(inside, found, changed, disk)
        if is_applied:
            files.pipeline.store.commit()
        return attached(new, files), metrics

    @property
    def is_one_pass(self) -> bool:
        """Whether one pass over all records is known to be enough."""
        return list(self.visits) == [0]

    def _passes(self, files: StateFiles, state: State, found: StepGrads) -> FromDisk:
        """Runs all passes over the records of an applied step."""
        grads = {i: found.grads[i].reduced for i in self.plan.disk_fields}
        params = self.plan.flat_params(state.params)
        given = GivenArrays(grads, {i: params[i] for i in self.plan.disk_fields})
        sums: dict[int, jax.Array] = {}
        results: dict[int, jax.Array] = {}
        level = 0
        while not results:
            operands = self.numbers(level, state, found, sums)
            self._wait(operands)
            visits = self.visits[level]
            run = RecordRun(files, self.programs, level, visits, operands, given)
            made: PassResults = run.run(writes=not visits or not visits[0].makes_sums)
            sums, results, level = {**sums, **made.sums}, made.results, level + 1
        return FromDisk(sums, results)

    def _numbers(self, level: int, state: State, found: StepGrads, sums: Mapping[int, jax.Array]) -> Any:
        tx = state.tx
        visits, operands = tx.visits(found.grads, state.opt_state, state.params, found.applied, found.value, sums)
        self.visits[level] = visits
        return operands

    def _rest(self, state: State, found: StepGrads, changed: Any, disk: FromDisk) -> State:
        new = next_state(state, found, changed, disk)
        return map_state(lambda x, leaf: jax.lax.with_sharding_constraint(x, self.plan.sharding(leaf)), self.plan, new)

    def _wait(self, x: Any) -> None:
        if _compat.starves_steps(self.plan.mesh):
            jax.block_until_ready(x)

    def trace(self, state: State, batch: PyTree, **rng: Any) -> Any:
        """Traces the first program, of loss and gradients."""
        return self.gradients.trace(detached(state), batch, **rng)

    def eval_shape(self, state: State, batch: PyTree, **rng: Any) -> Any:
        """Returns the shapes of the results."""
        _, _, metrics = self.gradients.eval_shape(detached(state), batch, **rng)
        return state, metrics

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        for jitted in (self.gradients, self.numbers, self.rest):
            jitted.clear_cache()
        self.programs = Programs(self.plan)
        self.visits.clear()
