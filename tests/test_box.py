"""Boxes: intersections, splits and runs against NumPy's indices; chunks of arrays, on TPUs only what they can slice."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.core.arrays.chunks import split
from jzero.core.layout.box import Box, before_reshape, runs, tile

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


@given(st.data())
def test_what_a_box_of_a_reshaped_array_needs(data):
    """Also where neither row divides the other, as from [4, 6] to [6, 4]."""
    size = data.draw(st.sampled_from([1, 6, 24, 60, 72]))

    def shape_of(left):
        shape = []
        while left > 1:
            shape.append(data.draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
            left //= shape[-1]
        return tuple(shape) or (1,)

    before, shape = shape_of(size), shape_of(size)
    x, box = numbers(before), data.draw(boxes(shape).filter(lambda box: box.size))
    near, near_shape, inside = before_reshape(box, shape, before)
    np.testing.assert_array_equal(inside.take(near.take(x).reshape(near_shape)), box.take(x.reshape(shape)))
    rows = math.lcm(math.prod(before[1:]), math.prod(shape[1:]))  # whole rows on both sides
    begin, end = box.start[0] * math.prod(shape[1:]), (box.start[0] + box.shape[0]) * math.prod(shape[1:])
    assert near.size <= -(-end // rows) * rows - begin // rows * rows, "no more than it must"


@pytest.mark.parametrize(
    "boxes", [[Box((0,), (2,)), Box((0,), (2,))], [Box((2,), (4,))], [Box((0,), (3,))]], ids=["twice", "outside", "gap"]
)
def test_boxes_that_do_not_make_an_array(boxes):
    assert not tile(boxes, (4,))


LARGE = st.lists(st.sampled_from([1, 2, 3, 5, 8, 24, 31, 32, 61, 96, 120, 128, 256, 300]), min_size=0, max_size=4)
LARGE = LARGE.filter(lambda shape: math.prod(shape) <= 200_000).map(tuple)


def chunks_of(pieces):
    size = pieces.view[pieces.dim]
    return [min(pieces.length, size - start) for start in range(0, size, pieces.length)]


@given(LARGE, st.sampled_from([2, 4, 12]), st.integers(1, 10**6), st.booleans())
@settings(max_examples=200)
def test_chunks_are_no_larger_than_they_must_be(shape, num_bytes, chunk_bytes, tiled):
    pieces = split(shape, num_bytes, chunk_bytes, tiled=tiled)
    assert math.prod(pieces.view) == math.prod(shape)
    lengths = chunks_of(pieces)
    assert sum(lengths) == pieces.view[pieces.dim]
    largest = max(lengths) * math.prod(pieces.view) // pieces.view[pieces.dim] * num_bytes
    if not tiled:
        assert largest <= max(chunk_bytes, num_bytes)
        return
    if len(lengths) == 1:
        return
    # By hand what TPUs can slice: leading dimensions, whole sublane tiles, whole lane tiles. See [Note: Chunks].
    from_end = len(pieces.view) - pieces.dim
    if from_end > 2:
        return
    rows, columns = (1, pieces.view[-1]) if len(pieces.view) == 1 else pieces.view[-2:]
    up = lambda size, tile: -(-size // tile) * tile
    transposed = up(columns, 8) * up(rows, 128) < up(rows, 8) * up(columns, 128)
    lanes_cut = from_end == (2 if transposed else 1)
    if lanes_cut or len(pieces.view) == 1:
        assert not [length for length in lengths if length % 128]
    else:
        lanes = rows if transposed else columns
        assert not [length for length in lengths[:-1] if length % 32]
        assert lengths[-1] % 8 == 0 or (lanes > 128 and lengths[-1] >= 2)


def test_large_layers_of_large_models():
    """A stack of a 70B model on 8 devices: contiguous chunks of the limit, whatever a single layer takes."""
    shape, limit = (80, 8192, 28672 // 8), 16 * 2**20
    for tiled in (False, True):
        pieces = split(shape, 12, limit, tiled=tiled)
        assert (pieces.view, pieces.dim) == ((80 * 8192, 3584), 0)
        assert 0.9 * limit < pieces.length * 3584 * 12 <= limit
    assert split((50257, 96), 12, limit, tiled=True).dim == 1, "lanes are where 50257 wastes less"
    assert split((1_280_000,), 4, 10_000, tiled=True).length == 2048, "vectors lie in tiles of 8 x 128"
    whole = split((100_003,), 12, 1000, tiled=True)
    assert whole.length == 100_003, "nothing that a TPU could slice"
