"""The monitor of a training loop: what is fetched when, what sinks get, what a person sees, what is profiled."""

import contextlib
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.step.metrics import STEP_METRICS
from jzero.monitor import progress as progress_module
from jzero.monitor import readings as readings_module
from tests import disk_states, pages, shared
from tests.monitor_runs import Clock, Reading, Record, quiet, run


def test_nothing_is_read_before_the_step_after_the_interval():
    reads, sink = [], Record()
    with quiet(sinks=[sink], every=4) as monitor:
        seen = []
        for step in range(1, 11):
            monitor.log({"loss": Reading(step, reads)})
            seen.append(len(reads))
    # Step 1 is read once step 2 is dispatched, steps 2-4 once step 5 is, and so on: the devices always have work.
    assert seen == [0, 1, 1, 1, 4, 4, 4, 4, 8, 8]
    assert reads == list(range(1, 11)), "each once; the last ones at the end"
    assert [step for step, _ in sink] == list(range(1, 11))
    assert [values["loss"] for _, values in sink] == list(range(1, 11))


def test_time_in_pause_counts_nowhere(monkeypatch):
    clock, sink = Clock(monkeypatch), Record()
    with quiet(sinks=[sink], every=2) as monitor:
        for step in range(1, 7):
            clock.now += 1
            monitor.log({"loss": 1.0})
            if step == 4:
                with monitor.pause():
                    clock.now += 1000
                    assert [step for step, _ in sink] == [1, 2, 3, 4], "what is there was written first"
    clock.now += 1000
    assert {step: x["perf/seconds_per_step"] for step, x in sink if "perf/seconds_per_step" in x} == {
        2: 1,
        4: 0.5,  # the end of step 2 is seen when step 3 is dispatched
        6: 1,
    }


