"""ZenFlow: columns with large gradients are updated in each step, the others beside the steps of an interval.

In: a state in records, the gradients of its steps. Out: the same state, whose records, columns on the devices and
gradients that have been added up are in its `StateFiles`.

[Note: ZenFlow]
Steps count from 0, those that are applied. An interval is `update_interval` of them. In its last step the numbers of
the update (count, learning rate, clipping) are those of that step, for all columns alike; the mean of its gradients
then goes through the optimizer beside the next interval, at whose end the new values count. With `overlap=False` they
count at once. Before columns are chosen anew everything counts, so that no gradient is lost or counts twice; then
masters and optimizer state of the chosen columns move from the records to the devices, and back later. Nothing is
zeroed. Whatever reads the state as a whole (saving, laying out anew) gets a copy in which everything counts, a mean
over fewer steps included.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero._types import State
from jzero.arrays.disk_files import StateFiles, first_holders
from jzero.arrays.processes import succeed_together
from jzero.config.offload import ZenFlow
from jzero.config.precision import scale_by, wide_dtype
from jzero.disk.pipeline import Pipeline, RunStats
from jzero.disk.stores import CopyingStore
from jzero.plan.plan import ZeroPlan
from jzero.state.near_columns import NearColumns, Part
from jzero.state.next_state import StepGrads
from jzero.state.record_update import RecordUpdate, record_update
from jzero.state.threads import in_thread
from jzero.update.columns import choose_columns
from jzero.update.records import RecordRun, host_cpu


class Noted(NamedTuple):
    """What a pass with the mean of gradients reads of the last step of an interval.

    Attributes:
      numbers: Those of each visit.
      sums: Sums over parameters in records.
      scalars: The step's gradients, without arrays.
    """

    numbers: list[list[jax.Array]]
    sums: dict[int, jax.Array]
    scalars: StepGrads


@dataclasses.dataclass(eq=False)
class Flow:
    """What a state with `Offload(zenflow=...)` has beside its records.

    Attributes:
      files: The records.
      columns: The columns on the devices.
      sums: Sums of gradients by parameter and device, float32 on the host.
      count: Number of gradients in the sums.
      run: The pass that runs beside steps, if one does.
      done: Its result.
      noted: What the pass reads of the last step.
    """

    files: StateFiles
    columns: NearColumns = dataclasses.field(init=False)
    sums: dict[Part, jax.Array] = dataclasses.field(default_factory=dict)
    count: int = 0
    run: RecordRun | None = None
    done: concurrent.futures.Future[RunStats] | None = None
    noted: Noted | None = None

    def __post_init__(self) -> None:
        self.columns = NearColumns(self.files)

    @property
    def plan(self) -> ZeroPlan:
        """The plan of the state."""
        return self.files.plan

    @property
    def settings(self) -> ZenFlow:
        """How the state is updated."""
        assert self.plan.config.offload.zenflow is not None
        return self.plan.config.offload.zenflow

    @functools.cached_property
    def far(self) -> list[int]:
        """The parameters of which some columns are not on the devices once columns are chosen."""
        shapes = {i: self.plan.leaves[i].grad.part_shape for i in self.plan.disk_fields}
        sizes = {i: shape[self.plan.leaves[i].grad.column_dim] for i, shape in shapes.items()}
        return [i for i, size in sizes.items() if self.plan.num_chosen(self.plan.leaves[i].grad) < size]

    @functools.cached_property
    def chooses(self) -> list[int]:
        """The parameters of which some columns are on the devices once columns are chosen."""
        return [i for i in self.plan.disk_fields if self.plan.num_chosen(self.plan.leaves[i].grad)]

    def begin_step(self, state: State, step_grads: StepGrads, number: int) -> State:
        """Returns the state, after which a step can change it; what raises does so here, and has changed nothing.

        Args:
          state: The state, detached.
          step_grads: The gradients of the step.
          number: The number of the step.
        """
        chooses = self.chooses and (not self.columns.chosen or number % self.settings.select_interval == 0)
        if self.run is not None and (chooses or self._is_last(number)):
            self.join()
        if chooses:
            state = state if self.run is None else self.land(state)[0]
            self.choose(record_update(state.tx), step_grads)
        return state

    def end_step(self, state: State, number: int) -> tuple[State, RunStats | None]:
        """Returns the state after a step; at the end of an interval one pass counts, and the next one begins."""
        if not self.far or not self._is_last(number):
            return state, None
        stats = None
        if self.run is not None:
            state, stats = self.land(state)
        self.begin(state)
        if not self.settings.overlap or (self.chooses and (number + 1) % self.settings.select_interval == 0):
            state, stats = self.try_to_land(state)
        return state, stats

    def _is_last(self, number: int) -> bool:
        return (number + 1) % self.settings.update_interval == 0

    def choose(self, update: RecordUpdate, step_grads: StepGrads) -> None:
        """Takes the columns with the largest gradients to the devices, in place of others; nothing may be late."""
        chosen = choose_columns(self.plan, {i: step_grads.grads[i].reduced for i in self.chooses})
        update.wait(chosen)
        self.columns.take(chosen)

    def add(self, step_grads: StepGrads) -> None:
        """Adds the gradients of a step to the sums."""
        cpu = host_cpu()
        for i in self.far:
            grad, leaf = step_grads.grads[i], self.plan.leaves[i].grad
            factors = [np.asarray(x) for x in grad.factors]
            parts = {s.device: s.data for s in grad.reduced.addressable_shards}
            for device in dict.fromkeys(first_holders(self.plan, leaf).values()):
                part = jax.device_put(np.asarray(parts[device]), cpu)
                old = self.sums.get((i, device))
                zeros = np.zeros(part.shape, wide_dtype(part.dtype))
                self.sums[i, device] = _added(jax.device_put(zeros, cpu) if old is None else old, part, factors)
        self.count += 1

    def _mean(self) -> dict[int, dict[jax.Device, np.ndarray]]:
        """Returns the mean of the gradients in the sums, by parameter and device."""
        means: dict[int, dict[jax.Device, np.ndarray]] = {i: {} for i in self.plan.disk_fields}
        for (i, device), x in self.sums.items():
            means[i][device] = np.asarray(_divided(x, np.float32(self.count)))
        for i in set(self.plan.disk_fields) - set(self.far):  # nothing of it counts
            zeros = np.zeros(self.plan.leaves[i].grad.part_shape, np.float32)
            means[i] = dict.fromkeys(first_holders(self.plan, self.plan.leaves[i].grad).values(), zeros)
        return means

    def note(self, state: State, step_grads: StepGrads) -> dict[int, jax.Array]:
        """Remembers the numbers of the update of a step, and returns sums over parameters in records.

        Args:
          state: The state before the step, detached.
          step_grads: The gradients of the step.
        """
        late, sums = record_update(state.tx).numbers_of_late(state, step_grads)
        self.noted = Noted([x.numbers for x in late.operands], sums, step_grads._replace(grads=[]))
        return sums

    def begin(self, state: State) -> None:
        """Starts the pass with the mean of the gradients, in a thread; they are gone then."""
        self.run = self._late_run(self.files, state)
        self.sums, self.count = {}, 0
        self.done = in_thread(self.run.run)

    def _late_run(self, files: StateFiles, state: State) -> RecordRun:
        """Returns the pass with the mean of the gradients, with the numbers of the last step."""
        update, noted = record_update(state.tx), self.noted
        assert noted is not None
        late = update.late_pass(state, noted.scalars, noted.sums)
        operands = [x._replace(numbers=y) for x, y in zip(late.operands, noted.numbers, strict=True)]
        return update.late_run(files, state, dataclasses.replace(late, operands=operands), self._mean())

    def settle(self, state: State, target: StateFiles) -> State:
        """Returns a state in which everything counts, with all of it in the records of `target`.

        Args:
          state: The state, detached; it stays as it is unless `target` are its own records.
          target: New records, or its own.
        """
        keeps, update = target is not self.files, record_update(state.tx)
        land = update.land_copy if keeps else update.land
        self.files.wait()
        if keeps:
            both = CopyingStore(self.files.pipeline.store, target.pipeline.store)
            pipeline = Pipeline(both, threads=self.plan.config.offload.disk_threads)
            run = self.run
            succeed_together(lambda: pipeline.run(lambda number, buffer: None) if run is None else run.run(pipeline))
            state = state if run is None else land(state, run.results(), self.columns.chosen)
            target.pipeline.store.commit()
        elif self.run is not None:
            state, _ = self.land(state)
        if self.count:
            last = self._late_run(target, state)
            succeed_together(last.run)
            state = land(state, last.results(), self.columns.chosen)
            target.pipeline.store.commit()
        if self.columns.chosen:
            self.columns.move(target.pipeline, {})
        if not keeps:
            self.files.waiting = self.files.overlay = None
        return state

    def join(self) -> RunStats:
        """Waits for the pass; nothing of it counts yet.

        Raises:
          DiskError: The pass failed, in this process. It begins anew, beside the next step.
        """
        run, done = self.run, self.done
        assert run is not None
        assert done is not None

        def result() -> RunStats:
            concurrent.futures.wait([done])  # if Ctrl-C ends this, the pass goes on, and the next call waits for it
            if done.exception() is not None:
                self.done = in_thread(run.run)
            return done.result()

        return succeed_together(result)

    def land(self, state: State) -> tuple[State, RunStats]:
        """Returns the state once the pass is done and counts; consumes the state. Raises as `join` does."""
        stats = self.join()
        assert self.run is not None
        landed = record_update(state.tx).land(state, self.run.results(), self.columns.chosen)
        self.files.pipeline.store.commit()
        self.run = self.done = None
        return landed, stats

    def try_to_land(self, state: State) -> tuple[State, RunStats | None]:
        """Lands the pass if it succeeds; otherwise the next step tries again, which can raise before it changes any."""
        try:
            return self.land(state)
        except RuntimeError as error:  # a `DiskError` in the process where it happened
            warnings.warn(f"The update of records failed, and the next step tries again: {error}", stacklevel=2)
            return state, None


def flow_of(files: StateFiles) -> Flow:
    """Returns what a state with `Offload(zenflow=...)` has beside its records."""
    if files.waiting is None:
        files.waiting = Flow(files)
    flow: Flow = files.waiting
    return flow


@functools.partial(jax.jit, donate_argnums=0)
def _added(total: jax.Array, grad: jax.Array, factors: Sequence[np.ndarray]) -> jax.Array:
    return total + scale_by(grad, *map(jnp.asarray, factors)).astype(total.dtype)


@jax.jit
def _divided(total: jax.Array, count: np.float32) -> jax.Array:
    return total / lax.convert_element_type(count, total.dtype)
