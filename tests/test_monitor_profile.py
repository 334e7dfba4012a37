"""Profiles of steps of a loop."""

import contextlib

import jax
import pytest

import jzero
from jzero.monitor import progress as progress_module
from tests.monitor_runs import Reading, Record, quiet, run


def test_bar_ends_if_the_profile_cannot_begin(monkeypatch):
    closed = []
    monkeypatch.setattr(progress_module.Lines, "close", lambda self: closed.append(True))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(jzero.Monitor(profile_dir="p", profile_steps=(1, 1)), steps=1)
    assert len(closed) == 1


class Traces(list):
    """Stands for `jax.profiler`'s traces."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(jax.profiler, "start_trace", self.append)
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: self.append("stop"))
        steps = self

        class Annotation:
            def __init__(self, name, step_num):
                self.step = step_num

            def __enter__(self):
                steps.append(self.step)

            def __exit__(self, *error):
                steps.append(-self.step)

        monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", Annotation)


def test_one_profile_of_the_steps_asked_for(monkeypatch):
    traces, sink, reads = Traces(monkeypatch), Record(), []
    with quiet(sinks=[sink], every=100, start_step=20, profile_dir="p", profile_steps=(3, 4)) as monitor:
        for step in range(6):
            monitor.log({"loss": Reading(step, reads)})
            if step == 1:
                assert len(reads) == 2, "nothing of the steps before runs while it is traced"
            if step == 3:
                assert len(reads) == 4, "the trace ends when its steps have"
    assert traces == ["p", 23, -23, 24, -24, "stop"]
    ends = [step for step, values in sink if any(name.startswith("perf/") for name in values)]
    assert ends == [21, 22, 24, 26], "an interval of its own"


@pytest.mark.parametrize("error", [None, KeyError("mine")])
def test_profile_ends_with_the_loop(error, monkeypatch):
    traces = Traces(monkeypatch)
    with contextlib.nullcontext() if error is None else pytest.raises(KeyError, match="mine"):
        run(quiet(profile_dir="p", profile_steps=(2, 9)), steps=3, error=error)
    assert traces[0] == "p"
    assert traces[-1] == "stop"
    assert traces.count("stop") == 1
    assert sum(x for x in traces if isinstance(x, int)) == 0, "every annotation that began has ended"


def test_profile_that_was_not_taken_is_a_warning(monkeypatch):
    traces = Traces(monkeypatch)
    with pytest.warns(UserWarning, match="after 3 steps, .*, 10"):
        run(quiet(profile_dir="p"), steps=3)
    assert not traces
