"""The picture of a report: memory by class, and the timeline. The only file that uses matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.analysis.schedule import Timeline
from jzero.core.base.extras import import_extra

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


def draw(path: str, title: str, memory: Mapping[str, int], timeline: Timeline | None) -> None:
    """Writes the picture.

    Args:
      path: The file; its suffix chooses the format.
      title: The title.
      memory: Bytes by class.
      timeline: The timeline, if there is one.

    Raises:
      ImportError: matplotlib is not installed.
    """
    needs = "Figures need matplotlib, which is not installed: `pip install 'jzero[examples]'`."
    figures = import_extra("matplotlib.figure", needs)
    rows = 1 if timeline is None else 2
    figure = figures.Figure(figsize=(9, 2.6 * rows), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    _draw_memory(axes[0], memory)
    if timeline is not None:
        _draw_timeline(axes[1], timeline)
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Any, memory: Mapping[str, int]) -> None:
    names = list(memory)[::-1]
    bars = axes.barh(names, [memory[name] / MIB for name in names], color=COLOURS["compute"])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_xlabel("MiB per device")
    axes.margins(x=0.1)


def _draw_timeline(axes: Any, timeline: Timeline) -> None:
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
