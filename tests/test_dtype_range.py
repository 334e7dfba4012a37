"""Numbers that a dtype does not hold are refused by whatever writes a leaf, and those that fit are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import jzero
from jzero.core.layout.casts import describe_misfit
from tests import shared


@pytest.mark.parametrize(
    ("values", "dtype", "fits"),
    [
        ([-128, 127], "int8", True),
        ([3, 300], "int8", False),
        ([-1], "uint32", False),
        ([7], "int4", True),
        ([8], "int4", False),
        ([2.0], "int32", True),
        ([1.5], "int32", False),
        ([np.nan], "int32", False),
        ([3e9], "int32", False),
        ([65504.0, np.inf, np.nan], "float16", True),
        ([1e5], "float16", False),
        ([70000], "float16", False),
        ([500.0], "float8_e4m3fn", False),
        ([1], "float32", True),
        ([1.0], "complex64", True),
        ([1j], "float32", False),
        ([True], "float32", False),
        ([1], "bool", False),
        ([], "int8", True),
    ],
)
def test_what_fits(values, dtype, fits):
    assert (describe_misfit(np.asarray(values), jnp.dtype(dtype)) == "") == fits
    assert (describe_misfit(jnp.asarray(values), jnp.dtype(dtype)) == "") == fits


def make_state(value, dtype):
    """A padded leaf that is not trained, and one that is."""
    params = {"q": jnp.full((5, 3), value, dtype), "w": jnp.ones((16, 8))}
    return shared.sharded(params, optax.sgd(0.1), 3, trainable="w")


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (np.full((5, 3), 300, np.int32), "int8", "int32 numbers from .* to 300, and int8"),
        (np.full((5, 3), 5 * 10**9), "int32", "int64 numbers from .* to 5000000000, and int32"),
        (np.full((5, 3), 1e5, np.float32), "float16", "float32 numbers such as 100000, which float16"),
    ],
)
def test_files_are_refused(there, here, said, tmp_path):
    save_file({"q": there}, tmp_path / "q.safetensors")
    with pytest.raises(ValueError, match=rf"params/q.*{said}"):
        jzero.load_params(make_state(0, here), tmp_path / "q.safetensors", paths="q")


def test_states_are_refused():
    plain = jzero.TrainState.create(params={"w": jnp.ones(8)}, tx=optax.sgd(0.1))
    plain = plain.replace(step=np.int64(5 * 10**9))
    with pytest.raises(ValueError, match=r"step holds int64 .*5000000000"):
        jzero.shard_train_state(plain, stage=1)


@pytest.mark.parametrize("value", [None, 1j, True, "1", 300, 1.5, np.nan, jnp.int32(-129)], ids=repr)
def test_values_are_refused(value):
    plain = jzero.TrainState.create(params={"q": jnp.int8(0), "w": jnp.ones(8)}, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(plain, stage=1, trainable="w")
    with pytest.raises((TypeError, ValueError), match=r"`value`.*'q'"):
        jzero.set_full_param(state, "q", value=value)
    edited = jzero.set_full_param(state, "q", value=np.float32(-128))
    assert int(edited.params["q"]) == -128


def test_keys_are_written_as_keys():
    plain = jzero.TrainState.create(params={"k": jax.random.key(0), "w": jnp.ones(8)}, tx=optax.sgd(0.1))
    tx = optax.masked(plain.tx, {"k": False, "w": True})
    state = jzero.shard_train_state(plain.replace(tx=tx, opt_state=tx.init(plain.params)), stage=1, trainable="w")
    edited = jzero.set_full_param(state, "k", value=jax.random.key(7))
    assert (jax.random.key_data(edited.params["k"]) == jax.random.key_data(jax.random.key(7))).all()
    with pytest.raises(ValueError, match=r"'k' holds random keys.*uint32"):
        jzero.set_full_param(state, "k", value=np.uint32(7))
