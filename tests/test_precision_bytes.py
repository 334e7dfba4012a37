"""Bytes of mixed precision by ZeRO's table, and policies that hold less than fp32 between steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.layout.casts import positions_of, round_stochastically
from tests import models
from tests.drawn import to_jax
from tests.precision_states import BF16, ROWS, assert_same, make_config, mlp_state, step_of


def large_state(layers=4, d=256, vocab=8192):
    """Abstract; sizes as of a decoder, so that biases and norms weigh what they do in one."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    block = {
        "qkv": shape(d, 3 * d),
        "out": shape(d, d),
        "up": shape(d, 4 * d),
        "down": shape(4 * d, d),
        "norm": shape(d),
    }
    params = {"embed": shape(vocab, d), **{f"layer_{i}": block for i in range(layers)}}
    return jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=optax.adamw(1e-3)), params)


def psi(state):
    return sum(x.size for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("num_devices", [8, 64])
def test_bytes_of_zeros_table(num_devices):
    """16-bit parameters and gradients, fp32 master, momentum, variance: 2Ψ, 2Ψ, 12Ψ with ZeRO's divisions.

    At stage 3 the masters are the parameters: 12Ψ/N for both, and 2Ψ/N of gradients.
    """
    state, n = large_state(), num_devices
    mesh = jax.sharding.AbstractMesh((n,), ("data",))
    size = psi(state)
    wants = [(2, 2, 12), (2, 2, 12 / n), (2, 2 / n, 12 / n), (4 / n, 2 / n, 8 / n)]
    for stage, want in enumerate(wants):
        have = jzero.plan_train_state(state, config=make_config(stage), mesh=mesh).bytes_per_device
        for term, bytes_per_param in zip(have, want, strict=True):
            assert term == pytest.approx(bytes_per_param * size, rel=0.02)
        assert have.total == pytest.approx(sum(want) * size, rel=0.02)


def test_stochastic_rounding_is_fair_and_exact_where_it_can_be():
    x = jnp.full((1 << 16,), 1.0 + 2.0**-9)  # a quarter of the way to the next bf16 above 1
    rounding = jax.jit(lambda x, key: round_stochastically(x, key, positions_of(x.shape)))
    rounded = np.asarray(rounding(x, jax.random.key(0)), np.float32)
    assert set(np.unique(rounded)) == {1.0, 1.0 + 2.0**-7}
    # Mean of 65536 draws of a coin with p = 1/4: standard error 1.3e-5.
    assert abs(float(rounded.mean()) - (1 + 2.0**-9)) < 6e-5
    special = jnp.array([0.0, -0.0, 1.0, -2.5, jnp.inf, -jnp.inf, 3.3895314e38])
    np.testing.assert_array_equal(np.asarray(rounding(special, jax.random.key(1)), np.float32), special)
    assert np.isnan(rounding(jnp.array([jnp.nan]), jax.random.key(1))[0])


def test_small_updates_are_not_lost():
    """Updates of a 2^-10 part of a weight vanish when rounded to nearest; stochastically they add up."""
    params = {"w": np.ones((64, 64), np.float32)}
    loss = lambda p, batch: (p["w"].astype(jnp.float32) * batch.mean()).sum()
    config = make_config(3, jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16"))
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(2.0**-10)), config=config)
    step = jzero.make_train_step(loss)
    for _ in range(64):
        state, _ = step(state, np.ones(8, np.float32))
    mean = np.asarray(jzero.gather_params(state)["w"], np.float32).mean()
    assert mean == pytest.approx(1 - 64 * 2.0**-10, abs=2e-3)


def test_state_dtype_by_path():
    rules = {"layer_0/kernel": jzero.LeafRule(state_dtype="bfloat16")}
    state = mlp_state(make_config(2, rules=rules))
    after, _ = jax.eval_shape(step_of(models.mlp_loss), state, models.mlp_batch(ROWS))
    for nu in (state.opt_state.inner[0].nu, after.opt_state.inner[0].nu):
        assert nu["layer_0"]["kernel"].dtype == BF16
        assert nu["layer_0"]["bias"].dtype == jnp.float32


@pytest.mark.parametrize(("dtype", "stage", "offload"), [("float8_e4m3fn", 1, "none"), ("float8_e5m2", 3, "host")])
def test_parameters_of_8_bits_train_as_optax_trains_them(dtype, stage, offload):
    """Gradients of 300 on each device: a sum of eight leaves the range of e4m3, 448, if it is taken in 8 bits."""
    params = {"w": to_jax(np.linspace(-1, 1, 16 * 13, dtype=np.float32).reshape(16, 13), dtype)}
    loss_fn = lambda params, batch: 300 * (params["w"].astype(jnp.float32).sum() * batch.mean())
    tx, batch = optax.sgd(1e-3, momentum=0.5), np.ones((16, 1), np.float32)
    plain = jzero.TrainState.create(params=params, tx=tx)
    config = make_config(stage, "fp32", offload=jzero.Offload(optimizer=offload))
    state = jzero.shard_train_state(plain, config=config)
    step = jzero.make_train_step(loss_fn, accumulate_steps=2 if offload == "none" else 1)
    # Compilers for CPUs add 8-bit numbers in wider ones by themselves, so that results alone would not tell.
    text = step.lower(state, batch).as_text()
    reduced = re.findall(r'"?stablehlo\.reduce_scatter"?\(.*?-> tensor<([^>]*)>', text, flags=re.DOTALL)
    assert [shape.rpartition("x")[2] for shape in reduced] == ["f32"]
    plain_step = jax.jit(lambda plain: plain.apply_gradients(grads=jax.grad(loss_fn)(plain.params, batch)))
    for _ in range(2):
        plain = plain_step(plain)
        state, _ = step(state, batch)
    assert state.params["w"].dtype == dtype
    assert_same(jzero.unshard_train_state(state).params, plain.params)
