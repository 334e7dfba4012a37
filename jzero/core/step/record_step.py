"""A train step whose update runs outside of `jit`, on records: several programs, driven by Python.

    gradients  loss and reduced gradients; keeps the state
    scalars    what the passes over records read beside them: counters, factors, norms
    records    new records and parameters, see `jzero.core.records.run`
    finish     the new state, from all that was computed; takes over the memory of the old one

When gradients count is in the state's records, see `jzero.core.records.schedules`. Until `finish` has begun nothing has
changed: an error, or Ctrl-C, leaves the state as it was. See [Note: Records outside of a program].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jzero.core.base.types import Jitted, PyTree, State
from jzero.core.engine.written_variables import Changed
from jzero.core.records.schedules import Gradients, Schedule, Stepped
from jzero.core.state.adapter import Metrics
from jzero.core.state.record_states import (
    attached,
    detached,
    for_loss,
    record_update,
    records_of,
    run_on_rows,
)
from jzero.core.step.compiler_options import Options
from jzero.core.step.inputs import optional_rng
from jzero.core.step.metrics import step_metrics
from jzero.core.update.transformation import ZeroTransformation
from jzero.core.update.whole import StepGrads


class RecordStep:
    """Callable like a jitted function of `(state, batch, rng)` that returns `(state, metrics)`.

    Args:
      gradients: `fn(state, batch, rng=None)`: the step's gradients, what the loss wrote, and the metrics.
      tx: The optimizer and plan of the state.
      compiler_options: XLA options for the program of gradients.
      directions: The order in which that program takes rows of parameters on disk, see `RowReader.begin`.
    """

    def __init__(
        self,
        gradients: Callable[..., tuple[StepGrads, Changed, Metrics]],
        tx: ZeroTransformation,
        compiler_options: Options | None,
        directions: Sequence[int],
    ) -> None:
        self.gradients: Jitted = jax.jit(gradients, compiler_options=compiler_options)  # type: ignore[assignment]
        self.directions = directions
        self.update = record_update(tx)

    def __call__(self, state: State, batch: PyTree, *, rng: jax.Array | None = None) -> tuple[State, Metrics]:
        """Returns the state after a step, and metrics; consumes `state`."""
        records, key = records_of(state), optional_rng(rng)

        def gradients() -> Gradients:
            if not records.plan.params_on_disk:
                return Gradients(*self.gradients(detached(state), batch, **key))
            return Gradients(*run_on_rows(lambda x: self.gradients(x, batch, **key), state, self.directions))

        assert isinstance(records.pending, Schedule)
        done = records.pending.step(self.update, records, detached(state), gradients)
        return attached(done.state, records), done.metrics | _rates(done, records.where)

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


def _rates(done: Stepped, where: str) -> Metrics:
    """Returns what a monitor shows of the pass over records for which a step waited."""
    seconds = done.stats.seconds or 1.0
    return step_metrics(
        {
            f"perf/{where}_read_bytes_per_s": done.stats.read_bytes / seconds,
            f"perf/{where}_write_bytes_per_s": done.stats.written_bytes / seconds,
            f"perf/{where}_wait_share": done.waited / seconds,
        }
    )
