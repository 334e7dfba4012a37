"""Progress of a run: a bar in a terminal or notebook, else a line of text per report. Needs rich."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.core.base.extras import import_extra
from jzero.core.plan.table import format_bytes
from jzero.monitor.readings import PREFIX

NEEDS = "Progress needs rich: `pip install 'jzero[monitor]'`, or say `Monitor(progress=False)`."


def make_display(total: int | None, shown: Sequence[str], *, start: int) -> Bar | Lines:
    """Returns a bar for terminals and notebooks, else lines.

    Args:
      total: Steps of the whole run, if known.
      shown: The names of the values to show.
      start: Steps done before.

    Raises:
      ImportError: rich is not installed.
    """
    console = import_extra("rich.console", NEEDS).Console()
    notebook = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    moves = notebook or (console.is_terminal and not console.is_dumb_terminal)
    return Bar(console, total, shown, start=start) if moves else Lines(total, shown)


class Lines:
    """A line for each report, for log files."""

    def __init__(self, total: int | None, shown: Sequence[str]) -> None:
        self.total, self.shown = total, shown

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the newest values."""
        of = "" if self.total is None else f"/{self.total}"
        text = describe_progress(values, self.shown)
        if not text:
            return
        sys.stdout.write(f"step {step}{of}  {text}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Does nothing: written lines stay."""


class Bar:
    """A rich bar; other output of the process scrolls above it."""

    def __init__(self, console: Any, total: int | None, shown: Sequence[str], *, start: int) -> None:
        progress = import_extra("rich.progress", NEEDS)
        of = "{task.completed:.0f}" if total is None else "{task.completed:.0f}/{task.total:.0f}"
        self.shown = shown
        self._values: dict[str, float] = {}
        self._bar = progress.Progress(
            progress.TextColumn(of),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.description}", markup=False),
            progress.TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, completed=start)
        self._bar.start()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Moves the bar and shows the newest values."""
        if any(name.startswith(PREFIX) for name in values):
            self._values = {k: v for k, v in self._values.items() if not k.startswith(PREFIX)}
        self._values |= values
        self._bar.update(
            self._task, completed=step, description=describe_progress(self._values, self.shown), refresh=True
        )

    def close(self) -> None:
        """Leaves the bar as it is now."""
        self._bar.stop()


def describe_progress(values: Mapping[str, float], shown: Sequence[str]) -> str:
    """Returns the named values as text, then step time, speed, memory and skipped steps, if known."""
    parts = [f"{name} {values[name]:.4g}" for name in shown if name in values]
    if "perf/first_step_seconds" in values:
        parts.append(f"first step {_seconds(values['perf/first_step_seconds'])}")
    if "perf/seconds_per_step" in values:
        parts.append(f"{_seconds(values['perf/seconds_per_step'])}/step")
    if "perf/tokens_per_second" in values:
        parts.append(f"{values['perf/tokens_per_second']:,.0f} tokens/s")
    if any(name.startswith(PREFIX) for name in values):
        peak = values.get("perf/peak_device_bytes")
        parts.append("memory unknown" if peak is None else format_bytes(peak))
    if values.get("perf/skipped_steps"):
        parts.append(f"{values['perf/skipped_steps']:.0f} skipped")
    return "  ".join(parts)


def _seconds(x: float) -> str:
    return f"{x:.2f} s" if x >= 1 else f"{1000 * x:.1f} ms"
