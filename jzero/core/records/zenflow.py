"""ZenFlow: gradients of some columns count at once, those of the others at the end of an interval.

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

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jzero.core.base.guard import warn
from jzero.core.base.types import State
from jzero.core.config.precision import scale_by, wide_dtype
from jzero.core.disk.pipeline import RunStats
from jzero.core.processes.exchange import succeed_together
from jzero.core.records.columns import DeviceColumns, DevicePart
from jzero.core.records.records import Record, Records, first_holders
from jzero.core.records.run import PartsOnHost, RecordPass, RecordUpdate, StepArrays, host_cpu
from jzero.core.records.schedules import NOTHING, Gradients, Schedule, Stepped, apply_now, copying
from jzero.core.update.columns import choose_columns
from jzero.core.update.program import UpdateProgram
from jzero.core.update.run import Done, Operands
from jzero.core.update.whole import StepGrads


class Noted(NamedTuple):
    """What a pass with the mean of gradients takes from the last step of an interval.

    Attributes:
      step: The step's gradients, without arrays.
      program: The update by means of gradients.
      scalars: Those that each of its kernels reads.
      sums: Sums over parameters in records.
    """

    step: StepGrads
    program: UpdateProgram
    scalars: list[list[jax.Array]]
    sums: dict[int, jax.Array]


class ZenFlowSchedule(Schedule):
    """Applies gradients to some columns at once, to the others at the end of an interval, see [Note: ZenFlow].

    Attributes:
      columns: The columns on the devices.
      sums: Sums of gradients by parameter and device, float32 on the host.
      count: Number of gradients in the sums.
      version: As for `Pending`.
      noted: What the pass beside steps reads of the last step.
    """

    def __init__(self, records: Records) -> None:
        super().__init__()
        assert records.plan.config.offload.zenflow is not None
        self.plan, self.settings = records.plan, records.plan.config.offload.zenflow
        self.columns = DeviceColumns(records)
        self.sums: dict[DevicePart, jax.Array] = {}
        self.count, self.version = 0, 0
        self.noted: Noted | None = None
        leaves = {i: self.plan.leaves[i].grad for i in self.plan.record_fields}
        self.chooses = [i for i, leaf in leaves.items() if self.plan.num_chosen(leaf)]
        self.partly_chosen = [
            i for i, leaf in leaves.items() if self.plan.num_chosen(leaf) < leaf.part_shape[leaf.column_dim]
        ]

    def waits(self) -> bool:
        """Whether gradients wait, or columns are on the devices."""
        return self.noted is not None

    def overlay(self, record: Record, views: Sequence[np.ndarray]) -> None:
        """Writes the columns that are on the devices into the fields of a record."""
        self.columns.overlay(record, views)

    def step(self, update: RecordUpdate, records: Records, state: State, gradients: Callable[[], Gradients]) -> Stepped:
        """Runs a step that applies its gradients to some columns."""
        number = int(jax.device_get(state.step))
        step, changed, metrics = got = gradients()
        update.wait(step)
        if number < self.settings.warm_up_steps or not step.is_applied:
            return apply_now(update, records, state, got)
        begun = time.perf_counter()
        state = self._begin(update, state, step, number)
        waited = time.perf_counter() - begun
        done, columns = self._note(update, state, step), self.columns
        self._add(step)
        new, columns.on_device = update.finish_columns(state, columns.on_device, columns.chosen, changed, done)
        update.wait(new)
        self.version += 1
        begun = time.perf_counter()
        new, stats = self._end(update, records, new, number)
        return Stepped(new, metrics, stats, waited + time.perf_counter() - begun)

    def _begin(self, update: RecordUpdate, state: State, step: StepGrads, number: int) -> State:
        """Returns the state, after which a step can change it; what raises does so here, and has changed nothing."""
        chooses = self.chooses and (not self.columns.chosen or number % self.settings.select_interval == 0)
        if self.background.run is not None and (chooses or self._is_last(number)):
            self.background.result()
        if chooses:
            state = self._finish_pass(update, state)[0]
            chosen = choose_columns(self.plan, {i: step.grads[i].reduced for i in self.chooses})
            update.wait(chosen)
            self.columns.take(chosen)
        else:
            self.background.start()  # again, if it failed
        return state

    def _end(self, update: RecordUpdate, records: Records, state: State, number: int) -> tuple[State, RunStats]:
        """Returns the state after a step; at the end of an interval one pass counts, and the next one begins."""
        if not self.partly_chosen or not self._is_last(number):
            return state, NOTHING
        state, stats = self._finish_pass(update, state)
        self.background.prepare(self._mean_pass(update, records, state))
        self.sums, self.count = {}, 0
        self.background.start()
        if not self.settings.overlap or (self.chooses and (number + 1) % self.settings.select_interval == 0):
            try:
                return self._finish_pass(update, state)
            except RuntimeError as error:  # a `DiskError` in the process where it happened
                warn(f"The update of records failed, and the next step tries again: {error}")
        return state, stats

    def _is_last(self, number: int) -> bool:
        return (number + 1) % self.settings.update_interval == 0

    def _note(self, update: RecordUpdate, state: State, step: StepGrads) -> Done:
        """Notes the numbers of the update of a step; returns what is known of it."""
        program, means, light = update.program(state, step), update.program(state, step, means=True), step.without_grads
        _, sums = update.scalars(program, 0, state, step, {})
        update.wait(sums)
        operands, _ = update.scalars(means, 0, state, light, sums)
        update.wait(operands)
        self.noted = Noted(light, means, [x.scalars for x in operands], sums)
        return Done(program, step, sums, {})

    def _add(self, step: StepGrads) -> None:
        """Adds the gradients of a step to the sums."""
        cpu = host_cpu()
        for i in self.partly_chosen:
            grad, leaf = step.grads[i], self.plan.leaves[i].grad
            factors = jax.device_put(jax.device_get(grad.factors), cpu)
            parts = {s.device: s.data for s in grad.reduced.addressable_shards}
            for device in dict.fromkeys(first_holders(self.plan, leaf).values()):
                part = jax.device_put(jax.device_get(parts[device]), cpu)
                old = self.sums.get((i, device))
                zeros = np.zeros(part.shape, wide_dtype(part.dtype))
                self.sums[i, device] = _added(jax.device_put(zeros, cpu) if old is None else old, part, factors)
        self.count += 1

    def _means(self) -> dict[int, PartsOnHost]:
        """Returns the mean of the gradients in the sums, by parameter and device."""
        means: dict[int, dict[jax.Device, np.ndarray]] = {i: {} for i in self.plan.record_fields}
        for (i, device), x in self.sums.items():
            means[i][device] = np.asarray(_divided(x, jax.device_put(np.float32(self.count), host_cpu())))
        for i in set(self.plan.record_fields) - set(self.partly_chosen):  # nothing of it counts
            zeros = np.zeros(self.plan.leaves[i].grad.part_shape, np.float32)
            means[i] = dict.fromkeys(first_holders(self.plan, self.plan.leaves[i].grad).values(), zeros)
        return dict(means)

    def _mean_pass(self, update: RecordUpdate, records: Records, state: State) -> RecordPass:
        """Returns the pass with the mean of the gradients, with the numbers of the last step."""
        assert self.noted is not None
        step, program, scalars, sums = self.noted
        now, _ = update.scalars(program, 0, state, step, sums)
        update.wait(now)
        operands = [Operands(x.arrays, y) for x, y in zip(now, scalars, strict=True)]
        params = update.params(state)
        arrays = StepArrays(self._means(), {i: params[i] for i in self.plan.record_fields})
        return RecordPass(records, update.programs, program, 0, operands, arrays)

    def _finish_pass(self, update: RecordUpdate, state: State) -> tuple[State, RunStats]:
        """Returns the state once the pass beside steps, if there is one, is done and counts; consumes the state."""
        if self.background.run is None:
            return state, NOTHING
        stats = self.background.result()
        new = update.apply_sums(state, self.background.run.results(), self.columns.chosen)
        self.background.count()
        return new, stats

    def apply_pending(self, update: RecordUpdate, records: Records, state: State, target: Records) -> State:
        """Lets everything count: the pass beside steps, the sums, and the columns on the devices."""
        keeps = target is not records
        if not keeps:
            state, _ = self._finish_pass(update, state)
        elif self.background.run is None:
            succeed_together(lambda: copying(records, target).run(lambda number, buffer: None))
        else:
            self.background.repeat_into(target)
            state = update.apply_sums(state, self.background.run.results(), self.columns.chosen)
        if keeps:
            target.pipeline.store.commit()
        if self.count:
            last = self._mean_pass(update, target, state)
            succeed_together(last.run)
            state = update.apply_sums(state, last.results(), self.columns.chosen)
            target.pipeline.store.commit()
        if self.columns.chosen:
            self.columns.move(target.pipeline, {})
        if not keeps:
            target.pending = ZenFlowSchedule(target)
            target.pending.version = self.version  # no number comes twice
        return state


@functools.partial(jax.jit, donate_argnums=0)
def _added(total: jax.Array, grad: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    return total + scale_by(grad, *factors).astype(total.dtype)


@jax.jit
def _divided(total: jax.Array, count: jax.Array) -> jax.Array:
    return total / lax.convert_element_type(count, total.dtype)
