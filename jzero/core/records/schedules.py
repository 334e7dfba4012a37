"""When the gradients of a step count: at once, or one step later; `zenflow` has the third schedule.

    stepped = records.pending.step(update, records, state, gradients)
    state = records.pending.apply_pending(update, records, state, target)      nothing waits any more

A schedule decides which gradients an update gets and when it counts; a `BackgroundPass` runs beside steps.

[Note: States of records]
What each call does, by what waits for the records of a state. Only ZenFlow and `delay=1` know the three in the middle.

                   clean     gradients wait    ready          running          failed        released
    step           applies   prepares, runs    starts it      waits for it     starts it     RuntimeError
    read a leaf    reads     reads             reads          waits, reads     reads         RuntimeError
    save, move     copies    applies to a copy the same       waits, the same  the same      RuntimeError
    `release_disk` frees     frees             frees          waits, frees     frees         RuntimeError

*Ready*: everything that the pass reads beside records is known. *Failed* is ready once more: the pass wrote only the
other slot, so the next step starts it again, and raises before it changes anything if it fails again. Where there is
one slot (`delay=1` in the host's memory) a failed pass leaves the records torn, and each call says to restore a
checkpoint. Ctrl-C never ends a pass that runs: it goes on, and whoever needs the records next waits for it. Until the
last program of a step begins, an error or Ctrl-C changes nothing. That program consumes the state; the records count
when it has begun.

[Note: Delayed updates]
With `Offload(delay=1)` a step applies the gradients of the step before, on the host's CPU, beside its own loss and
gradients. Reduced gradients wait, with their factors. They stay on the devices until the next step begins;
then numbers are computed from the state in which the update counts, and everything that the pass over records reads
goes to the host, so that the pass needs no device and runs in a thread. The first step has nothing to apply: it changes
no parameter and does not count in `state.step`. A step with non-finite gradients leaves nothing for the next step to
apply. The loss scale, and state that the loss changes itself, such as batch statistics, change at once.

    nothing --prepare--> ready --start--> running --counts--> nothing
                           ^                 |
                           +---- it fails ---+

Nobody else may use the records while a pass runs. Ctrl-C in a wait leaves it running: whoever needs the records next
waits for the same pass, and none is started twice.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from jzero.core.base.types import PyTree, State
from jzero.core.disk.pipeline import Pipeline, RunStats
from jzero.core.disk.stores import CopyingStore
from jzero.core.processes.exchange import succeed_together
from jzero.core.records.records import Pending, Records
from jzero.core.records.run import RecordPass, RecordUpdate, StepArrays
from jzero.core.update.run import Done
from jzero.core.update.whole import Grad, StepGrads

NOTHING = RunStats(0, 0, 0, 0)


class Gradients(NamedTuple):
    """Results of the first program of a step: gradients, what the loss wrote, and metrics."""

    step: StepGrads
    changed: Any
    metrics: dict[str, PyTree]


class Stepped(NamedTuple):
    """A step that is done.

    Attributes:
      stats: What a pass over records took, if one counts.
      waited: Seconds that the step waited for it.
    """

    state: State
    metrics: dict[str, PyTree]
    stats: RunStats = NOTHING
    waited: float = 0.0


class Schedule(Pending, abc.ABC):
    """Decides when gradients count.

    Attributes:
      background: The pass beside steps.
    """

    def __init__(self) -> None:
        self.background = BackgroundPass()

    def wait(self) -> None:
        """Waits for the pass beside steps."""
        self.background.wait()

    @abc.abstractmethod
    def step(self, update: RecordUpdate, records: Records, state: State, gradients: Callable[[], Gradients]) -> Stepped:
        """Returns the state after a step; consumes it.

        Args:
          update: The update of the state.
          records: The records of the state.
          state: The state, without records.
          gradients: Computes the gradients of the step.
        """

    @abc.abstractmethod
    def apply_pending(self, update: RecordUpdate, records: Records, state: State, target: Records) -> State:
        """Returns a state for which nothing waits, with its records in `target`; consumes a state.

        What waits goes on waiting, unless `target` are its own records.
        """


class AtOnce(Schedule):
    """Applies the gradients of a step at once."""

    def step(self, update: RecordUpdate, records: Records, state: State, gradients: Callable[[], Gradients]) -> Stepped:
        """Runs a step, and then the passes over records."""
        got = gradients()
        if not update.program(state, got.step).num_levels:  # one pass over all records
            records.pipeline.start_reading()
        update.wait(got.step)
        return apply_now(update, records, state, got)

    def apply_pending(self, update: RecordUpdate, records: Records, state: State, target: Records) -> State:
        """Returns the state, for which nothing waits."""
        return state


def apply_now(update: RecordUpdate, records: Records, state: State, got: Gradients) -> Stepped:
    """Returns the state after gradients, if they are to be applied; consumes it."""
    if not got.step.is_applied:
        return Stepped(update.finish(state, got.step, got.changed, None), got.metrics)

    def passes() -> tuple[Prepared, RunStats]:
        ready = prepare(update, records, state, got.step)
        return ready, ready.run.run()

    ready, stats = succeed_together(passes)
    new = update.finish(state, ready.begun.grads, got.changed, ready.done)
    records.pipeline.store.commit()
    return Stepped(new, got.metrics, stats, stats.waited_seconds)


class Delayed(Schedule):
    """Applies the gradients of a step beside the next one, see [Note: Delayed updates].

    Attributes:
      waiting: The gradients that the next step applies, or its update, once that is prepared.
    """

    waiting: StepGrads | Prepared | None = None

    def waits(self) -> bool:
        """Whether gradients wait."""
        return self.waiting is not None

    def _prepare(self, update: RecordUpdate, records: Records, state: State) -> Prepared:
        """Prepares the update that waits; an interrupted step may have done so."""
        assert self.waiting is not None
        if isinstance(self.waiting, StepGrads):
            self.waiting = prepare(update, records, state, self.waiting)
            self.background.prepare(self.waiting.run)
        return self.waiting

    def step(self, update: RecordUpdate, records: Records, state: State, gradients: Callable[[], Gradients]) -> Stepped:
        """Runs a step beside the update with the gradients of the one before."""

        def begun() -> Prepared:
            ready = self._prepare(update, records, state)
            self.background.start()
            return ready

        ready = succeed_together(begun) if state.opt_state.disk.waiting else None
        try:
            got = gradients()
            update.wait(got.step)
            is_applied = got.step.is_applied
            jax.block_until_ready(got.step)
        finally:
            waited = self.background.wait()  # nobody else may use the records before
        stats = NOTHING if ready is None else self.background.result()
        light = got.step.without_grads  # those that are applied are others
        new = update.finish(state, light, got.changed, None if ready is None else ready.done)
        if ready is not None:
            self.background.count()
        self.waiting = got.step if is_applied else None
        self.version += is_applied
        return Stepped(new, got.metrics, stats, waited)

    def apply_pending(self, update: RecordUpdate, records: Records, state: State, target: Records) -> State:
        """Applies the gradients that wait."""
        keeps = target is not records
        ready = succeed_together(lambda: self._prepare(update, records, state))
        if keeps:
            self.background.repeat_into(target)
        else:
            self.background.result()
        light = StepGrads([], None, None, ready.begun.grads.overflowed, ready.begun.grads.value)
        new: State = update.finish(state, light, {}, ready.done)
        if keeps:
            target.pipeline.store.commit()
        else:
            self.background.count()
            self.waiting = None
        return new


class Prepared(NamedTuple):
    """An update whose last pass is ready to run.

    Attributes:
      run: The pass, which makes new records.
      begun: What was computed before it.
    """

    run: RecordPass
    begun: Done

    @property
    def done(self) -> Done:
        """What was computed, once the pass has run."""
        return dataclasses.replace(self.begun, params=self.run.results())


def prepare(update: RecordUpdate, records: Records, state: State, step: StepGrads) -> Prepared:
    """Runs the passes of an update that only read, and everything that the last one reads beside records."""
    records.pipeline.store.check_whole()
    program, record_fields, params = update.program(state, step), update.plan.record_fields, update.params(state)
    arrays = StepArrays({i: step.grads[i].reduced for i in record_fields}, {i: params[i] for i in record_fields})
    sums: dict[int, jax.Array] = {}
    for level in range(program.num_levels + 1):
        operands, sums = update.scalars(program, level, state, step, sums)
        update.wait((operands, sums))
        run = RecordPass(records, update.programs, program, level, operands, arrays)
        if level < program.num_levels:
            run.run()
            sums |= run.sums()
    if not program.needs_grads:
        dropped = cast("jax.Array", None)  # an empty tree: no program gets it
        grads = [Grad(dropped, g.factors) if i in record_fields else g for i, g in enumerate(step.grads)]
        step = step._replace(grads=grads)
    return Prepared(run, Done(program, step, sums, {}))


class BackgroundPass:
    """The pass over records that runs beside steps, if there is one.

    Attributes:
      run: The pass, ready or running.
    """

    run: RecordPass | None = None
    _done: concurrent.futures.Future[RunStats] | None = None  # while it runs, and until it counts

    def prepare(self, run: RecordPass) -> None:
        """Takes a pass that is ready."""
        self.run, self._done = run, None

    def start(self) -> None:
        """Starts it in a thread, unless it runs or nothing is ready."""
        if self.run is not None and self._done is None:
            self.run.records.pipeline.store.check_whole()  # it may have failed
            self._done = in_thread(self.run.run)

    def wait(self) -> float:
        """Waits until nothing runs; returns the seconds."""
        begun = time.perf_counter()
        if self._done is not None:
            concurrent.futures.wait([self._done])
        return time.perf_counter() - begun

    def result(self) -> RunStats:
        """Waits for it; if it fails in any process, it is ready again."""
        self.start()
        done = self._done
        assert done is not None

        def stats() -> RunStats:
            if done.exception() is not None:  # if Ctrl-C ends this, the pass goes on
                self._done = None
            return done.result()

        return succeed_together(stats)

    def repeat_into(self, target: Records) -> None:
        """Runs it once more, from its own records, which stay as they are, into others."""
        self.wait()
        run = self.run
        assert run is not None
        succeed_together(lambda: run.run(copying(run.records, target)))

    def count(self) -> None:
        """Makes its records those of the state; nothing runs any more."""
        assert self.run is not None
        self.run.records.pipeline.store.commit()
        self.run = self._done = None


def copying(source: Records, target: Records) -> Pipeline:
    """Returns a pipeline that reads some records and writes others of the same plan."""
    both = CopyingStore(source.pipeline.store, target.pipeline.store)
    return Pipeline(both, threads=source.plan.config.offload.disk_threads)


T = TypeVar("T")


def in_thread(fn: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Starts a function in a thread of its own, which ends before the program does."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    # A `with` statement may have set it, which holds for its thread alone.
    has_wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

    def run() -> None:
        try:
            with jax.enable_x64(has_wide):
                future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jzero-update").start()
    return future
