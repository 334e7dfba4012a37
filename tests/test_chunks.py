"""Arrays in chunks: all of each array, none too large, and on TPUs only what they can slice."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.arrays.chunks import split

SHAPES = st.lists(st.sampled_from([1, 2, 3, 5, 8, 24, 31, 32, 61, 96, 120, 128, 256, 300]), min_size=0, max_size=4)
SHAPES = SHAPES.filter(lambda shape: math.prod(shape) <= 200_000).map(tuple)


def chunks_of(pieces):
    size = pieces.view[pieces.dim]
    return [min(pieces.length, size - start) for start in range(0, size, pieces.length)]


@given(SHAPES, st.sampled_from([2, 4, 12]), st.integers(1, 10**6), st.booleans())
@settings(max_examples=200, deadline=None)
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
    whole = split((100_003,), 12, 1000, tiled=True)
    assert whole.length == 100_003, "nothing that a TPU could slice"
