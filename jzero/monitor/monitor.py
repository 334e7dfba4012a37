"""`Monitor`: sends the metrics of a training loop to sinks and progress."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jzero.core.base import text
from jzero.core.base.guard import warn
from jzero.core.config.settings import FLAG, check, integer, optional
from jzero.core.plan.plan import ZeroPlan
from jzero.monitor.profiler import StepProfiler
from jzero.monitor.progress import Bar, Lines, make_display
from jzero.monitor.readings import PREFIX, fetch, peak_device_bytes, scalars
from jzero.monitor.sinks import Sink


class Monitor:
    """Watches a training loop: metrics to sinks, progress, step time, tokens per second, memory, a profile.

    You keep your loop, and call `log` after each step. Metrics stay on the devices until an interval of `every` steps
    is over. The monitor then fetches them together, while the devices work on the next step: the host waits once per
    interval, and the devices never wait. Sinks get the values of every step. The last step of an interval adds:

    * `perf/seconds_per_step`: wall time per step, from the last step of one interval to that of the next; includes data
      loading, but not the time in `pause`.
    * `perf/first_step_seconds`: instead of that, for the first step, which traces and compiles and is its own interval.
    * `perf/tokens_per_second`: over all devices, with `tokens_per_step`.
    * `perf/peak_device_bytes`: the peak memory of the fullest device of this process since the process began. Absent if
      devices do not report it, as on CPUs.
    * `perf/skipped_steps`: the number of steps of the interval whose `step_applied` is false, if the metrics have one.

    Steps with records add values of their own, `disk` in their names if these are on disk, `host` if they are in memory
    (`Offload(delay=1)` or `zenflow`). They are 0 if no update ran:

    * `perf/disk_read_bytes_per_s`, `perf/disk_write_bytes_per_s`: bytes of the update, divided by its duration.
    * `perf/disk_wait_share`: the share of the update's duration in which the step waited for it; with `delay=1`, in
      which the step had nothing else to do.

    With several processes, every process calls `log`, and process 0 writes, shows and profiles: the metrics of jzero's
    steps are the same everywhere. The memory is then that of its devices.

    Args:
      total_steps: Steps of the whole run, for the progress.
      sinks: Functions `sink(step, values)`, such as `JsonLines`, `Csv`, `TensorBoard`, `WandB` and `MLflow`; started
        with `config` if they have a `start`, closed at the end if they have a `close`.
      config: The settings of the run, for sinks that keep them: nested dictionaries of numbers and text, of dataclasses
        such as a `ZeroConfig`, and of a plan, such as `{"lr": 1e-3, "plan": jzero.plan_of(state)}`.
      every: Steps of an interval, which ends at multiples of it.
      tokens_per_step: Tokens (or examples) of one step over all devices.
      start_step: Steps done before, by the run that this one resumes.
      progress: Whether to show progress on the standard output: a bar in terminals and notebooks, elsewhere a line per
        interval. Needs rich.
      show: Names of the metrics that the progress shows.
      profile_dir: Folder for a profile by `jax.profiler`, for TensorBoard, XProf or Perfetto; `None`: no profile.
      profile_steps: The first and the last step to profile, counted from 1 at this monitor's start. They are their own
        interval.
      every_process: Whether every process writes, shows and profiles. Each needs its own sinks.

    Attributes:
      step: The last logged step.

    Raises:
      ValueError: An argument has an impossible value.
      TypeError: A sink is not a function.
      ImportError: (on entering) Progress is asked for and rich is not installed.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> seen = {}
      >>> with jzero.Monitor(sinks=[seen.__setitem__], every=2, progress=False) as monitor:
      ...     for batch in [jnp.ones((8, 512))] * 4:
      ...         state, metrics = step(state, batch)
      ...         monitor.log(metrics)
      >>> [sorted(seen[i]) for i in (3, 4)]
      [['grad_norm', 'loss', 'step_applied'], ['grad_norm', 'loss', 'perf/seconds_per_step', 'perf/skipped_steps', ...]]
    """

    def __init__(  # noqa: PLR0913  # the options of a run
        self,
        total_steps: int | None = None,
        *,
        sinks: Sequence[Sink] = (),
        config: Mapping[str, Any] | None = None,
        every: int = 10,
        tokens_per_step: int | None = None,
        start_step: int = 0,
        progress: bool = True,
        show: Sequence[str] = ("loss",),
        profile_dir: str | os.PathLike[str] | None = None,
        profile_steps: tuple[int, int] = (10, 12),
        every_process: bool = False,
    ) -> None:
        check("every_process", every_process, FLAG)
        check("progress", progress, FLAG)
        self._total_steps = check("total_steps", total_steps, optional(integer(1)))
        self._every = check("every", every, integer(1))
        self._tokens_per_step = check("tokens_per_step", tokens_per_step, optional(integer(1)))
        self.step = self._start_step = check("start_step", start_step, integer(0))
        if config is not None and not isinstance(config, Mapping):
            raise TypeError(f"`config` must be a dictionary of settings: got {type(config).__name__}.")
        not_callable = [sink for sink in sinks if not callable(sink)]
        if not_callable:
            raise TypeError(f"Each of `sinks` must be a function of `(step, values)`: got {not_callable}.")
        first, last = profile_steps
        if not 1 <= first <= last:
            raise ValueError(f"`profile_steps` must be (first, last) with 1 <= first <= last: got {profile_steps!r}.")
        self._speaks = every_process or jax.process_index() == 0
        self._sinks = tuple(sinks)
        self._config = {} if config is None else config
        self._show = tuple(show)
        self._wants_progress = progress
        self._profiler = None if profile_dir is None or not self._speaks else StepProfiler(profile_dir, profile_steps)
        self._display: Bar | Lines | None = None
        self._pending: list[dict[str, Any]] = []  # of the newest steps, on the devices
        self._since: float | None = None  # when the interval began; `None` outside `with`
        self._entered = False

    def __enter__(self) -> Monitor:
        """Starts the clock."""
        if self._entered:
            raise RuntimeError("A monitor watches one run: make another one for the next.")
        self._entered = True
        with contextlib.ExitStack() as undo:
            if self._wants_progress and self._speaks:
                self._display = make_display(self._total_steps, self._show, start=self._start_step)
                undo.callback(self._display.close)
            for sink in self._sinks if self._speaks else ():
                if hasattr(sink, "start"):
                    undo.callback(getattr(sink, "close", lambda: None))
                    sink.start(settings_as_data(self._config))
            self._begin_step()  # fails if another profile is being taken
            undo.pop_all()
        return self

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of the next step, and writes those of the previous interval if it is over.

        Args:
          metrics: A tree of real scalars, such as the metrics of `make_train_step`. Paths name its leaves, such as
            `aux/accuracy`.

        Raises:
          TypeError: A leaf is not a real scalar.
          ValueError: A name is the monitor's own.
          RuntimeError: The monitor was not entered, or a sink failed.
        """
        self._check_entered()
        values = scalars(metrics)
        done = self.step - self._start_step
        if done == 1 or (done and self.step % self._every == 0):
            self._report_pending()
        self.step += 1
        self._pending.append(values)
        if self._profiler is not None:
            self._profiler.after(done + 1, self._report_pending)
        self._begin_step()

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes occasional values, such as a validation loss, for the last logged step, at once.

        Args:
          values: As for `log`. The host waits for them.

        Raises:
          TypeError, ValueError, RuntimeError: As from `log`.
        """
        self._check_entered()
        named = scalars(values)
        self._report_pending()
        if self._speaks:
            (fetched,) = fetch([named])
            self._emit(self.step, fetched)
            self._report(fetched)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Writes the logged metrics, then stops the clock for something else than training, such as an evaluation.

        Example:
          >>> with jzero.Monitor(progress=False) as monitor, monitor.pause():
          ...     pass  # evaluate, sample, save
        """
        self._check_entered()
        self._report_pending()
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        """Writes the remaining metrics, ends an open profile, and closes the sinks."""
        closes = [sink.close for sink in self._sinks if hasattr(sink, "close")]
        closes += [x.close for x in (self._profiler, self._display) if x is not None]
        try:
            with contextlib.ExitStack() as stack:  # calls each, whatever the others raise
                for close in closes:
                    stack.callback(close)
                self._report_pending()
        except Exception as failure:
            if error is None:
                raise
            # The user needs to see, and to catch, the loop's own error.
            error.add_note(f"The monitor could not be closed either: {type(failure).__name__}: {failure}")
        finally:
            self._since = None
        if error is None and self._profiler is not None and not self._profiler.started:
            warn(
                f"No profile was taken: the loop ended after {self.step - self._start_step} steps, before the first of "
                f"`profile_steps`, {self._profiler.first}."
            )

    def _begin_step(self) -> None:
        if self._profiler is not None:
            self._profiler.before(self.step - self._start_step + 1, self.step + 1, self._report_pending)
        if not self._pending:  # the start and the writing of a trace do not count
            self._since = time.perf_counter()

    def _report_pending(self) -> None:
        """Writes all pending steps, as one interval. Waits for the last of them."""
        pending, self._pending = self._pending, []
        if not pending or not self._speaks:
            return
        readings = fetch(pending)
        now, since = time.perf_counter(), self._since
        assert since is not None
        self._since = now
        first = self.step - len(pending) + 1
        timing = self._timing((now - since) / len(pending), compiled=first == self._start_step + 1)
        peak = peak_device_bytes()
        memory = {} if peak is None else {"peak_device_bytes": float(peak)}
        applied = [x["step_applied"] for x in readings if "step_applied" in x]
        skipped = {"skipped_steps": float(applied.count(0.0))} if applied else {}
        readings[-1] |= {PREFIX + name: x for name, x in {**timing, **memory, **skipped}.items()}
        for step, values in enumerate(readings, first):
            self._emit(step, values)
        self._report(readings[-1])

    def _timing(self, seconds: float, *, compiled: bool) -> dict[str, float]:
        if compiled:
            return {"first_step_seconds": seconds}
        tokens = {} if self._tokens_per_step is None else {"tokens_per_second": self._tokens_per_step / seconds}
        return {"seconds_per_step": seconds, **tokens}

    def _emit(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            try:
                sink(step, dict(values))
            except Exception as error:
                raise RuntimeError(f"The sink {sink!r} failed at step {step}: {error}") from error

    def _report(self, values: Mapping[str, float]) -> None:
        if self._display is not None:
            self._display.show(self.step, values)

    def _check_entered(self) -> None:
        if self._since is None:
            raise RuntimeError("A monitor works inside of `with`: `with jzero.Monitor(...) as monitor:`.")


def settings_as_data(value: Any) -> Any:
    """Returns settings as nested dictionaries and lists of numbers and text.

    A plan becomes its summary, a dataclass (such as a `ZeroConfig`) a dictionary of its fields; of anything else that
    is no number, text, list or dictionary, its text.
    """
    if isinstance(value, ZeroPlan):
        return {**value.summary(), "config": text.as_data(value.config)}
    if isinstance(value, Mapping):
        return {str(name): settings_as_data(x) for name, x in value.items()}
    return text.as_data(value)
