"""Checksums of arrays, against sums written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.checkpoint import checksum
from tests.checkpoint_states import sharded


def murmur_mix(h):
    """The finalizer of MurmurHash3 as published, in whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


CASES = [("float32", 8, 3), ("bfloat16", 3, 3), ("uint16", 8, 0), ("int8", 5, 1), ("complex64", 5, 1), ("int4", 8, 3)]


@pytest.mark.parametrize(("dtype", "num", "stage"), CASES)
def test_checksums_do_not_depend_on_the_layout(dtype, num, stage, monkeypatch):
    """On the host and on the devices, against a sum written out by hand, with numpy, over the natural array."""
    numbers = np.random.default_rng(0).integers(-8 if "u" not in dtype[:1] else 0, 8, size=(17, 5, 9))
    params = {"x": jnp.asarray(numbers).astype(dtype), "y": jnp.asarray(numbers[:16]).astype(dtype)}
    state = sharded(jzero.TrainState.create(params=params, tx=optax.identity()), stage, num)
    leaves = jax.tree.leaves(state.params)
    stored = [(leaf.param.shape, leaf.param.cut) for leaf in jzero.plan_of(state).leaves]
    shapes = [shape if cut is None else cut.unpadded_shape for shape, cut in stored]
    on_host = checksum.checksums(leaves, shapes)
    monkeypatch.setattr(checksum, "is_on_cpu", lambda x: False)
    on_devices = checksum.checksums(leaves, shapes)
    for value, other, x in zip(on_host, on_devices, params.values(), strict=True):
        raw = np.asarray(x)
        if dtype == "int4":
            words = [int(v) % 16 for v in raw.reshape(-1).astype(int)]
        else:
            words = np.frombuffer(raw.tobytes(), f"uint{min(32, 8 * raw.dtype.itemsize)}").tolist()
        assert value == other == sum(murmur_mix(w ^ (i * 0x9E3779B1 % 2**32)) for i, w in enumerate(words)) % 2**32
        assert checksum.host_sum_of_part(raw, (0, 0, 0), raw.shape) == value


@pytest.mark.parametrize(
    ("dtype", "shape", "dim", "num"),
    [
        ("float32", (13001,), 0, 3),
        ("complex64", (70, 300), 0, 4),
        ("int8", (3, 9001), 1, 2),
        ("bfloat16", (20000, 7), 1, 2),
        ("bool", (2, 3, 20000), 2, 3),
    ],
)
def test_long_parts_are_summed_as_lines_of_consecutive_elements(dtype, shape, dim, num):
    """The shares of padded parts on devices and on the host, and of halves, against the sum over all words."""
    x = np.asarray(jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape)).astype(dtype))
    words = np.frombuffer(x.tobytes(), f"uint{min(32, 8 * x.dtype.itemsize)}").astype(np.uint64)
    places = np.arange(len(words), dtype=np.uint64) * 0x9E3779B1 % 2**32
    expected = int(murmur_mix(words ^ places).sum()) % 2**32
    size = -(-shape[dim] // num)
    total = on_host = 0
    for start in range(0, shape[dim], size):
        part = np.take(x, range(start, min(start + size, shape[dim])), dim)
        part = np.pad(part, [(0, size - n if d == dim else 0) for d, n in enumerate(part.shape)], constant_values=1)
        place = [start if d == dim else 0 for d in range(len(shape))]
        total += int(jax.jit(checksum.sum_of_part, static_argnums=2)(part, place, shape))
        on_host += checksum.host_sum_of_part(part, place, shape)
    assert total % 2**32 == on_host % 2**32 == expected
    flat, first = x.reshape(-1), x.size // 3
    halves = [checksum.host_sum_of_part(y, (at,), flat.shape) for at, y in ((0, flat[:first]), (first, flat[first:]))]
    assert sum(halves) % 2**32 == expected


def test_parts_of_two_cut_dimensions_are_summed():
    x = np.random.default_rng(0).standard_normal((5, 7, 3)).astype(np.float32)
    places = [(0, 0), (0, 4), (3, 0), (3, 4)]
    parts = [np.pad(x[a : a + 3, b : b + 4], [(0, a // 3), (0, b // 4), (0, 0)], constant_values=1) for a, b in places]
    sums = [checksum.host_sum_of_part(part, (*place, 0), x.shape) for part, place in zip(parts, places, strict=True)]
    assert sum(sums) % 2**32 == checksum.host_sum_of_part(x, (0, 0, 0), x.shape)
    assert checksum.host_sum_of_part(parts[0], (6, 0, 0), x.shape) == 0  # all of it padding
