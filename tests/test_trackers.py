"""Sinks of tracking servers: what they keep is read back; a server that is lost does not end a run.

The files and databases are read without the sinks' own packages, where that is possible.
"""

import contextlib
import importlib
import json
import os
import sqlite3
import struct
import sys
from unittest import mock

import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.analysis.figure import draw
from jzero.monitor import trackers
from jzero.monitor.progress import make_display

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there."""


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    package = pytest.importorskip("wandb")
    for name, value in {"API_KEY": "a" * 40, "SILENT": "true", "CONSOLE": "off", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield package
    package.teardown()


@pytest.fixture
def mlflow(monkeypatch):
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return pytest.importorskip("mlflow")


def settings():
    state = jzero.TrainState.create(params={"w": jnp.ones((64, 36))}, tx=optax.sgd(0.1))
    return {"rank": 8, "plan": jzero.plan_train_state(state, stage=3), "data": ["a", "b"]}


def run(sink, losses, start_step=0, config=None, **options):
    """A loop, as a user writes it."""
    with jzero.Monitor(sinks=[sink], config=config, start_step=start_step, every=2, progress=False) as monitor:
        for loss in losses:
            monitor.log({"loss": loss})
            if loss == "fail":
                raise ValueError
        monitor.write({"eval/loss": 7.0})


def records(path):
    """The records of wandb's file: those of a LevelDB log, after a header of seven bytes."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, pending = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        pending += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield messages.Record.FromString(pending)
            pending = b""


def history(wandb, folder):
    wandb.teardown()  # waits until the file is written
    (path,) = folder.glob("**/*.wandb")
    found, config, run_id = [], {}, None
    for x in records(path):
        if x.WhichOneof("record_type") == "history":
            row = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in x.history.item}
            found.append({name: value for name, value in row.items() if not name.startswith("_")})
        elif x.WhichOneof("record_type") == "run":
            run_id = x.run.run_id
            config |= {i.key: json.loads(i.value_json) for i in x.run.config.update}
    return found, config, run_id


def test_wandb_read_back(wandb, tmp_path):
    """Offline: steps, values, settings and the plan; the same run is gone on with by its id, and may repeat steps."""
    sink = jzero.WandB("project", mode="offline", dir=str(tmp_path / "a"), name="x")
    run(sink, [3.0, float("inf"), 2.0], config=settings())
    found, config, run_id = history(wandb, tmp_path / "a")
    assert [(row["step"], row["loss"]) for row in found[:3]] == [(1, 3.0), (2, float("inf")), (3, 2.0)]
    assert found[3] == {"step": 3, "eval/loss": 7.0}
    assert found[1]["perf/seconds_per_step"] > 0
    assert config["rank"] == 8
    assert (config["plan"]["stage"], config["plan"]["parameters"], config["data"]) == (3, 64 * 36, ["a", "b"])
    assert config["plan"]["config"]["reshard_after_forward"] is True
    assert run_id == sink.run_id

    again = jzero.WandB("project", run_id=run_id, mode="offline", dir=str(tmp_path / "b"))
    run(again, [1.0], start_step=1)
    found, _, run_id = history(wandb, tmp_path / "b")
    assert (found[0]["step"], found[0]["loss"], run_id) == (2, 1.0, sink.run_id)


def test_wandb_without_a_network(wandb, tmp_path, monkeypatch):
    """Warns once, records the run offline, and says what uploads it."""
    monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)
    sink = jzero.WandB("project", dir=str(tmp_path / "a"), settings=wandb.Settings(init_timeout=3))
    with pytest.warns(UserWarning, match="offline-run.*`wandb sync`") as caught:
        run(sink, [3.0, 2.0])
    assert len(caught) == 1
    (offline,) = (tmp_path / "a").glob("**/offline-run-*")
    assert [row["step"] for row in history(wandb, offline)[0]] == [1, 2, 2]


def rows(path, query):
    with sqlite3.connect(path) as database:
        return database.execute(query).fetchall()


