"""An update of records whose last pass is ready, and passes that run beside steps.

    nothing --prepare--> ready --start--> running --counts--> nothing
                           ^                 |
                           +---- it fails ---+

Nobody else may use the records while a pass runs. Ctrl-C in a wait leaves it running: whoever needs the records next
waits for the same pass, and none is started twice.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from typing import NamedTuple, cast

import jax

from jzero.core.base.types import State
from jzero.core.disk.pipeline import Pipeline, RunStats
from jzero.core.disk.stores import CopyingStore
from jzero.core.processes.agree import succeed_together
from jzero.core.records.programs import RecordUpdate
from jzero.core.records.records import Records
from jzero.core.records.run import RecordPass, StepArrays
from jzero.core.records.threads import in_thread
from jzero.core.update.run import Done
from jzero.core.update.whole import Grad, StepGrads


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
