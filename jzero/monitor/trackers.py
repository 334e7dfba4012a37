"""Sinks that send metrics to tracking servers, over the packages of these: Weights & Biases, MLflow."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jzero.core.base.guard import warn
from jzero.monitor.sinks import check_names, import_package

MAX_PARAM_LENGTH = 6000


def _failed() -> bool:
    """Whether the loop around ends by an exception."""
    return sys.exception() is not None


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
        self._wandb = import_package("wandb", sink="WandB", extra="wandb")
        self.run_id: str = run_id or secrets.token_hex(6)
        self._settings = settings | {"project": project, "id": self.run_id, "resume": "allow"}
        self._run: Any = None

    def __repr__(self) -> str:
        return f"WandB({self._settings['project']!r}, run_id={self.run_id!r})"

    def start(self, config: Mapping[str, Any]) -> None:
        """Begins the run, or goes on with it."""
        try:
            self._run = self._wandb.init(config=dict(config), **self._settings)
        except self._wandb.errors.CommError as error:
            self._wandb.teardown()  # else the run's id would be in use
            self._run = self._wandb.init(config=dict(config), **self._settings | {"mode": "offline"})
            warn(
                f"Weights & Biases cannot be reached, so this run is recorded in {self._run.settings.sync_dir}; "
                f"`wandb sync` uploads it: {str(error).splitlines()[-1]}"
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

    The run begins with the monitor, as MLflow's active run, which `mlflow.log_artifact` adds to; the settings of
    `Monitor(config=...)` become its parameters, named by their paths. MLflow sends values from a thread of its own, and
    repeats what fails (`MLFLOW_HTTP_REQUEST_MAX_RETRIES`). If the server cannot be reached for longer, it logs an error
    and drops them; training goes on.

    Args:
      experiment: The experiment; made if it is not there.
      run_id: The run to go on with, from `run_id` of an earlier sink; by default a new one.
      tracking_uri: The server (`"http://..."`) or a database, such as `"sqlite:///mlflow.db"`, which also needs
        sqlalchemy and alembic. By default what `MLFLOW_TRACKING_URI` or `mlflow.set_tracking_uri` says.
      run_name: The name of a new run.

    Attributes:
      run_id: The run's id; `None` until it begins. Keep it in checkpoints, `extra={"run": sink.run_id}`, to go on with
        the run.

    Raises:
      ImportError: mlflow-skinny is not installed.
      mlflow.exceptions.MlflowException: (when started) The server cannot be reached, refuses the run, or does not know
        `run_id`.

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
        os.environ.setdefault("MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS", "10")  # else a request per step
        self._mlflow = import_package("mlflow", sink="MLflow", extra="mlflow", distribution="mlflow-skinny")
        self.experiment, self.run_id = experiment, run_id
        self._tracking_uri, self._run_name = tracking_uri, run_name
        self._is_running = False

    def __repr__(self) -> str:
        return f"MLflow({self.experiment!r}, run_id={self.run_id!r})"

    def start(self, config: Mapping[str, Any]) -> None:
        """Begins the run, or goes on with it: MLflow keeps the first value of a setting."""
        if self._tracking_uri is not None:
            self._mlflow.set_tracking_uri(self._tracking_uri)
        self._mlflow.set_experiment(self.experiment)
        run = self._mlflow.start_run(self.run_id, run_name=self._run_name)
        self.run_id, self._is_running = run.info.run_id, True
        there, flat = run.data.params, dict(_flat(config))
        changed = sorted(name for name, text in flat.items() if there.get(name, text) != text)
        if changed:
            warn(f"MLflow keeps a run's first settings; these have changed since: {changed}.")
        self._mlflow.log_params({name: text for name, text in flat.items() if name not in there})

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Hands the values of one step to MLflow's thread."""
        if not self._is_running:
            self.start({})
        now = int(1000 * time.time())
        metrics = [self._mlflow.entities.Metric(name, x, now, step) for name, x in values.items()]
        self._mlflow.MlflowClient().log_batch(self.run_id, metrics, synchronous=False)  # asks nothing of the server

    def close(self) -> None:
        """Ends the run, once its values are sent."""
        if not self._is_running:
            return
        self._is_running = False
        try:
            self._mlflow.flush_async_logging()
            self._mlflow.end_run("FAILED" if _failed() else "FINISHED")
        except self._mlflow.MlflowException as error:
            warn(f"MLflow cannot be reached, so it does not know that the run ended: {error}")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yields settings by their paths, as text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", str(value)[:MAX_PARAM_LENGTH]
