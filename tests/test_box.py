"""Boxes: intersections, splits and runs against NumPy's indices."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.layout.box import Box, runs, tile

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def boxes(draw, shape):
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def numbers(shape):
    return np.arange(math.prod(shape)).reshape(shape)


@given(st.data())
def test_what_two_boxes_have_in_common(data):
    shape = data.draw(SHAPES)
    x, a, b = numbers(shape), data.draw(boxes(shape)), data.draw(boxes(shape))
    common, both = a & b, np.intersect1d(a.take(x), b.take(x))
    assert (common is None) == (both.size == 0)
    if common is not None:
        np.testing.assert_array_equal(common.take(x).reshape(-1), both)
        np.testing.assert_array_equal(common.within(a).take(a.take(x)), common.take(x))
        assert common.within(a).beyond(a.start) == common
        first = common.lines(shape)
        np.testing.assert_array_equal(common.take(x).reshape(len(first), -1)[:, 0], first)


@given(st.data())
def test_chunks_and_runs_make_the_whole_again(data):
    shape = data.draw(SHAPES)
    box, x = data.draw(boxes(shape)), numbers(shape)
    parts = list(box.split([data.draw(st.integers(1, 4)) for _ in shape]))
    assert tile([part.within(box) for part in parts], box.shape)
    first, stop = sorted(data.draw(st.tuples(st.integers(0, x.size), st.integers(0, x.size)))) if shape else (0, 0)
    pieces = [part.take(x).reshape(-1) for part in runs(first, stop, shape)]
    assert [n for piece in pieces for n in piece] == list(range(first, stop))


@pytest.mark.parametrize(
    "boxes", [[Box((0,), (2,)), Box((0,), (2,))], [Box((2,), (4,))], [Box((0,), (3,))]], ids=["twice", "outside", "gap"]
)
def test_boxes_that_do_not_make_an_array(boxes):
    assert not tile(boxes, (4,))
