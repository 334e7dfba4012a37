"""Sinks that send metrics to tracking servers, over the packages of these: Weights & Biases, MLflow.

[Note: Without a network]
A run must not end because a server cannot be reached. Where a package says so, by its own error or by an `OSError`
among the causes, a sink warns once and keeps the values: `WandB` in a folder that `wandb sync` uploads, `MLflow` in
memory until the server answers. Any other error, such as a missing key, ends the run at its start, where a person can
mend it.
"""

from __future__ import annotations

import collections
import importlib
import os
import secrets
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from jzero.monitor.sinks import FLUSH_SECONDS, check_names

INIT_TIMEOUT = 30
"""Seconds that a run waits for Weights & Biases at its start."""
RETRY_SECONDS = 60
MAX_BATCH = 1000
"""Most values of one request to MLflow."""
MAX_WAITING = 200_000
"""Most values that wait for MLflow's server; the oldest are dropped."""
MAX_PARAMS = 100
MAX_PARAM_LENGTH = 6000


def _package(name: str, sink: str, extra: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"`{sink}` needs {distribution}: `pip install 'jzero[{extra}]'`, or use `jzero.JsonLines`."
        ) from error


def _failed() -> bool:
    """Whether the loop around ends by an exception."""
    return sys.exc_info()[0] is not None


