"""What `fit` returns: all candidates, and the choice among them, as values, a table and pictures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jzero.analysis.alike import grouped
from jzero.analysis.candidates import CHOSEN, CLOSE_TO_BEST, Candidate, describe_candidate, recomputation
from jzero.analysis.figure import draw, draw_course, draw_layouts
from jzero.analysis.memory_table import MemoryTable, in_unit, unit_of
from jzero.core.base.text import Part, Report, Table, format_number
from jzero.core.config.zero import ZeroConfig
from jzero.core.engine.recompute import Remat
from jzero.core.layout.mesh import row_axes
from jzero.core.plan.table import format_bytes
from jzero.estimate.step_memory import sent_over

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Fit(Report):
    """The result of `fit`; `print` it for a table of all candidates.

    Attributes:
      machine: The machine.
      limit: Most bytes of a step on one device.
      tried: Every candidate, by the estimated time of a step, the fastest first.
      chosen: The fastest of them that fits, or `None`.
      notes: Remarks about the search, such as a missing compiler.
      workload: The model and the batch.

    Example:
      >>> make_state = lambda key: plain_state
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> choice = jzero.fit(make_state, loss_fn, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> choice.config.stage, choice.accumulate_steps
      (0, 1)
    """

    machine: str
    limit: int
    tried: tuple[Candidate, ...]
    chosen: Candidate | None
    notes: tuple[str, ...]
    workload: str = ""

    @property
    def _choice(self) -> Candidate:
        if self.chosen is None:
            raise ValueError(self._headline())
        return self.chosen

    @property
    def config(self) -> ZeroConfig:
        """The configuration to train with; raises a `ValueError` if nothing fits."""
        return self._choice.config

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The mesh to train on, for `make_mesh(**choice.mesh_shape)`."""
        return self._choice.mesh_shape

    @property
    def accumulate_steps(self) -> int:
        """For `make_train_step`."""
        return self._choice.accumulate_steps

    @property
    def remat(self) -> Remat | None:
        """For `make_train_step`."""
        return self._choice.remat

    @property
    def ledger(self) -> MemoryTable:
        """The ledger of the chosen candidate, or of the smallest if nothing fits."""
        return (self.chosen or self.least).ledger(self.limit)

    @property
    def least(self) -> Candidate:
        """The candidate that needs least memory."""
        return min(self.tried, key=lambda x: (x.refused, bool(x.lacks), x.peak))

    def _headline(self) -> str:
        if self.chosen is not None:
            x = self.chosen
            how = "estimated" if x.compiled_peak is None else "compiled"
            sizes = f"{format_bytes(x.peak)} ({how}) of {format_bytes(self.limit)} per device"
            time = "" if x.memory.seconds is None else f"; a step takes {_milliseconds(x.best_cost())} ms"
            time += f", at most {most} ms" if (most := _at_most(x)) else ""
            return f"{self.machine}: {describe_candidate(x)} fits: {sizes}{time}"
        least = self.least
        excess = f"{format_bytes(least.peak - self.limit)} more than the {format_bytes(self.limit)} available"
        excess = least.lacks if least.lacks and least.peak <= self.limit else excess
        excess = "and the compiler rejects it: out of memory" if least.refused else excess
        need = f"{describe_candidate(least)} with {format_bytes(least.peak)} per device"
        return f"{self.machine}: nothing fits. The least is {need}, {excess}."

    def save_figure(self, path: str) -> None:
        """Draws the layouts by time and memory, and the memory of the choice, or of the least, over a step.

        Args:
          path: The file; its suffix chooses the format (`.png`, `.svg`).

        Raises:
          ImportError: matplotlib is not installed.
        """
        first, tried = self.chosen or self.least, self._best_first()
        tried = [first, *(x for x in tried if x is not first)]
        knows_time = all(x.memory.seconds is not None for x in tried)
        points = [(1e3 * x.best_cost() if knows_time else x.memory.sent_bytes / 1e6, x.peak) for x in tried]
        names = ["stage " + _stage(x) + ", state on the host" * (x.memory.host > 0) for x in tried]
        unit = "ms of a step" if knows_time else "MB sent in a step"
        parts = [
            functools.partial(draw_layouts, names=names, points=points, limit=self.limit, unit=unit),
            functools.partial(draw_course, memory=first.memory, limit=self.limit),
        ]
        draw(path, self._headline(), parts)

    def _best_first(self) -> list[Candidate]:
        """Returns the candidates: the choice, those that fit by cost, the others by what they lack."""

        def place(x: Candidate) -> tuple[Any, ...]:
            fits = x.fits(self.limit)
            return (x.verdict != CHOSEN, not fits, x.best_cost() if fits else (x.refused, x.peak))

        return sorted(self.tried, key=place)

    def parts(self, *, max_rows: int | None = 10) -> list[Part]:
        """Returns the headline, the candidates and the notes.

        Args:
          max_rows: Most rows of candidates, each with how many differ from it in one option alone; `None` for a row of
            each.
        """
        tried = self._best_first()
        sized = functools.partial(in_unit, unit=unit_of(max(x.peak for x in tried)))
        columns = {**OPTIONS} | {
            "verdict": lambda x: x.verdict,
            "states": lambda x: sized(x.memory.states.total),
            "estimated": lambda x: sized(x.memory.peak),
            "compiled": lambda x: "refused" if x.refused else _or_blank(x.compiled_peak, sized),
            "sends": lambda x: sized(x.memory.sent_bytes),
            "of it": lambda x: ", ".join(sent_over(_beside_zero(x))),
            "ms": lambda x: "" if x.memory.seconds is None else _milliseconds(x.cost()),
            "compiled ms": lambda x: _or_blank(x.compiled_cost(), _milliseconds),
            "at most": _at_most,
            "disk": lambda x: f"{format_number(x.disk_seconds, 3)} s" if x.memory.disk else "",
        }
        order = ("stage", "verdict", *OPTIONS, *columns)
        columns = {name: columns[name] for name in dict.fromkeys(order)}
        groups = [(x, "") for x in tried]
        if max_rows is not None:
            groups = grouped(tried, lambda x: {name: show(x) for name, show in OPTIONS.items()}, "stage")
        rows = [[*(show(x) for show in columns.values()), alike] for x, alike in groups]
        table = Table([(*columns, "alike"), *rows], left=5, last_left=True, optional=OPTIONAL, max_rows=max_rows)
        return [self._headline(), self.workload, "", table, *([""] if self.notes else []), *self.notes]


def _stage(x: Candidate) -> str:
    return str(x.config.stage) + ", kept" * x.keeps_params


OPTIONS: dict[str, Callable[[Candidate], str]] = {
    "stage": _stage,
    "mesh": lambda x: ",".join(f"{name}={size}" for name, size in x.mesh_shape.items()),
    "micro-batches": lambda x: str(x.accumulate_steps),
    "remat": lambda x: recomputation(x.remat).name,
    "whole up to": lambda x: f"{x.config.persistence_threshold:,}",
    "secondary": lambda x: "yes" if x.config.secondary_params or x.config.secondary_grads else "",
    "host": lambda x: format_bytes(x.memory.host) if x.memory.host else "",
}
"""What a candidate is, by the title of its column."""

OPTIONAL = ("secondary", "compiled", "of it", "ms", "compiled ms", "at most", "host", "disk", "alike")
"""The columns of the table that may be missing."""


def _or_blank(x: T | None, show: Callable[[T], str]) -> str:
    return "" if x is None else show(x)


def _milliseconds(seconds: float) -> str:
    return format_number(1e3 * seconds, 4)


def _at_most(x: Candidate) -> str:
    """Returns the milliseconds of a step that runs its longest branches, if that is longer than a usual one."""
    usual, most = x.compiled_seconds or 0.0, x.most_seconds or 0.0
    return _milliseconds(most + x.waits) if most > CLOSE_TO_BEST * usual else ""


def _beside_zero(x: Candidate) -> dict[str, int]:
    """Returns the bytes that the loss itself sends over mesh axes that rows of the batch are not split over."""
    rows = row_axes(x.config)
    return {axes: n for axes, n in x.memory.sent_by_axes.items() if {*axes.split("+")}.isdisjoint(rows)}
