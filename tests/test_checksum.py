"""Checksums of arrays, against sums written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from jzero.checkpoint import checksum
from tests.checkpoint_states import (
    sharded,
)
from tests.tiers import singles


def murmur_mix(h):
    """The finalizer of MurmurHash3 as published, in whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_checksums_tell_what_sums_would_not():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    swapped = x.copy()
    swapped[:8], swapped[8:16] = x[8:16], x[:8]
    others = [-x, swapped, x[::-1], np.zeros_like(x), x.T.copy(), np.where(x > 0, -x, x)]
    assert len({checksum.host_checksum(np.ascontiguousarray(y)) for y in [x, *others]}) == 7


@singles(
    dtype=["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint16", "int32", "bool", "complex64", "int4"],
    layout=[(8, 3), (3, 3), (8, 0), (5, 1)],
)
def test_checksums_do_not_depend_on_the_layout(dtype, layout):
    """Against a sum written out by hand, with numpy, over the natural array."""
    num, stage = layout
    numbers = np.random.default_rng(0).integers(-8 if "u" not in dtype[:1] else 0, 8, size=(17, 5, 9))
    params = {"x": jnp.asarray(numbers).astype(dtype), "y": jnp.asarray(numbers[:16]).astype(dtype)}
    state = sharded(jzero.TrainState.create(params=params, tx=optax.identity()), stage, num)
    leaves = jax.tree.leaves(state.params)
    cuts = [leaf.param.cut for leaf in jzero.plan_of(state).leaves]
    found = checksum.checksums(leaves, cuts)
    for value, x in zip(found, params.values(), strict=True):
        raw = np.asarray(x)
        if dtype == "int4":
            words = [int(v) % 16 for v in raw.reshape(-1).astype(int)]
        else:
            words = np.frombuffer(raw.tobytes(), f"uint{min(32, 8 * raw.dtype.itemsize)}").tolist()
        assert value == sum(murmur_mix(w ^ (i * 0x9E3779B1 % 2**32)) for i, w in enumerate(words)) % 2**32
        assert checksum.host_checksum(raw) == value
