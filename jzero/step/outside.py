"""A train step whose update runs outside of `jit`, on records: several programs, driven by Python.

    gradients  loss and reduced gradients; keeps the state
    numbers    what the passes over records read beside them: counters, factors, norms
    records    new records and parameters, see `jzero.update.records`
    rest       the new state, from the parameters and everything near; takes over the memory of the old one

Until `rest` has begun nothing has changed: an error, or Ctrl-C, leaves the state as it was. A step that is not applied
has no records. See [Note: Records outside of a program].
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from jzero._types import Jitted, PyTree, State
from jzero.arrays.disk_files import StateFiles
from jzero.arrays.processes import succeed_together
from jzero.disk.pipeline import RunStats
from jzero.engine.written_variables import Changed
from jzero.state.adapter import Metrics
from jzero.state.disk import attached, check_newest, detached, files_of, for_loss, run_on_rows
from jzero.state.next_state import StepGrads
from jzero.state.pending import Waiting
from jzero.state.record_update import Prepared, record_update
from jzero.state.threads import in_thread
from jzero.state.zenflow import flow_of
from jzero.step.compiler_options import Options
from jzero.step.inputs import optional_rng
from jzero.step.metrics import step_metrics
from jzero.update.transformation import ZeroTransformation
from jzero.update.visits import NO_DISK, FromDisk

Rng = Mapping[str, jax.Array]
"""The keyword `rng`, if there is a key."""


class OutsideStep:
    """Looks like a jitted function of `(state, batch, rng)` that returns `(state, metrics)`.

    Args:
      gradients: `fn(state, batch, rng=None)`: the step's gradients, what the loss wrote, and the metrics.
      tx: The transformation of the state.
      compiler_options: XLA options for the program of gradients.
      passes: The order in which that program takes rows of parameters on disk, see `RowReader.begin`.
    """

    def __init__(
        self,
        gradients: Callable[..., tuple[StepGrads, Changed, Metrics]],
        tx: ZeroTransformation,
        compiler_options: Options | None,
        passes: Sequence[int],
    ) -> None:
        self.gradients: Jitted = jax.jit(gradients, compiler_options=compiler_options)  # type: ignore[assignment]
        self.passes = passes
        self.update = record_update(tx)

    def __call__(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> tuple[State, Metrics]:
        """Returns the state after a step, and metrics; consumes `state`."""
        check_newest(state)
        offload = state.tx.plan.config.offload
        run = self._late if offload.delay else self._now if offload.zenflow is None else self._flow
        return run(files_of(state), state, batch, optional_rng(rng))

    def _now(self, files: StateFiles, state: State, batch: PyTree, rng: Rng) -> tuple[State, Metrics]:
        """Runs a step that applies its own gradients."""
        if files.rows is None:
            step_grads, changed, metrics = self.gradients(detached(state), batch, **rng)
        else:
            step_grads, changed, metrics = run_on_rows(lambda x: self.gradients(x, batch, **rng), state, self.passes)
        state = detached(state)
        if self.update.is_one_pass:
            files.pipeline.start_reading()
        if not self._are_applied(step_grads):
            return self._skipped(files, state, step_grads, changed, metrics)
        return self._applied(files, state, step_grads, changed, metrics)

    def _skipped(
        self, files: StateFiles, state: State, step_grads: StepGrads, changed: Changed, metrics: Metrics
    ) -> tuple[State, Metrics]:
        """Applies nothing; the loss scale and the like may change."""
        new = self.update.rest(state, step_grads, changed, None, NO_DISK)
        return attached(new, files), metrics | _rates(files, NOTHING, 0)

    def _applied(
        self, files: StateFiles, state: State, step_grads: StepGrads, changed: Changed, metrics: Metrics
    ) -> tuple[State, Metrics]:
        """Applies the gradients of a step at once."""

        def passes() -> tuple[Prepared, RunStats]:
            ready = self.update.prepare(files, state, step_grads)
            return ready, ready.run.run()

        ready, stats = succeed_together(passes)
        disk = FromDisk(ready.sums, ready.run.results())
        new = self.update.rest(state, ready.step_grads, changed, ready.step_grads, disk)
        files.pipeline.store.commit()
        return attached(new, files), metrics | _rates(files, stats, stats.waited_seconds)

    def _flow(self, files: StateFiles, state: State, batch: PyTree, rng: Rng) -> tuple[State, Metrics]:
        """Runs a step that applies its gradients to some columns, see [Note: ZenFlow]."""
        state, flow, number = detached(state), flow_of(files), int(state.step)
        step_grads, changed, metrics = self.gradients(state, batch, **rng)
        if not self._are_applied(step_grads):
            return self._skipped(files, state, step_grads, changed, metrics)
        if number < flow.settings.warm_up_steps:
            return self._applied(files, state, step_grads, changed, metrics)
        begun = time.perf_counter()
        state = flow.begin_step(state, step_grads, number)
        waited = time.perf_counter() - begun
        sums, light = flow.note(state, step_grads), step_grads._replace(grads=[])
        flow.add(step_grads)
        columns = flow.columns
        new, columns.near = self.update.rest_with_columns(
            state, step_grads, changed, sums, columns.chosen, light, columns.near
        )
        self.update.wait(new)
        files.version += 1
        begun = time.perf_counter()
        new, stats = flow.end_step(new, number)
        waited += time.perf_counter() - begun
        return attached(new, files, waits=True), metrics | _rates(files, stats or NOTHING, waited)

    def _late(self, files: StateFiles, state: State, batch: PyTree, rng: Rng) -> tuple[State, Metrics]:
        """Runs a step beside the update with the gradients of the one before, see [Note: Delayed updates]."""
        state, ready, waited = detached(state), None, 0.0
        if bool(state.opt_state.disk.waiting):
            ready = succeed_together(lambda: self._begin(files, state))
        try:
            step_grads, changed, metrics = self.gradients(state, batch, **rng)
            is_applied = self._are_applied(step_grads)
            jax.block_until_ready(step_grads)
        finally:
            done = None if ready is None else files.waiting.done
            if done is not None:  # nobody else may use the records before
                begun = time.perf_counter()
                concurrent.futures.wait([done])
                waited = time.perf_counter() - begun
        light = step_grads._replace(grads=[])  # those that are applied are others
        stats = NOTHING
        if ready is None or done is None:
            new = self.update.rest(state, light, changed, None, NO_DISK)
        else:
            stats = succeed_together(lambda: self._result_of(files, done))
            new = self.update.rest(state, light, changed, ready.step_grads, FromDisk(ready.sums, ready.run.results()))
            files.pipeline.store.commit()
        files.waiting = Waiting(step_grads) if is_applied else None
        return attached(new, files), metrics | _rates(files, stats, waited)

    def _begin(self, files: StateFiles, state: State) -> Prepared:
        """Starts the update that waits, in a thread; goes on with one that an interrupted step started."""
        waiting: Waiting = files.waiting
        if waiting.done is None:
            files.pipeline.store.check_whole()
        ready = waiting.ready or self.update.prepare(files, state, waiting.step_grads)
        done = waiting.done or in_thread(ready.run.run)
        files.waiting = Waiting(ready.step_grads, ready, done)
        return ready

    def _result_of(self, files: StateFiles, done: concurrent.futures.Future[RunStats]) -> RunStats:
        if done.exception() is not None:
            files.waiting = files.waiting._replace(done=None)  # the next step begins it anew
        return done.result()

    def _are_applied(self, step_grads: StepGrads) -> bool:
        self.update.wait(step_grads)
        return step_grads.applied is None or bool(step_grads.applied)

    def trace(self, state: State, batch: PyTree, **rng: jax.Array | None) -> jax.stages.Traced:
        """Traces the first program, of loss and gradients."""
        return self.gradients.trace(for_loss(state), batch, **rng)

    def eval_shape(self, state: State, batch: PyTree, **rng: jax.Array | None) -> tuple[State, Metrics]:
        """Returns the shapes of the results."""
        _, _, metrics = self.gradients.eval_shape(for_loss(state), batch, **rng)
        return state, metrics

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        self.gradients.clear_cache()
        self.update.clear_cache()


NOTHING = RunStats(0, 0, 0, 0)


def _rates(files: StateFiles, stats: RunStats, waited: float) -> Metrics:
    """Returns what a monitor shows of a pass over records, for which the step waited some seconds."""
    where = "host" if files.plan.config.offload.path is None else "disk"
    seconds = stats.seconds or 1.0
    return step_metrics(
        {
            f"perf/{where}_read_bytes_per_s": stats.read_bytes / seconds,
            f"perf/{where}_write_bytes_per_s": stats.written_bytes / seconds,
            f"perf/{where}_wait_share": waited / seconds,
        }
    )
