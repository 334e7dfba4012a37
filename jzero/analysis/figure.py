"""The pictures of reports: memory by class and over time, layouts, the timeline. The only file that uses matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jzero.analysis.schedule import Timeline
from jzero.core.base.extras import import_extra
from jzero.estimate.step_memory import StepMemory

# Okabe and Ito's palette, which color-blind readers can distinguish.
COLOURS = {
    "compute": "#0072B2",
    "all-gather": "#E69F00",
    "reduce-scatter": "#009E73",
    "all-reduce": "#D55E00",
    "all-to-all": "#CC79A7",
    "collective-permute": "#56B4E9",
}
MIB = 2**20


GIB = 2**30
LIVES = {
    "optimizer": "#0072B2",
    "parameters": "#56B4E9",
    "other": "#BBBBBB",
    "gathered": "#E69F00",
    "activations": "#009E73",
    "gradients": "#D55E00",
    "working": "#CC79A7",
}
"""What lives in memory, from below, and its color."""


def check_matplotlib() -> Any:
    """Returns its module of figures.

    Raises:
      ImportError: matplotlib is not installed.
    """
    needs = "Figures need matplotlib, which is not installed: `pip install 'jzero[examples]'`."
    return import_extra("matplotlib.figure", needs)


def draw(path: str, title: str, parts: Sequence[Callable[[Any], None]]) -> None:
    """Writes a picture.

    Args:
      path: The file; its suffix chooses the format.
      title: The title.
      parts: What draws each part, from above.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure = check_matplotlib().Figure(figsize=(9, 2.8 * len(parts)), layout="constrained")
    figure.suptitle(title)
    for part, axes in zip(parts, figure.subplots(len(parts), 1, squeeze=False)[:, 0], strict=True):
        part(axes)
    figure.savefig(path, dpi=150)


def draw_course(axes: Any, memory: StepMemory, limit: int | None) -> None:
    """Draws the memory of a device through a step, by what lives in it."""
    fixed = {"optimizer": memory.opt_state, "parameters": memory.params, "other": memory.other}
    heights = [[{**fixed, **moment}[name] / GIB for moment in memory.course] for name in LIVES]
    axes.stackplot(range(len(memory.course)), *heights, labels=LIVES, colors=LIVES.values(), step="post")
    axes.set_ylabel("GiB per device")
    axes.set_xlabel("operations of the step, as estimated; of a loop, one iteration")
    axes.set_xticks([])
    _draw_limit(axes.axhline, limit)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)


def draw_layouts(axes: Any, names: Sequence[str], points: Sequence[tuple[float, int]], limit: int, unit: str) -> None:
    """Draws layouts by the time and the memory of a step; the first is the choice."""
    for name in dict.fromkeys(names):
        some = [point for point, of in zip(points, names, strict=True) if of == name]
        axes.scatter([x for x, _ in some], [y / GIB for _, y in some], label=name, alpha=0.7)
    axes.scatter(points[0][0], points[0][1] / GIB, s=160, facecolors="none", edgecolors="black")
    axes.set_xlabel(f"{unit}; the circle is the choice, or the least")
    axes.set_ylabel("GiB per device")
    axes.set_yscale("log")
    _draw_limit(axes.axhline, limit)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_limit(line: Any, limit: int | None) -> None:
    if limit is not None:
        line(limit / GIB, color="black", linestyle="--", label="usable")


def draw_memory(axes: Any, memory: Mapping[str, int]) -> None:
    """Draws bytes by class."""
    names = list(memory)[::-1]
    bars = axes.barh(names, [memory[name] / MIB for name in names], color=COLOURS["compute"])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_xlabel("MiB per device")
    axes.margins(x=0.1)


def draw_timeline(axes: Any, timeline: Timeline) -> None:
    """Draws the busy times of the two streams."""
    streams = ("communication", "compute")
    drawn = set()
    for kind in dict.fromkeys(span.name for span in timeline.spans):
        for row, stream in enumerate(streams):
            spans = [s for s in timeline.spans if s.name == kind and s.stream == stream]
            if spans:
                bars = [(1e3 * s.start, 1e3 * (s.end - s.start)) for s in spans]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[kind], label=None if kind in drawn else kind)
                drawn.add(kind)
    axes.set_yticks(range(len(streams)), streams)
    axes.set_xlabel(f"ms of the modelled step; collectives exposed: {timeline.exposed_share:.0%}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=4, frameon=False)
