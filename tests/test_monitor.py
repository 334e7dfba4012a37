"""The monitor of a training loop: what is fetched when, what sinks get, what a person sees, what is profiled."""

import contextlib
import csv
import gzip
import io
import json
import pathlib
import re
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.monitor import monitor as monitor_module
from jzero.monitor import progress as progress_module
from jzero.monitor import readings as readings_module
from jzero.monitor import sinks as sinks_module
from tests.models import mlp_batch, mlp_loss, mlp_params


class Reading:
    """A scalar on a device, as far as a monitor can tell, that counts how often it is read."""

    shape, dtype = (), np.dtype(np.float32)

    def __init__(self, value, reads):
        self.value, self.reads = value, reads

    def __array__(self, dtype=None, copy=None):
        self.reads.append(self.value)
        return np.asarray(self.value, np.float32)


class Record(list):
    """A sink that remembers."""

    closed = 0

    def __call__(self, step, values):
        self.append((step, values))

    def close(self):
        self.closed += 1


class Clock:
    """The time, as the test says."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(monitor_module, "time", types.SimpleNamespace(perf_counter=lambda: self.now))


def quiet(**options):
    return jzero.Monitor(**{"progress": False, **options})


def run(monitor, *, steps, error=None):
    """A loop, which may end early."""
    with monitor:
        for _ in range(steps):
            monitor.log({"loss": 1.0})
        if error is not None:
            raise error


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


def test_an_interval_is_fetched_at_once(monkeypatch):
    calls = []
    fetch = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(len(jax.tree.leaves(tree))) or fetch(tree))
    with quiet(every=4) as monitor:
        for step in range(1, 9):
            monitor.log({"loss": jnp.float32(step), "grad_norm": jnp.float32(1)})
    assert calls == [2, 6, 8], "step 1, steps 2-4, steps 5-8, two values each"


def test_logging_does_not_wait_for_the_devices():
    gate = threading.Event()

    def wait(x):
        assert gate.wait(60)
        return np.asarray(x)

    step = jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x))
    mesh = jzero.make_mesh()
    x = jax.device_put(jnp.float32(3), NamedSharding(mesh, PartitionSpec()))
    sink = Record()
    with quiet(sinks=[sink], every=100, start_step=1) as monitor:
        monitor.log({"loss": step(x)})
        pending = step(x)
        assert not pending.is_ready()
        assert not sink
        gate.set()
        monitor.log({"loss": pending})
        assert [(step, values["loss"]) for step, values in sink] == [(2, 3.0)]


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


def test_intervals_end_at_multiples_also_after_a_restart():
    sink = Record()
    with quiet(sinks=[sink], every=10, start_step=17) as monitor:
        for _ in range(15):
            monitor.log({"loss": 0.0})
        assert monitor.step == 32
    assert [step for step, _ in sink] == list(range(18, 33))
    ends = [step for step, values in sink if any(name.startswith("perf/") for name in values)]
    assert ends == [18, 20, 30, 32]


def test_memory_is_that_of_the_fullest_device_and_absent_where_unknown(monkeypatch):
    assert readings_module.peak_device_bytes() is None, "CPUs do not say"
    stats = [{"peak_bytes_in_use": 5, "bytes_in_use": 900}, {"peak_bytes_in_use": 70}, {}, None]
    devices = [types.SimpleNamespace(memory_stats=lambda x=x: x) for x in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    sink = Record()
    with quiet(sinks=[sink]) as monitor:
        monitor.log({"loss": 0.0})
    assert sink[0][1]["perf/peak_device_bytes"] == 70


def test_metrics_of_a_step_with_aux_by_path():
    state = jzero.TrainState.create(params=mlp_params(), tx=optax.sgd(0.1))
    state = jzero.shard_train_state(state, stage=3)

    def loss_fn(params, batch):
        loss = mlp_loss(params, batch)
        return loss, {"twice": 2 * loss, "more": [jzero.Summed(jnp.ones((), jnp.int32)), {"x": loss + 1}]}

    step = jzero.make_train_step(loss_fn, has_aux=True)
    sink, expected = Record(), []
    with quiet(sinks=[sink], every=2) as monitor:
        for seed in range(3):
            state, metrics = step(state, mlp_batch(16, seed))
            monitor.log(metrics)
            expected.append(float(metrics["loss"]))
    own = {name: x for name, x in sink[1][1].items() if not name.startswith("perf/")}
    assert own == {
        "loss": expected[1],
        "grad_norm": own["grad_norm"],
        "step_applied": 1.0,
        "aux/twice": pytest.approx(2 * expected[1]),
        "aux/more/0": 8.0,
        "aux/more/1/x": pytest.approx(1 + expected[1]),
    }
    assert [values["loss"] for _, values in sink] == expected
    assert all(type(x) is float for _, values in sink for x in values.values())


def test_skipped_steps_show_and_are_counted():
    precision = jzero.Precision(compute_dtype="float16", loss_scale=jzero.DynamicLossScale(initial=2.0**15))
    state = jzero.TrainState.create(params={"w": jnp.ones((16, 8))}, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=2, precision=precision))
    step = jzero.make_train_step(lambda params, batch: (batch.astype(jnp.float16) @ params["w"]).mean())
    sink = Record()
    with quiet(sinks=[sink], every=4) as monitor:
        for number in range(4):
            state, metrics = step(state, np.full((8, 16), np.inf if number in (1, 3) else 1.0, np.float32))
            monitor.log(metrics)
    assert [values["step_applied"] for _, values in sink] == [1, 0, 1, 0]
    assert [values.get("perf/skipped_steps") for _, values in sink] == [0, None, None, 2]
    assert not np.isfinite(sink[1][1]["grad_norm"])


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


@pytest.mark.parametrize(
    "value", [True, 3, 2.5, np.float32(2.5), np.array(3, np.int16), jnp.bfloat16(2.5), jnp.bool_(True)]
)
def test_what_can_be_a_metric(value):
    sink = Record()
    with quiet(sinks=[sink]) as monitor:
        monitor.log({"x": value})
    assert sink[0][1]["x"] == {True: 1.0, 3: 3.0, 2.5: 2.5}[np.asarray(value).item()]


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
    with pytest.raises(RuntimeError, match=r"sink <function .*broken.*> failed at step 1: disk full") as caught:
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


def test_json_lines_read_back(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    before = time.time()
    with quiet(sinks=[jzero.JsonLines(path)], every=2) as monitor:
        assert not path.exists(), "made when there is something to write"
        for loss in (0.1, float("nan"), float("-inf")):
            monitor.log({"loss": jnp.float32(loss), "aux": {"n": jnp.int32(7)}})
        assert len(path.read_text().splitlines()) == 2, "on disk at once"

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == [float(np.float32(0.1)), None, None]
    assert [line.get("non_finite") for line in lines] == [None, {"loss": "nan"}, {"loss": "-inf"}]
    assert [line["aux/n"] for line in lines] == [7, 7, 7]
    assert all(before - 1 <= line["time"] <= time.time() + 1 for line in lines)
    assert "perf/seconds_per_step" in lines[1]


def test_json_lines_go_on_after_a_crash(tmp_path):
    path = tmp_path / "log.jsonl"
    script = (
        "import os, runpy\n"
        f"sink = runpy.run_path({sinks_module.__file__!r})['JsonLines']({str(path)!r})\n"
        "for step in (1, 2):\n"
        "    sink(step, {'loss': step / 4})\n"
        "os._exit(3)  # as if killed: nothing is closed\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 3
    whole = path.read_bytes()
    assert [json.loads(line)["loss"] for line in whole.splitlines()] == [0.25, 0.5]

    path.write_bytes(whole + b'{"step": 3, "lo')
    sink = jzero.JsonLines(path)
    with pytest.warns(UserWarning, match=r"log\.jsonl was cut off and is removed: b'\{\"step\": 3"):
        sink(3, {"loss": 1.0})
    sink.close()
    assert path.read_bytes().startswith(whole)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]

    path.write_bytes(whole.rstrip(b"\n"))  # whole, but for the end of the line
    sink(3, {"loss": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


FULL_DISK = """
import json, resource, runpy, sys
path, kind, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
sink = runpy.run_path(sys.argv[4])[kind](path)
sink(1, {"loss": 1.0})
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))  # as if so much fitted on the disk
try:
    for step in range(2, 1000):
        sink(step, {"loss": 2.0})
    sink.close()
    print("nothing", "raised")
