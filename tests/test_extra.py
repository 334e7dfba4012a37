"""`TrainState.extra`: averages, coefficients and random keys beside the parameters, trained, saved and restored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

D, V, B = 36, 61, 24
DECAY, RATE = 0.9, 0.1
SGD = optax.sgd(RATE)


def make_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 6, jnp.float32)
    return {"embed": draw(V, D), "layers": {"w": draw(2, D, D)}}


def make_state(_=None):
    params = make_params()
    extra = {"averages": [params, jax.tree.map(jnp.zeros_like, params)], "weight": jnp.float32(2.0)}
    return jzero.TrainState.create(params=params, tx=SGD, extra=extra | {"key": jax.random.key(3)})


def sharded(state, num_devices=8, stage=3):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    return jzero.shard_train_state(state, config=config, mesh=jzero.make_mesh(devices=jax.devices()[:num_devices]))


def loss_fn(params, batch, extra):
    x = params["embed"][batch]
    for i in range(2):
        x = jnp.tanh(x @ params["layers"]["w"][i])
    return extra["weight"] * jnp.square(x - 0.3).mean(), {"extra": extra | {"weight": extra["weight"] * 0.5}}


STEP = jzero.make_train_step(loss_fn, has_aux=True, mutable=("extra",))


@jax.jit
def averaged(state):
    """As a user writes it: on whatever the state holds, shards included."""
    mean = lambda m, p: DECAY * m + (1 - DECAY) * p
    averages = [jax.tree.map(mean, tree, state.params) for tree in state.extra["averages"]]
    return state.replace(extra=state.extra | {"averages": averages})


grad = jax.jit(jax.grad(loss_fn, has_aux=True))


@pytest.mark.smoke
@pytest.mark.parametrize(("num_devices", "stage"), [(8, 3), (3, 1)])
def test_losses_and_loops_change_it(num_devices, stage):
    """As on one device, without jzero; copies of the parameters are cut as those are."""
    state = sharded(make_state(), num_devices, stage)
    batch = np.random.default_rng(1).integers(V, size=B)
    params, (fast, slow), weight = make_params(), make_state().extra["averages"], 2.0
    mean = lambda m, p: DECAY * m + (1 - DECAY) * p
    for _ in range(2):
        state = averaged(STEP(state, batch)[0])
        grads = grad(params, batch, {"weight": weight})[0]
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        fast, slow, weight = jax.tree.map(mean, fast, params), jax.tree.map(mean, slow, params), weight / 2
    part = lambda x: x.addressable_shards[0].data.shape
    for average in state.extra["averages"]:
        assert jax.tree.map(part, average) == jax.tree.map(part, state.params if stage == 3 else params)
    whole = jzero.unshard_train_state(state)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, whole.params, params)
    jax.tree.map(close, whole.extra["averages"], [fast, slow])
    assert float(whole.extra["weight"]) == weight
    assert (jax.random.key_data(whole.extra["key"]) == jax.random.key_data(jax.random.key(3))).all()


def test_it_is_saved_and_restored_elsewhere(tmp_path):
    """On other devices at another stage, to the bit; `init_train_state` makes it in shards."""
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    state = jzero.init_train_state(make_state, jax.random.key(0), config=config)
    assert state.extra["averages"][1]["layers"]["w"].addressable_shards[0].data.shape != (2, D, D)
    state, _ = STEP(state, np.arange(B))
    jzero.save_checkpoint(f"{tmp_path}/saved", state)
    restored = jzero.restore_checkpoint(f"{tmp_path}/saved", sharded(make_state(), 3, 1))
    whole, want = jzero.unshard_train_state(restored), jzero.unshard_train_state(state)
    numbers = lambda extra: {**extra, "key": jax.random.key_data(extra["key"])}
    jax.tree.map(np.testing.assert_array_equal, numbers(whole.extra), numbers(want.extra))
