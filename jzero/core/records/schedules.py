"""When the gradients of a step count: at once, or one step later; `zenflow` has the third schedule.

    stepped = records.pending.step(update, records, state, gradients)
    state = records.pending.apply_pending(update, records, state, target)      nothing waits any more

A schedule decides which gradients an update gets and when it counts; `background` runs its pass.

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
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jzero.core.base.types import PyTree, State
from jzero.core.disk.pipeline import RunStats
from jzero.core.processes.agree import succeed_together
from jzero.core.records.background import BackgroundPass, Prepared, prepare
from jzero.core.records.programs import RecordUpdate
from jzero.core.records.records import Pending, Records
from jzero.core.update.whole import StepGrads

NOTHING = RunStats(0, 0, 0, 0)


class Gradients(NamedTuple):
    """Results of the first program of a step: gradients, what the loss wrote, and metrics."""

    step: StepGrads
    changed: Any
    metrics: dict[str, PyTree]


class Stepped(NamedTuple):
    """A step that is done.

    Attributes:
      state: The state.
      metrics: Its metrics.
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
