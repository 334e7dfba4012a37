"""The monitor of a training loop: what is fetched when, what sinks get, what a person sees, what is profiled."""

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.monitor import readings as readings_module
from jzero.step.metrics import STEP_METRICS
from tests import disk_states, pages
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


def test_times_are_between_fetches_and_the_first_step_is_apart(monkeypatch):
    clock, sink = Clock(monkeypatch), Record()
    with quiet(sinks=[sink], every=4, tokens_per_step=600) as monitor:
        for seconds in (30, 1, 1, 1, 3, 3, 3, 3, 5):
            clock.now += seconds
            monitor.log({"loss": 1.0})
        clock.now += 7
    timed = {step: {k: v for k, v in values.items() if k.startswith("perf/")} for step, values in sink}
    assert [step for step, values in timed.items() if values] == [1, 4, 8, 9]
    assert timed[1] == {"perf/first_step_seconds": 31}, "until step 1 was read, after step 2 was dispatched"
    assert timed[4] == {"perf/seconds_per_step": (1 + 1 + 3) / 3, "perf/tokens_per_second": 600 / (5 / 3)}
    assert timed[8]["perf/seconds_per_step"] == (3 + 3 + 3 + 5) / 4
    assert timed[9]["perf/seconds_per_step"] == 7, "read at the end"


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


def test_values_now_and_then_come_at_once_after_the_steps_before():
    sink = Record()
    with quiet(sinks=[sink], every=10) as monitor:
        monitor.write({"validation": 9.0})
        for _ in range(3):
            monitor.log({"loss": 1.0})
        monitor.write({"validation": {"loss": jnp.float32(8)}})
        assert sink[0] == (0, {"validation": 9.0})
        assert [step for step, _ in sink] == [0, 1, 2, 3, 3]
        assert sink[-1] == (3, {"validation/loss": 8.0})


def test_a_failing_sink_is_named_and_the_others_are_closed():
    good = Record()

    def broken(step, values):
        raise OSError("disk full")

    monitor = quiet(sinks=[broken, good])
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
