"""Loops of one's own: micro-batches, updates in one program, and batches that change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.step.inputs import place_inputs
from tests import engine_losses, shared
from tests.engine_losses import D, plain


def test_accumulated_micro_batches_equal_the_whole_batch():
    batch = engine_losses.batch(rows=48)
    step = jzero.make_train_step(plain, accumulate_steps=3, clip_norm=0.1)
    state = engine_losses.sharded(2, 8)
    new, metrics = step(jzero.shard_train_state(state, config=jzero.plan_of(state).config), batch)

    @jax.jit
    def reference(params, batch):
        loss, grads = jax.value_and_grad(plain)(params, batch)
        norm = optax.tree.norm(grads)
        return loss, norm, jax.tree.map(lambda p, g: p - 0.1 / (norm + 1e-6) * g, params, grads)

    loss, norm, want = reference(engine_losses.params(), batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=2e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), jzero.gather_params(new), want)


def test_two_updates_of_parameters_held_whole_keep_their_layout():
    """Were the sums not laid out that optax makes, the compiler would return parameters cut as their gradients are."""
    plain = jzero.TrainState.create(params={"w": jnp.ones((D, D))}, tx=optax.adam(1e-2))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=1, persistence_threshold=0))
    loss = lambda p, x: jnp.square(x @ p["w"]).mean()

    @jax.jit
    def two_steps(state, x):
        for _ in range(2):
            state = state.apply_gradients(grads=jax.grad(loss)(state.params, x))
        return state

    assert two_steps(state, engine_losses.batch()["x"]).params["w"].sharding.is_fully_replicated


@pytest.mark.slow
def test_each_call_takes_its_own_batch_whatever_the_last_one_was_like():
    """A batch that is like the last one is not looked at; one that differs in anything is."""
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=shared.sgd(0.0))
    state = jzero.shard_train_state(state, stage=1)
    plan = jzero.plan_of(state)
    loss = lambda p, batch, rng=None: (batch["x"] @ p["w"]).mean() + batch.get("more", 0.0)
    train = jzero.make_train_step(loss)

    def call(batch, **kwargs):
        nonlocal state
        state, metrics = train(state, batch, **kwargs)
        return float(metrics["loss"])

    numpy = lambda value, rows=16: {"x": np.full((rows, 8), value, np.float32)}
    on_mesh = lambda *args: jax.device_put(numpy(*args), plan.batch_sharding)
    elsewhere = lambda *args: jax.device_put(numpy(*args), jax.devices()[0])
    for i, make in enumerate([on_mesh, on_mesh, numpy, on_mesh, elsewhere, on_mesh, numpy, numpy, on_mesh, on_mesh]):
        assert call(make(i)) == i
        assert call(make(-i, 8 * (1 + i % 2))) == -i
    key = jax.random.key(0)
    for rng in (None, key, key, jax.device_put(key, plan.whole_sharding), None):
        assert call(on_mesh(2), rng=rng) == 2
    for more in (1.0, 3.0):
        assert call({**on_mesh(2), "more": jnp.float32(more)}) == 2 + more
        assert call({**on_mesh(2), "more": jax.device_put(jnp.float32(more), plan.whole_sharding)}) == 2 + more
    assert call(on_mesh(5)) == 5
    assert call(elsewhere(7)) == 7
    with pytest.raises(ValueError, match=r"must be divisible by 8"):
        call(elsewhere(5, 12))
    with pytest.raises(TypeError, match=r"x/0: float"):
        call({"x": [1.0, 2.0]})
    with pytest.raises(TypeError, match=r"x: float"):
        call({"x": 1.0})
    assert call(on_mesh(6)) == 6


def test_a_batch_that_is_overwritten_after_the_call_does_not_change_on_the_devices():
    """Memory that begins at a multiple of 64 bytes is what jax would use where it lies."""
    memory = np.ones(8 * 64 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    batch = memory[start : start + 8 * 64].reshape(8, 64)
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=shared.sgd(0.0))
    plan = jzero.plan_of(jzero.shard_train_state(state, stage=1))
    placed, _, in_place = place_inputs(plan, {"x": batch}, None, 1)
    jax.block_until_ready(placed)
    memory[:] = 7
    assert not in_place
    assert np.all(np.asarray(placed["x"]) == 1)


def test_a_batch_too_small_for_micro_batches_is_refused_after_one_that_fits():
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=shared.sgd(0.0))
    state = jzero.shard_train_state(state, stage=1)
    step = jzero.make_train_step(lambda p, x: (x @ p["w"]).mean(), accumulate_steps=2)
    rows = lambda n: jax.device_put(np.ones((n, 8), np.float32), jzero.plan_of(state).batch_sharding)
    for _ in range(2):
        state, _ = step(state, rows(16))
    with pytest.raises(ValueError, match=r"divisible by 16 .* x accumulate_steps=2"):
        step(state, rows(8))


@pytest.mark.filterwarnings("error")
def test_a_scan_over_each_devices_part_of_a_constant_gathers_nothing():
    """No warning says that it does: the stack is not made of parameters."""

    def loss_fn(params, batch):
        part = lax.dynamic_slice_in_dim(jnp.arange(8.0), lax.axis_index("data") * 4, 4)
        return batch.mean() * params["w"].sum() + lax.scan(lambda c, x: (c + x, None), 0.0, part)[0]

    state = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
    mesh = jzero.make_mesh(devices=jax.devices()[:2])
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(persistence_threshold=0), mesh=mesh)
    assert jzero.value_and_grad(loss_fn)(state, jnp.ones((2, 2)))[0] == 64 + sum(range(8)) / 2
