"""Where a monitor writes: JSON lines, CSV, TensorBoard, a terminal."""

import csv
import io
import json
import re
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero.monitor import monitor as monitor_module
from tests import shared
from tests.monitor_runs import Clock, disk_of, quiet


def test_json_lines_read_back(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    before = time.time()
    with quiet(sinks=[jzero.JsonLines(path)], every=2) as monitor:
        assert not path.exists(), "made when there is something to write"
        for loss in (0.1, float("nan"), float("-inf")):
            monitor.log({"loss": jnp.float32(loss), "aux": {"n": jnp.int32(7)}})
        assert len(path.read_text().splitlines()) == 2, "on disk at once"
    refuse = shared.raising(AssertionError("no JSON"))
    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == [float(np.float32(0.1)), None, None]
    assert [line.get("non_finite") for line in lines] == [None, {"loss": "nan"}, {"loss": "-inf"}]
    assert [line["aux/n"] for line in lines] == [7, 7, 7]
    assert all(before - 1 <= line["time"] <= time.time() + 1 for line in lines)
    assert "perf/seconds_per_step" in lines[1]


def test_json_lines_go_on_after_a_crash(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = b'{"step": 1, "loss": 0.25}\n{"step": 2, "loss": 0.5}\n'
    path.write_bytes(whole + b'{"step": 3, "lo')
    sink = jzero.JsonLines(path)
    with pytest.warns(UserWarning, match=r"cut off .*step.: 3"):
        sink(3, {"loss": 1.0})
    sink.close()
    assert path.read_bytes().startswith(whole)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]

    path.write_bytes(whole.rstrip(b"\n"))  # whole, but for the end of the line
    sink(3, {"loss": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:The last line of")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["Csv", "JsonLines", "TensorBoard"])
def test_a_full_disk_is_an_error_and_no_line_is_written_in_part(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.7e9)  # so that lines are as long in each run
    path, size, written = tmp_path / "log", 8192 + 17, []
    sink = getattr(jzero, kind)(path)

    def fill():
        for step in range(1, 1000):
            sink(step, {"loss": 2.0})
            written.append(step)
        sink.close()

    with disk_of(size), pytest.raises(OSError, match="too large"):
        fill()
    if kind != "TensorBoard":
        assert path.read_bytes()[size - 1 :] not in (b"", b"\n"), "the disk is full in the middle of a line"
    sink(1000, {"loss": 3.0})
    sink.close()
    if kind == "JsonLines":
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == [*written, 1000], "what was there in part is removed once there is room"
    if kind == "Csv":
        with path.open(newline="") as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == [*written, 1000]


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


def test_other_tables_and_names_of_the_sinks_own_are_refused(tmp_path):
    (tmp_path / "other.csv").write_text("name,age\nAda,36\n")
    with pytest.raises(ValueError, match=r"no table .*\['name', 'age'\]"):
        jzero.Csv(tmp_path / "other.csv")(1, {"loss": 1.0})
    for sink, name in ((jzero.Csv, "time"), (jzero.JsonLines, "step"), (jzero.JsonLines, "non_finite")):
        with pytest.raises(ValueError, match=f"rename the values \\['{name}'\\]"):
            sink(tmp_path / "log")(1, {name: 1.0, "loss": 1.0})
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("kind", ["Csv", "JsonLines"])
@pytest.mark.parametrize(
    "content",
    [
        b'{\n  "a": 1\n}',
        b'{"a": 1}',
        b'{"loss": 1.0}\n{"loss": 2.0',
        b"name,age\nAda,36",
        b"step,time",
        b"\x93NUMPY" + bytes(range(11, 200)) * 9,
        "step,time\n1,2\n".encode("utf-16"),
        b"\x00" * 100,
        b'{"step": 1, "time": 2.0, "loss": 3.0}\n# kept by hand',
        b"step,time,loss\n1,2.0,3.0\n# kept by hand",
        b'"' + b"a" * 200_000,
    ],
    ids=lambda x: repr(x[:20]),
)
def test_no_sink_changes_what_it_has_not_written(kind, content, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"other is no (log|table) of a `{kind}`: .*Choose another file"):
            getattr(jzero, kind)(path)(1, {"loss": 1.0})
    assert path.read_bytes() == content


KINDS = ["Csv", "JsonLines"]
WRITER = """
import sys, jzero
folder, number = sys.argv[1], int(sys.argv[2])
for kind in sys.argv[3:]:
    sink = getattr(jzero, kind)(f"{folder}/{kind}")
    print("writes", flush=True)
    sys.stdin.readline()
    for i in range(60):
        sink(1000 * number + i, {"loss": 1.0, f"of_{number}_{i // 10}": 2.0})
"""


def test_writers_in_several_processes_lose_nothing(tmp_path):
    """Each brings new values every ten steps, for which a table is written anew."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(n), *KINDS], **pipes) for n in range(2)]
    for _ in KINDS:
        assert [writer.stdout.readline() for writer in writers] == ["writes\n"] * 2
        for writer in writers:
            writer.stdin.write("\n")
            writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    for kind in KINDS:
        with (tmp_path / kind).open(newline="") as file:
            rows = list(csv.DictReader(file)) if kind == "Csv" else [json.loads(line) for line in file]
        assert sorted(int(row["step"]) for row in rows) == [1000 * n + i for n in range(2) for i in range(60)]
        for row in rows:
            number, i = divmod(int(row["step"]), 1000)
            assert float(row[f"of_{number}_{i // 10}"]) == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_two_sinks_of_one_file_take_turns(kind, tmp_path):
    path = tmp_path / "log"
    one, other = (getattr(jzero, kind)(path) for _ in range(2))
    one(1, {"x": 1.0})
    other(2, {"x": 1.0, "new": 2.0})
    one(3, {"x": 1.0})
    path.rename(tmp_path / "old")
    one(4, {"x": 4.0})
    other(5, {"y": 5.0})
    for sink in (one, other):
        sink.close()
    found = [file.read_text() for file in (tmp_path / "old", path)]
    if kind == "Csv":
        tables = [[(row["step"], row.get("x"), row.get("y")) for row in csv.DictReader(io.StringIO(x))] for x in found]
        assert tables == [
            [("1", "1.0", None), ("2", "1.0", None), ("3", "1.0", None)],
            [("4", "4.0", ""), ("5", "", "5.0")],
        ]
    else:
        assert [[json.loads(line)["step"] for line in x.splitlines()] for x in found] == [[1, 2, 3], [4, 5]]


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
    monkeypatch.setattr(monitor_module, "peak_device_bytes", lambda: 3 * 2**20)
    with jzero.Monitor(total_steps=50, every=2, start_step=40, show=("loss", "validation")) as monitor:
        for _ in range(4):
            monitor.log({"loss": 2.5})
        monitor.write({"validation": 1.5})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    last = text.strip().splitlines()[-1]
    assert re.match(r"44/50 \S+ loss 2\.5  validation 1\.5  \S+ m?s/step  3\.00 MiB 0:00:\d\d", last), last
    for thread in threading.enumerate():
        if "rich" in type(thread).__module__:
            thread.join(10)
            assert not thread.is_alive(), "the bar was stopped"
