"""Beside gradients: branches, keys, auxiliary values and constants."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from tests import engine_losses, shared
from tests.engine_losses import D


def test_devices_may_take_different_branches():
    """A collective inside a branch would hang; the predicate here differs between devices."""

    def loss_fn(p, batch):
        h = lax.cond(batch["flag"].sum() > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x * p["b"][None], batch["x"])
        return engine_losses.out(p, h, batch)

    def reference(p, batch):
        flag = batch["flag"][:, None] > 0
        return engine_losses.out(p, jnp.where(flag, jnp.tanh(batch["x"] @ p["w"]), batch["x"] * p["b"][None]), batch)

    batch = {**engine_losses.batch(), "flag": np.repeat(np.arange(8) % 2, 3).astype(np.float32)}
    want = jax.jit(jax.value_and_grad(reference))(engine_losses.params(), batch)
    engine_losses.assert_equal(engine_losses.sharded(3, 8), loss_fn, batch, want=want, check_rows=False)


def test_dropout_key_is_folded_with_the_device():
    state = shared.sharded({"w": jnp.ones(D)}, optax.sgd(1.0), 1)

    def loss_fn(params, batch, rng):
        out = jax.random.normal(rng, batch.shape) * params["w"][None]
        return jnp.square(out).mean(), jzero.PerExample(out)

    key = jax.random.key(7)
    (_, out), _ = jzero.value_and_grad(loss_fn, has_aux=True)(state, np.ones((8, D), np.float32), rng=key)
    want = [jax.random.normal(jax.random.fold_in(key, i), (1, D))[0] for i in range(8)]
    np.testing.assert_allclose(out, np.stack(want), rtol=1e-6)


def test_auxiliary_values_are_reduced_as_they_say():
    """Averages come back in their dtype, sums in one that holds them; a mark around a tree is one around each leaf."""

    def loss_fn(p, batch):
        out = batch["x"] @ p["w"]
        means = {"f16": jnp.float16(20000), "bf16": jnp.bfloat16(3e38), "e4m3": jnp.float8_e4m3fn(288)}
        sums = {"u8": jnp.uint8(200), "i8": [jnp.int8(-100)], "bool": jnp.bool_(True), "f16": jnp.float16(20000)}
        aux = {"mean": out.mean(), "count": jzero.Summed((out > 0).sum()), "rows": jzero.PerExample(out.sum(1))}
        return jnp.square(out).mean(), {**aux, "means": means, "sums": jzero.Summed(sums), "none": jzero.Summed(None)}

    batch = engine_losses.batch()
    out = batch["x"] @ np.asarray(engine_losses.params()["w"])
    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=3)
    _, metrics = step(jzero.shard_train_state(engine_losses.sharded(3, 8), stage=3), batch)
    aux = metrics["aux"]
    np.testing.assert_allclose(aux["mean"], out.mean(), rtol=1e-4, atol=1e-6)
    assert int(aux["count"]) == int((out > 0).sum())
    np.testing.assert_allclose(aux["rows"], out.sum(1), rtol=1e-4, atol=1e-5)
    assert {k: (str(x.dtype), float(x)) for k, x in aux["means"].items()} == {
        "f16": ("float16", 20000),
        "bf16": ("bfloat16", float(jnp.bfloat16(3e38))),
        "e4m3": ("float8_e4m3fn", 288),
    }
    assert jax.tree.map(float, aux["sums"]) == {"u8": 24 * 200, "i8": [-2400], "bool": 24, "f16": 24 * 20000}
    assert aux["none"] is None


def test_the_key_of_a_loss_is_asked_for_and_refused_by_name():
    state = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(state, stage=1)
    batch, key = jnp.ones((8, 8)), jax.random.key(0)

    def noisy(params, batch, rng):
        return (batch @ params["w"] + jax.random.normal(rng, batch.shape)).mean()

    def scaled(params, batch, scale=2.0):
        return scale * (batch @ params["w"]).mean()

    def silent(params, batch):
        return (batch @ params["w"]).mean()

    value_and_grad = jzero.value_and_grad(noisy)
    assert jax.eval_shape(lambda: value_and_grad(state, batch, rng=key)[0]).shape == ()
    with pytest.raises(TypeError, match="third argument, 'rng'"):
        value_and_grad(state, batch)
    with pytest.raises(TypeError, match="the loss takes none"):
        jzero.value_and_grad(silent)(state, batch, rng=key)
    assert jzero.make_eval_step(lambda p, b, step=2: b.mean() * step)(state, batch) is not None
    fields = [lambda p, b, extra: b.mean(), lambda p, b, *, extra: b.mean(), lambda p, b, rng, extra: b.mean()]
    for loss, rngs in zip(fields, ({}, {}, {"rng": key}), strict=True):
        for make in (jzero.make_eval_step, jzero.value_and_grad):
            with pytest.raises(TypeError, match=rf"\['extra'\].*jzero.{make.__name__}\(..., mutable=\('extra',\)\)"):
                make(loss)(state, batch, **rngs)
    assert float(jzero.value_and_grad(scaled)(state, batch)[0]) == 16.0
    wrapped = functools.wraps(silent)(lambda *args: silent(*args[:2]))  # takes more than it says
    assert jax.eval_shape(lambda: jzero.value_and_grad(wrapped)(state, batch, rng=key)[0]).shape == ()


# Constants that a loss returns or writes: arrays of their dtype, whatever kind of constant and wherever it goes.


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
    return shared.sharded({"w": jnp.ones((D, 7))}, shared.sgd(0.0), mesh=DEVICES, **fields)


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


def rolled(params, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_reference_of_stopped_parameters_is_gathered_layer_by_layer(stage):
    """As one whose result is stopped: no device gathers a stack that a scan runs over, which would warn."""

    def loss_fn(params, batch):
        fixed = lax.stop_gradient(params)
        gain = rolled(params, batch) * rolled(fixed, 1 - batch)
        return jnp.square(gain + params["b"][None] * fixed["b"][None]).mean()

    draw = np.random.default_rng(0).normal
    params = {"stack": draw(size=(3, 27, 27)).astype(np.float32) / 5, "b": draw(size=27).astype(np.float32)}
    batch = draw(size=(16, 27)).astype(np.float32)
    want, grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    state = shared.sharded(params, shared.sgd(1.0), stage)
    step = jzero.make_train_step(loss_fn)
    if stage == 3:
        gathers = [x for x in jzero.analyze(step, state, batch).collectives if x.kind == "all-gather" and not x.in_loop]
        assert sum(x.elements for x in gathers) < params["stack"].size
    new, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    got = jzero.gather_params(new)
    jax.tree.map(lambda p, a, g: np.testing.assert_allclose(p - a, g, atol=2e-6), params, got, grads)