def _is_of_network(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is of the network."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__ or error.__context__
    return False


class WandB:
    """A sink that sends metrics to Weights & Biases, through the package `wandb`.

    The run begins with the monitor, with the settings of `Monitor(config=...)`. If the server cannot be reached then,
    the sink warns and records the run in a folder, for `wandb sync`; if it is lost later, `wandb` itself keeps the
    values and sends them when it can. Charts are over the value `step`, so a resumed run may repeat steps.

    Args:
      project: The project.
      run_id: The run to go on with, from `run_id` of an earlier sink; by default a new one.
      **settings: Further arguments of `wandb.init`, such as `name`, `group`, `entity`, `dir` and `mode="offline"`.

    Attributes:
      run_id: The run's id. Keep it in checkpoints, `extra={"run": sink.run_id}`, to go on with the run.

    Raises:
      ImportError: wandb is not installed.
      ValueError: (when called) A value is named `step`.
      wandb.errors.UsageError: (when started) There is no API key, or a setting is impossible.

    Example:
      >>> sink = jzero.WandB("my-project", mode="offline", dir=tmp)
      >>> with jzero.Monitor(sinks=[sink], config={"rank": 8}, progress=False) as monitor:
      ...     monitor.log({"loss": 1.0})
    """

    def __init__(self, project: str, *, run_id: str | None = None, **settings: Any) -> None:
        self._wandb = _package("wandb", "WandB", "wandb", "wandb")
        self.project = project
        self.run_id: str = run_id or secrets.token_hex(6)
        self._settings = settings
        self._run: Any = None

    def __repr__(self) -> str:
        return f"WandB({self.project!r}, run_id={self.run_id!r})"

    def start(self, config: Mapping[str, Any]) -> None:
        """Begins the run, or goes on with it."""
        options = {"settings": self._wandb.Settings(init_timeout=INIT_TIMEOUT), **self._settings}
        options |= {"project": self.project, "id": self.run_id, "config": dict(config), "resume": "allow"}
        try:
            self._run = self._wandb.init(**options)
        except self._wandb.errors.CommError as error:
            self._wandb.teardown()  # else the run's id would be in use
            self._run = self._wandb.init(**options | {"mode": "offline"})
            warnings.warn(
                f"Weights & Biases cannot be reached, so this run is recorded in {self._run.settings.sync_dir}; "
                f"`wandb sync` uploads it: {str(error).splitlines()[-1]}",
                stacklevel=2,
            )
        self._run.define_metric("*", step_metric="step")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step."""
        check_names(values, ("step",))
        if self._run is None:
            self.start({})
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Ends the run, once its values are sent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(_failed()))


class MLflow:
    """A sink that sends metrics to an MLflow server, or to a database, through the package `mlflow-skinny`.

    The run begins with the monitor; the settings of `Monitor(config=...)` become its parameters, named by their paths.
    Values are sent together, every ten seconds and at the end. While the server cannot be reached, the sink warns once,
    keeps the values, and tries again every minute. One that does not answer holds up the loop for ten seconds each
    time, unless `MLFLOW_HTTP_REQUEST_TIMEOUT` and `MLFLOW_HTTP_REQUEST_MAX_RETRIES` say otherwise.

    Args:
      experiment: The experiment; made if it is not there.
      run_id: The run to go on with, from `run_id` of an earlier sink; by default a new one.
      tracking_uri: The server (`"http://..."`) or a database, such as `"sqlite:///mlflow.db"`, which also needs
        sqlalchemy and alembic. By default what `MLFLOW_TRACKING_URI` or `mlflow.set_tracking_uri` says.
      run_name: The name of a new run.

    Attributes:
      run_id: The run's id; `None` until the server has given one. Keep it in checkpoints, `extra={"run": sink.run_id}`,
        to go on with the run.

    Raises:
      ImportError: mlflow-skinny is not installed.
      mlflow.exceptions.MlflowException: (when started) The server refuses the run, or does not know `run_id`.

    Example:
      >>> sink = jzero.MLflow("my-experiment", tracking_uri=f"sqlite:///{tmp}/mlflow.db")
      >>> with jzero.Monitor(sinks=[sink], config={"rank": 8}, progress=False) as monitor:
      ...     monitor.log({"loss": 1.0})
    """

    def __init__(
        self,
        experiment: str,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        self._tracking = _package("mlflow.tracking", "MLflow", "mlflow", "mlflow-skinny")
        self._entities = importlib.import_module("mlflow.entities")
        self.experiment, self.run_id, self._run_name = experiment, run_id, run_name
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._waiting: collections.deque[Any] = collections.deque(maxlen=MAX_WAITING)
        self._config: Mapping[str, Any] = {}
        self._is_running = False
        self._has_warned = False
        self._next_send = 0.0

    def __repr__(self) -> str:
        return f"MLflow({self.experiment!r}, run_id={self.run_id!r})"

    def start(self, config: Mapping[str, Any]) -> None:
        """Begins the run, or goes on with it."""
        self._client = self._tracking.MlflowClient(tracking_uri=self._tracking_uri)
        self._config = config
        self._send()

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values of one step, and sends what has waited long enough."""
        if self._client is None:
            self.start({})
        now = int(1000 * time.time())
        self._waiting.extend(self._entities.Metric(name, x, now, step) for name, x in values.items())
        if time.monotonic() >= self._next_send:
            self._send()

    def close(self) -> None:
        """Sends the remaining values and ends the run."""
        if self._client is None:
            return
        if self._send(ends="FAILED" if _failed() else "FINISHED"):
            self._client, self._is_running = None, False
        else:
            warnings.warn(
                f"{len(self._waiting)} values were not sent to MLflow and are lost. A `JsonLines` beside it keeps all.",
                stacklevel=2,
            )

    def _send(self, ends: str | None = None) -> bool:
        """Sends what waits, and the run's status if it ends; returns whether the server could be reached."""
        self._next_send = time.monotonic() + FLUSH_SECONDS
        try:
            if not self._is_running:
                self._begin()
            while self._waiting:
                batch = [self._waiting[i] for i in range(min(MAX_BATCH, len(self._waiting)))]
                self._client.log_batch(self.run_id, metrics=batch)
                for _ in batch:
                    self._waiting.popleft()
            if ends is not None:
                self._client.set_terminated(self.run_id, ends)
        except Exception as error:
            if not _is_of_network(error):
                raise
            self._next_send = time.monotonic() + RETRY_SECONDS
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"MLflow cannot be reached; its values are kept, and sent when it can: {error}", stacklevel=2
                )
            return False
        return True

    def _begin(self) -> None:
        """Makes the run, or opens the given one, and records the settings that it does not have."""
        if self.run_id is None:
            experiment = self._client.get_experiment_by_name(self.experiment)
            name = self._client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
            self.run_id = self._client.create_run(name, run_name=self._run_name).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")
        there = self._client.get_run(self.run_id).data.params
        flat = dict(_flat(self._config))
        changed = sorted(name for name, text in flat.items() if there.get(name, text) != text)
        if changed:
            warnings.warn(f"MLflow keeps a run's first settings; these have changed since: {changed}.", stacklevel=2)
        new = [self._entities.Param(name, text) for name, text in flat.items() if name not in there]
        for i in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=new[i : i + MAX_PARAMS])
        self._is_running = True


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yields settings by their paths, as text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", str(value)[:MAX_PARAM_LENGTH]
