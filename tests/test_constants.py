"""Constants that a loss returns or writes: arrays of their dtype, whatever kind of constant and wherever it goes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jzero
from tests import shared

D, DEVICES, STEPS, ROWS = 5, 3, 2, 2
PARTS = DEVICES * STEPS
X = np.ones((PARTS * ROWS, D), np.float32)
CONSTANTS = {
    # name: (what the loss has, the dtype of a field that takes it)
    "bool": (True, "bool"),
    "int": (3, "int32"),
    "float": (1.5, "float32"),
    "complex": (1 + 2j, "complex64"),
    "int in a narrow field": (3, "int8"),
    "float in a narrow field": (1.5, "bfloat16"),
    "bool of NumPy": (np.True_, "bool"),
    "int8 of NumPy": (np.int8(3), "int8"),
    "int64 of NumPy": (np.int64(3), "int32"),  # jax has no 64 bits here
    "float16 of NumPy": (np.float16(1.5), "float16"),
    "float64 of NumPy": (np.float64(1.5), "float32"),
    "bfloat16 of NumPy": (ml_dtypes.bfloat16(1.5), "bfloat16"),
    "array of NumPy": (np.array([True, False]), "bool"),
    "bool of jax": (jnp.array(False), "bool"),
    "int of jax": (jnp.int32(3), "int32"),
    "bfloat16 of jax": (jnp.bfloat16(1.5), "bfloat16"),
    "array of jax": (jnp.arange(3), "int32"),
}
VALUES = {name: value for name, (value, _) in CONSTANTS.items()}
FLOATS = {name: x for name, x in VALUES.items() if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)}


def blank():
    return {name: jnp.full(jnp.shape(x), x != x, dtype) for name, (x, dtype) in CONSTANTS.items()}


def mean_square(params, x):
    return jnp.square(x @ params["w"]).mean()


def sharded(**fields):
    params = {"w": jnp.ones((D, 7))}
    plain = jzero.TrainState.create(params=params, tx=shared.sgd(0.0), **fields)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    return jzero.shard_train_state(plain, config=config, mesh=jzero.make_mesh(devices=jax.devices()[:DEVICES]))


def returned(x):
    rows = {name: jzero.PerExample(jnp.full((len(x), *jnp.shape(v)), v)) for name, v in VALUES.items()}
    return {"summed": {name: jzero.Summed(v) for name, v in VALUES.items()}, "rows": rows}


def check_written(fields):
    for name, (value, dtype) in CONSTANTS.items():
        assert fields[name].dtype == dtype, name
        np.testing.assert_array_equal(fields[name], value, err_msg=name)


def check_returned(found, parts):
    for name, value in VALUES.items():
        np.testing.assert_allclose(found["summed"][name], parts * np.asarray(value), rtol=1e-6, err_msg=name)
        rows = found["rows"][name]
        assert rows.dtype == jnp.asarray(value).dtype, name
        np.testing.assert_array_equal(rows, np.broadcast_to(value, (len(X), *np.shape(value))), err_msg=name)


def test_constants_of_a_training_step():
    def loss(params, x, extra):
        return jzero.Weighted(3 * mean_square(params, x), 3), {"extra": VALUES, "means": FLOATS, **returned(x)}

    step = jzero.make_train_step(loss, has_aux=True, mutable=("extra",), accumulate_steps=STEPS)
    state, metrics = step(sharded(extra=blank()), X)
    check_written(state.extra)
    check_returned(metrics["aux"], PARTS)
    np.testing.assert_allclose(metrics["loss"], D**2, rtol=1e-6)
    for name, value in FLOATS.items():
        mean = metrics["aux"]["means"][name]
        assert (mean.dtype, float(mean)) == (jnp.asarray(value).dtype, 1.5), name