except OSError as error:
    print("raised", step)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
sink(1000, {"loss": 3.0})
sink.close()
"""


@pytest.mark.parametrize("kind", ["Csv", "JsonLines", "TensorBoard"])
def test_a_full_disk_is_an_error_and_no_line_is_written_in_part(kind, tmp_path):
    size = 8192 + 17
    arguments = [str(tmp_path / "log"), kind, str(size), sinks_module.__file__]
    command = [sys.executable, "-W", "ignore", "-c", FULL_DISK, *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    said, step = ran.stdout.split()
    assert said == "raised"
    if kind == "JsonLines":
        steps = [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()]
        assert steps == [*range(1, int(step)), 1000], "what was there in part is removed once there is room"
    if kind == "Csv":
        with (tmp_path / "log").open(newline="") as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == [*range(1, int(step)), 1000]


def test_csv_read_back(tmp_path):
    """By the standard library: columns come as values do; a resumed run appends, after a row that was cut off."""
    path = tmp_path / "run" / "log.csv"
    read = lambda: list(csv.DictReader(io.StringIO(path.read_text())))
    with quiet(sinks=[jzero.Csv(path)], every=2) as monitor:
        for loss in (1.5, float("nan"), 1.25):
            monitor.log({"loss": jnp.float32(loss), 'a "name", odd': 3})
        monitor.write({"eval": {"loss": float("-inf")}})
    rows = read()
    assert [(row["step"], row["loss"]) for row in rows] == [("1", "1.5"), ("2", "nan"), ("3", "1.25"), ("3", "")]
    assert [row["eval/loss"] for row in rows] == ["", "", "", "-inf"]
    assert {row['a "name", odd'] for row in rows[:3]} == {"3.0"}
    assert float(rows[1]["perf/seconds_per_step"]) > 0
    assert all(float(row["time"]) > 1.7e9 for row in rows)

    whole = path.read_bytes()
    path.write_bytes(whole + b"4,17000")
    with (
        pytest.warns(UserWarning, match="cut off and is removed: b'4,17000'"),
        quiet(sinks=[jzero.Csv(path)]) as monitor,
    ):
        monitor.log({"loss": 0.5})
    assert path.read_bytes().startswith(whole)
    assert [row["loss"] for row in read()] == ["1.5", "nan", "1.25", "", "0.5"]


def test_csv_refuses_other_tables_and_its_own_names(tmp_path):
    (tmp_path / "other.csv").write_text("name,age\nAda,36\n")
    with pytest.raises(ValueError, match=r"other.csv is no table of a `Csv`: its first line is \['name', 'age'\]"):
        jzero.Csv(tmp_path / "other.csv")(1, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"rename the values \['time'\]"):
        jzero.Csv(tmp_path / "log.csv")(1, {"time": 1.0})
    assert not (tmp_path / "log.csv").exists()


def test_json_lines_keep_their_own_names(tmp_path):
    sink = jzero.JsonLines(tmp_path / "log.jsonl")
    for name in ("step", "time", "non_finite"):
        with pytest.raises(ValueError, match=f"rename the values \\['{name}'\\]"):
            sink(1, {name: 1.0, "loss": 1.0})
    assert not sink.path.exists()


def test_tensorboard_read_back(tmp_path):
    """Against the protocol itself: records of length, checksum, message, checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    with quiet(sinks=[jzero.TensorBoard(tmp_path / "run")], every=2, start_step=40) as monitor:
        for loss in (0.5, float("nan"), 0.25):
            monitor.log({"loss": jnp.float32(loss), "aux": {"x": 3}})
    (path,) = (tmp_path / "run").iterdir()
    data, found = io.BytesIO(path.read_bytes()), []
    while header := data.read(12):
        event = event_pb2.Event.FromString(data.read(int.from_bytes(header[:8], "little")))
        data.read(4)
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    losses = [(step, value) for step, tag, value in found if tag == "loss"]
    assert losses == [(41, 0.5), (42, pytest.approx(np.nan, nan_ok=True)), (43, 0.25)]
    assert [(step, value) for step, tag, value in found if tag == "aux/x"] == [(41, 3), (42, 3), (43, 3)]
    assert {tag for _, tag, _ in found} == {"loss", "aux/x", "perf/first_step_seconds", "perf/seconds_per_step"}


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboardX.summary", jzero.TensorBoard),
        ("rich.console", lambda tmp: jzero.Monitor().__enter__()),
    ],
)
def test_what_to_install_is_said(package, make, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'jzero\[monitor\]'"):
        make(tmp_path)


def test_optional_packages_are_imported_where_they_are_used_only():
    folder = pathlib.Path(progress_module.__file__).parent
    imports = re.findall(r"^ *(?:from|import) +([\w.]+)", "\n".join(x.read_text() for x in folder.glob("*.py")), re.M)
    assert "jax" in imports
    assert not [name for name in imports if name.split(".")[0] in ("rich", "tensorboardX", "google")]


def test_lines_where_nobody_watches(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    show = ("loss", "validation")
    with jzero.Monitor(total_steps=6, every=2, tokens_per_step=3000, show=show) as monitor:
        for step in range(1, 5):
            clock.now += 0.25
            monitor.log({"loss": 1 / step, "other": 3.0, "step_applied": np.bool_(step != 3)})
        monitor.write({"validation": 1.23456})
        monitor.write({"unseen": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 1/6  loss 1  first step 500.0 ms  memory unknown",
        "step 2/6  loss 0.5  250.0 ms/step  12,000 tokens/s  memory unknown",
        "step 4/6  loss 0.25  125.0 ms/step  24,000 tokens/s  memory unknown  1 skipped",
        "step 4/6  validation 1.235",
    ]


def test_bar_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(monitor_module, "peak_device_bytes", lambda: 3 * 2**30)
    with jzero.Monitor(total_steps=50, every=2, start_step=40, show=("loss", "validation")) as monitor:
        for _ in range(4):
            monitor.log({"loss": 2.5})
        monitor.write({"validation": 1.5})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    last = text.strip().splitlines()[-1]
    assert re.match(r"44/50 \S+ loss 2\.5  validation 1\.5  \S+ m?s/step  3\.00 GiB 0:00:\d\d", last), last
    for thread in threading.enumerate():
        if "rich" in type(thread).__module__:
            thread.join(10)
            assert not thread.is_alive(), "the bar was stopped"


def test_bar_ends_if_the_profile_cannot_begin(monkeypatch):
    closed = []
    monkeypatch.setattr(progress_module.Lines, "close", lambda self: closed.append(True))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(jzero.Monitor(profile_dir="p", profile_steps=(1, 1)), steps=1)
    assert len(closed) == 1


def test_no_output_without_progress(capsys):
    with quiet(every=1) as monitor:
        monitor.log({"loss": 1.0})
        monitor.write({"x": 1.0})
    assert capsys.readouterr() == ("", "")


def test_numbers_as_people_read_them():
    values = {"perf/seconds_per_step": 1.5, "perf/peak_device_bytes": 3 * 2**20, "perf/skipped_steps": 0.0}
    assert progress_module.describe(values, ()) == "1.50 s/step  3 MiB"


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


def test_profile_of_the_first_step_and_time_to_write_it(monkeypatch):
    clock, sink = Clock(monkeypatch), Record()
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: setattr(clock, "now", clock.now + 50))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: setattr(clock, "now", clock.now + 50))
    with quiet(sinks=[sink], every=2, profile_dir="p", profile_steps=(1, 2)) as monitor:
        for _ in range(4):
            clock.now += 1
            monitor.log({"loss": 1.0})
    assert sink[0][1]["perf/first_step_seconds"] == 2, "read when step 2 was dispatched"
    assert sink[3][1]["perf/seconds_per_step"] == 1


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
    with pytest.warns(UserWarning, match="ended after 3 steps, before the first of `profile_steps`, 10"):
        run(quiet(profile_dir="p"), steps=3)
    assert not traces


def test_a_real_profile_holds_the_scopes(tmp_path):
    state = jzero.TrainState.create(params=mlp_params(), tx=optax.adam(1e-3))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=100))
    step = jzero.make_train_step(mlp_loss)
    with quiet(profile_dir=tmp_path, profile_steps=(2, 3)) as monitor:
        for seed in range(4):
            state, metrics = step(state, mlp_batch(16, seed))
            monitor.log(metrics)
    (space,) = tmp_path.rglob("*.xplane.pb")
    content = space.read_bytes()
    for scope in (b"zero_gather", b"zero_compute", b"zero_reduce", b"zero_update"):
        assert scope in content, scope
    (events,) = pathlib.Path(tmp_path).rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(events.read_bytes()))["traceEvents"]
    numbers = {x["args"]["step_num"] for x in events if x.get("name") == "train"}
    assert {str(x) for x in numbers} == {"2", "3"}


def test_guide_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    text = (pathlib.Path(__file__).parents[1] / "docs" / "monitoring.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "guide"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"monitoring.md, python block {number}", "exec"), namespace)
    out = capsys.readouterr().out
    for line in (r"step 30/30  loss \S+  \S+ ms/step  \S+ tokens/s  memory unknown", r"step 45/60  eval/loss \S+"):
        assert re.search(f"^{line}$", out, re.MULTILINE), out
    lines = [json.loads(line) for line in pathlib.Path("run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 46), 45, *range(46, 61), 60]
    assert list(pathlib.Path("run").rglob("*.xplane.pb"))
