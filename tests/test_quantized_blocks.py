"""Blocks of integers against the definition in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.layout.blocks import pack, packed_size, unpack
from jzero.layout.cut import Cut
from tests.quantized import numpy_rounded

LARGEST_ERROR = {"int8": 1 / 254, "int4": 1 / 14, "nf4": 0.1520}  # nf4: half of the widest gap, (0.6962 - 1) / 2


few = settings(max_examples=2, deadline=None)  # each new shape is compiled


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(1, 23), min_size=2, max_size=4))
    num_stacked = draw(st.integers(0, len(shape) - 1))
    dim = draw(st.integers(num_stacked, len(shape) - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-12, 12)
    return (x * rng.choice([0, 1, 1e-6], size=shape)).astype(np.float32), dim, num_stacked


packed_by = jax.jit(pack, static_argnums=(1, 2, 3))
unpacked_by = jax.jit(unpack, static_argnums=(1, 2))


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_blocks_are_those_of_the_definition(kind):
    x = np.clip(np.random.default_rng(0).normal(size=(2, 3, 137)) / 2, -1, 1)
    most = [[1, np.finfo(np.float32).max, ml_dtypes.finfo("bfloat16").max], [8.6e37, 65504, 2e-29]]
    assert_packed_by_definition(((x * np.array(most, float)[..., None]).astype(np.float32), 1, 1), kind)


@few
@given(arrays(), st.sampled_from(["int8", "int4", "nf4"]))
def test_blocks_of_any_shape_are_those_of_the_definition(drawn, kind):
    assert_packed_by_definition(drawn, kind)


def assert_packed_by_definition(drawn, kind):
    """Within one bit: XLA's reciprocal may differ from NumPy's by as much."""
    x, dim, num_stacked = drawn
    packed = packed_by(x, dim, num_stacked, kind)
    size = int(np.prod(x.shape[num_stacked:])) // x.shape[dim]
    assert packed.dtype == jnp.int8
    assert packed.shape == (*x.shape[:num_stacked], x.shape[dim], packed_size(size, kind))
    rest = np.moveaxis(x, dim, num_stacked).shape[num_stacked + 1 :]
    found = unpacked_by(packed, size, kind)
    found = np.moveaxis(np.asarray(found).reshape(*found.shape[:-1], *rest), num_stacked, dim)
    want = numpy_rounded(x, dim, kind, num_stacked)
    steps = np.abs(found - want) > 1e-6 * np.abs(want)
    assert steps.mean() < 0.01, "but for ties that one bit decides"
    axes = tuple(i for i in range(num_stacked, x.ndim) if i != dim)  # of a row, which has blocks of its own
    most = np.abs(x).max(axes, keepdims=True).astype(float)
    assert np.all(np.abs(found - x) <= most * LARGEST_ERROR[kind] * 1.001 + 1e-30)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_not_finite_fills_its_block_alone(kind, bad):
    x = np.ones((3, 700), np.float32)  # blocks of 234
    x[1, 300] = bad
    y = np.asarray(unpacked_by(packed_by(x, 0, 0, kind), 700, kind))
    assert np.isnan(y[1, 234:468]).all()
    assert np.isfinite(np.delete(y, np.s_[234:468], axis=1)).all()
    assert np.isfinite(y[0]).all()


def test_denormals_round_to_zero():
    x = np.array([[1e-38, -1e-40, 3e-31, 0.0]], np.float32)
    np.testing.assert_array_equal(unpacked_by(packed_by(x, 0, 0, "int8"), 4, "int8"), np.zeros((1, 4)))


@few
@given(arrays(), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
def test_rounding_again_changes_no_bit(drawn, dtype):
    """So frozen parameters move in natural shape, to other layouts and checkpoints, and are the same integers there."""
    x, dim, num_stacked = drawn
    x = jnp.asarray(np.clip(x, -6e4, 6e4), dtype)  # what fp16 can hold
    shape = x.shape
    cut = Cut(dim, shape, 1, num_stacked=num_stacked).in_blocks("int8", dtype, {})
    store, load = jax.jit(cut.to_stored), jax.jit(cut.to_natural)
    once = store(x)
    values = load(once)
    if dtype == jnp.float16:  # its smallest numbers have too few bits for that
        values = load(store(values))
    np.testing.assert_array_equal(load(store(values)), values)
    if dtype != jnp.float16:
        np.testing.assert_array_equal(store(values), once)
