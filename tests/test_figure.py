"""What the pictures of reports show, by what is in them."""

import types

import numpy as np
import pytest

from jzero.analysis import figure, report
from jzero.analysis.schedule import Span, Timeline

MIB, GIB = 2**20, 2**30
TIMELINE = Timeline(
    seconds=0.006,
    compute=0.005,
    communication=0.002,
    exposed=0.001,
    least=0.006,
    spans=(
        Span("compute", 0.0, 0.002, "compute"),
        Span("communication", 0.001, 0.003, "all-gather"),
        Span("compute", 0.003, 0.006, "compute"),
    ),
)
NOTHING = dict.fromkeys(("gathered", "activations", "gradients", "working"), 0)
COURSE = types.SimpleNamespace(
    opt_state=8 * GIB, params=4 * GIB, other=2 * GIB, course=(NOTHING, {**NOTHING, "activations": GIB, "working": GIB})
)


@pytest.fixture
def axes():
    return pytest.importorskip("matplotlib.figure").Figure().subplots()


@pytest.mark.parametrize(
    ("estimated", "timeline"), [(None, None), (COURSE, None), (COURSE, TIMELINE), (None, TIMELINE)]
)
def test_a_report_draws_each_part_that_it_has(estimated, timeline, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "draw", lambda path, title, parts: drawn.extend([path, title, *parts]))
    parts = {"memory": {"arguments": 1}, "estimated": estimated, "timeline": timeline, "limit": GIB}
    report.AnalysisReport.save_figure(types.SimpleNamespace(**parts, _heading=lambda: ["a", "b"]), "x.svg")
    assert drawn[:2] == ["x.svg", "a\nb"]
    found = [part.func for part in drawn[2:]]
    assert found == [
        figure.draw_memory,
        *[figure.draw_course] * (estimated is not None),
        *[figure.draw_timeline] * (timeline is not None),
    ]


def test_bytes_by_class(axes):
    figure.draw_memory(axes, {"arguments": 3 * MIB, "temporaries": 5 * MIB})
    assert [bar.get_width() for bar in axes.patches] == [5, 3]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["temporaries", "arguments"]


def test_busy_times(axes):
    figure.draw_timeline(axes, TIMELINE)
    extents = [bars.get_datalim(axes.transData).extents for bars in axes.collections]
    np.testing.assert_allclose(extents, [[0, 0.6, 6, 1.4], [1, -0.4, 3, 0.4]])
    assert [bars.get_label() for bars in axes.collections] == ["compute", "all-gather"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["communication", "compute"]
    assert "collectives exposed: 50%" in axes.get_xlabel()


@pytest.mark.parametrize("limit", [None, 20 * GIB])
def test_memory_through_a_step(limit, axes):
    figure.draw_course(axes, COURSE, limit)
    labels = [label.get_text() for label in axes.get_legend().get_texts()]
    assert sorted(labels) == sorted([*figure.LIVES, *["usable"] * (limit is not None)])
    tops = [max(y for _, y in part.get_paths()[0].vertices) for part in axes.collections]
    np.testing.assert_allclose(tops, [8, 12, 14, 14, 15, 15, 16])
    assert [line.get_ydata()[0] for line in axes.lines] == [20] * (limit is not None)


def test_layouts_by_time_and_memory(axes):
    figure.draw_layouts(axes, ["a", "b", "a"], [(3.0, GIB), (2.0, 2 * GIB), (4.0, 3 * GIB)], 4 * GIB, "ms")
    points = [part.get_offsets().tolist() for part in axes.collections]
    assert points == [[[3, 1], [4, 3]], [[2, 2]], [[3, 1]]]
    assert [line.get_ydata()[0] for line in axes.lines] == [4]