def test_mlflow_read_back(mlflow, tmp_path):
    """From the database itself: steps, values, settings, status; the run is gone on with by its id."""
    path, uri = tmp_path / "runs.db", f"sqlite:///{tmp_path}/runs.db"
    sink = jzero.MLflow("experiment", tracking_uri=uri, run_name="x")
    run(sink, [3.0, 2.5, 2.0], config=settings())
    losses = "select step, value from metrics where key = 'loss' order by timestamp, step"
    assert rows(path, losses) == [(1, 3.0), (2, 2.5), (3, 2.0)]
    assert rows(path, "select step, value from metrics where key = 'eval/loss'") == [(3, 7.0)]
    params = dict(rows(path, "select key, value from params"))
    assert (params["rank"], params["plan/stage"], params["plan/bytes_per_device/params"]) == (
        "8",
        "3",
        str(64 * 36 * 4),
    )
    assert rows(path, "select run_uuid, name, status from runs") == [(sink.run_id, "x", "FINISHED")]

    again = jzero.MLflow("experiment", tracking_uri=uri, run_id=sink.run_id)
    with pytest.warns(UserWarning, match=r"have changed since: \['rank'\]"):
        run(again, [1.0], start_step=1, config={"rank": 9, "more": 1})
    assert sorted(rows(path, losses)) == [(1, 3.0), (2, 1.0), (2, 2.5), (3, 2.0)]
    assert dict(rows(path, "select key, value from params"))["more"] == "1"

    third = jzero.MLflow("experiment", tracking_uri=uri)
    with pytest.raises(TypeError):
        run(third, [1.0, "fail"])
    assert ("FAILED",) in rows(path, f"select status from runs where run_uuid = '{third.run_id}'")


def test_mlflow_loses_its_server(mlflow, tmp_path):
    """Training goes on; at the end the sink warns, so that what follows the loop, such as a save, still runs."""
    sink = jzero.MLflow("experiment", tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    sink(1, {"loss": 3.0})
    mlflow.flush_async_logging()
    mlflow.set_tracking_uri(NOWHERE)
    sink(2, {"loss": 2.0})
    with pytest.warns(UserWarning, match="MLflow cannot be reached"):
        sink.close()
    assert rows(tmp_path / "runs.db", "select run_uuid, status from runs") == [(sink.run_id, "RUNNING")]


@pytest.mark.parametrize(("sink", "package", "extra"), [("WandB", "wandb", "wandb"), ("MLflow", "mlflow", "mlflow")])
def test_missing_packages_are_told_when_a_sink_is_made(sink, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"`{sink}` needs {package}.*jzero\[{extra}\]"):
        getattr(trackers, sink)("name")


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("wandb", lambda: jzero.WandB("name")),
        ("mlflow", lambda: jzero.MLflow("name")),
        ("tensorboardX", lambda: jzero.TensorBoard("folder")),
        ("rich", lambda: make_display(10, (), start=0)),
        ("matplotlib", lambda: draw("a.svg", "title", ())),
    ],
)
def test_what_an_installed_package_lacks_is_not_the_package(package, use, monkeypatch, tmp_path):
    for name in [x for x in sys.modules if x.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("import what_it_lacks")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'what_it_lacks'$"):
        use()


def test_sinks_get_the_settings_as_data():
    """Whatever dataclasses, scalars and plans the user passes; sinks without `start` do not."""

    class Starts(list):
        def start(self, config):
            self.append(config)

        def __call__(self, step, values):
            self.append(step)

    sink = Starts()
    config = {"config": jzero.ZeroConfig(stage=2), "lr": jnp.float32(0.5), "fn": len, "n": [1, (2.0, None)]}
    run(sink, [1.0], config=config)
    assert sink[1:] == [1, 1]
    assert json.loads(json.dumps(sink[0])) == sink[0]
    assert sink[0]["config"]["stage"] == 2
    assert (sink[0]["lr"], sink[0]["fn"], sink[0]["n"]) == (0.5, repr(len), [1, [2.0, None]])
    with pytest.raises(TypeError, match=r"`config` must .*got list"):
        jzero.Monitor(config=[1])


@pytest.mark.parametrize(("losses", "code", "status"), [([1.0], 0, "FINISHED"), ([1.0, "fail"], 1, "FAILED")])
def test_a_loop_that_fails_leaves_a_failed_run(losses, code, status, monkeypatch):
    """By what the packages are told, installed or not."""
    packages = {name: mock.MagicMock() for name in ("wandb", "mlflow")}
    packages["mlflow"].MlflowException = RuntimeError
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delenv("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", raising=False)
    sinks = (jzero.WandB("project"), jzero.MLflow("experiment"))
    assert os.environ.pop("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS") == "10", "else a request per step"
    for sink in sinks:
        with pytest.raises(TypeError) if "fail" in losses else contextlib.nullcontext():
            run(sink, losses)
    packages["wandb"].init.return_value.finish.assert_called_once_with(exit_code=code)
    packages["mlflow"].end_run.assert_called_once_with(status)