def test_memory_is_that_of_the_fullest_device_and_absent_where_unknown(monkeypatch):
    assert readings_module.peak_device_bytes() is None, "CPUs do not say"
    stats = [{"peak_bytes_in_use": 5, "bytes_in_use": 900}, {"peak_bytes_in_use": 70}, {}, None]
    devices = [types.SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    sink = Record()
    with quiet(sinks=[sink]) as monitor:
        monitor.log({"loss": 0.0})
    assert sink[0][1]["perf/peak_device_bytes"] == 70


IN_MEMORY = {"optimizer": "host", "path": None, "compute": "host"}
RECORDS = {  # the state's `Offload`, options of the step, and the metrics that it returns beside those of all steps
    "disk": ({}, {}, "disk"),
    "delay": ({**IN_MEMORY, "delay": 1}, {"clip_norm": 1.0}, "host"),
    "zenflow": (
        {**IN_MEMORY, "zenflow": jzero.ZenFlow(topk_ratio=0.5, update_interval=1)},
        {"accumulate_steps": 2},
        "host",
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_every_metric_of_a_step_with_records_is_logged_by_its_name(case, tmp_path):
    offload, options, where = RECORDS[case]
    state = disk_states.state_on_disk(**{"path": tmp_path, "layers": 1, "tx": optax.sgd(0.1, momentum=0.5), **offload})
    step, sink = jzero.make_train_step(disk_states.loss_fn, **options), Record()
    batch = {"x": np.ones((8, 37), np.float32), "y": np.ones((8, 11), np.float32)}
    with quiet(sinks=[sink], every=9) as monitor:
        state, metrics = step(state, batch)
        monitor.log(metrics)
    rates = {f"perf/{where}_read_bytes_per_s", f"perf/{where}_write_bytes_per_s", f"perf/{where}_wait_share"}
    own = {"perf/first_step_seconds", "perf/skipped_steps"}
    assert sink[0][1].keys() == {"loss", "grad_norm", "step_applied", *rates, *own}


def test_the_guide_has_every_metric_of_a_step_that_is_measured():
    guide = (pathlib.Path(__file__).parent.parent / "docs" / "monitoring.md").read_text()
    measured = [name for name, metric in STEP_METRICS.items() if metric.kind in ("rate", "share")]
    assert measured
    assert [name for name in measured if f"`{name}`" not in guide] == []


@pytest.mark.parametrize(
    ("metrics", "error", "text"),
    [
        ({"loss": 1.0, "aux": {"rows": jnp.ones((3,))}}, TypeError, r"'aux/rows': float32\[3\]"),
        ({"aux": [1, np.zeros((1, 1), np.int8)], "b": jnp.ones(2)}, TypeError, r"'aux/1': int8\[1, 1\]\n  'b': float"),
        ({"name": "text"}, TypeError, "'name': str 'text'"),
        ({"z": jnp.complex64(1j)}, TypeError, r"'z': complex64\[\]"),
        ({"key": jax.random.key(0)}, TypeError, r"'key': key<fry>\[\]"),
        ({"a/b": 1, "a": {"b": 2}}, ValueError, r"more than once: \['a/b'\]"),
        ({"perf": {"x": 1}}, ValueError, r"'perf/x'.*Rename"),
    ],
)
def test_what_cannot_be_a_metric_is_named(metrics, error, text):
    sink = Record()
    with quiet(sinks=[sink]) as monitor:
        for method in (monitor.log, monitor.write):
            with pytest.raises(error, match=text):
                method(metrics)
        assert monitor.step == 0, "not counted"
    assert not sink


def test_a_failing_sink_is_named_and_the_others_are_closed():
    good = Record()
    monitor = quiet(sinks=[shared.raising(OSError("disk full")), good])
    with pytest.raises(RuntimeError, match="failed at step 1: disk full") as caught:
        run(monitor, steps=9)
    assert monitor.step == 1, "the loop did not go on"
    assert isinstance(caught.value.__cause__, OSError)
    assert good.closed == 1


def test_the_loops_own_error_is_the_one_that_is_seen():
    class Unclosable(Record):
        def close(self):
            raise OSError("cannot close")

    good, bad = Record(), Unclosable()
    with pytest.raises(KeyError, match="mine") as caught:
        run(quiet(sinks=[good, bad]), steps=3, error=KeyError("mine"))
    assert "OSError: cannot close" in caught.value.__notes__[0]
    assert [step for step, _ in good] == [1, 2, 3], "what was there was written"
    assert good.closed == 1
    with pytest.raises(OSError, match="cannot close"):
        run(quiet(sinks=[bad, good]), steps=1)
    assert good.closed == 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "`every`.*got 0"),
        ({"every": 2.0}, ValueError, "`every`.*got 2.0"),
        ({"total_steps": -1}, ValueError, "`total_steps`.*got -1"),
        ({"tokens_per_step": True}, ValueError, "`tokens_per_step`.*got True"),
        ({"start_step": -1}, ValueError, "`start_step`.*got -1"),
        ({"profile_steps": (3, 2)}, ValueError, r"`profile_steps`.*\(3, 2\)"),
        ({"profile_steps": (0, 2)}, ValueError, r"`profile_steps`.*\(0, 2\)"),
        ({"sinks": ["log.jsonl"]}, TypeError, "`sinks`.*log.jsonl"),
    ],
)
def test_impossible_options(options, error, text):
    with pytest.raises(error, match=text):
        jzero.Monitor(**options)


def test_outside_of_with_and_twice():
    monitor = quiet()
    with pytest.raises(RuntimeError, match="inside of `with`"):
        monitor.log({"loss": 1.0})
    with monitor:
        monitor.log({"loss": 1.0})
    with pytest.raises(RuntimeError, match="inside of `with`"):
        monitor.write({"loss": 1.0})
    with pytest.raises(RuntimeError, match="another one"), monitor:
        pass


@pytest.mark.parametrize("every_process", [False, True])
def test_other_processes_are_silent_unless_asked(every_process, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    reads, sink = [], Record()
    with jzero.Monitor(sinks=[sink], every=2, every_process=every_process) as monitor:
        for step in range(6):
            monitor.log({"loss": Reading(step, reads)})
        with pytest.raises(TypeError, match="rows"):
            monitor.log({"rows": jnp.ones(3)})
        monitor.write({"x": Reading(9, reads)})
    assert (len(sink), len(reads), bool(capsys.readouterr().out)) == ((7, 7, True) if every_process else (0, 0, False))
    assert sink.closed == 1


@pytest.mark.slow
def test_guide_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run("monitoring.md")
    lines = [json.loads(line) for line in pathlib.Path("run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 46), 45, *range(46, 61), 60]
    assert list(pathlib.Path("run").rglob("*.xplane.pb"))


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
