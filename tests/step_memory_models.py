"""Models whose step is small enough to count by hand, and what is estimated of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from tests import shared
from tests.drawn import to_jax

WIDTH, HIDDEN, LAYERS, ROWS = 64, 256, 6, 32
LOCAL = ROWS // 8
ADAM = optax.adam(1e-3)


def mlp_state(config, optimizer=None):
    params = {"up": jnp.ones((WIDTH, HIDDEN)), "down": jnp.ones((HIDDEN, WIDTH))}
    plain = jzero.TrainState.create(params=params, tx=optimizer or ADAM)
    return jzero.shard_train_state(plain, config=config)


def mlp_loss(params, x):
    return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]).mean()


def stack_state(config, optimizer=None):
    rng = np.random.default_rng(0)
    params = {
        "up": to_jax(rng.normal(size=(LAYERS, WIDTH, HIDDEN)) / 8, jnp.float32),
        "down": to_jax(rng.normal(size=(LAYERS, HIDDEN, WIDTH)) / 16, jnp.float32),
    }
    plain = jzero.TrainState.create(params=params, tx=optimizer or ADAM)
    return jzero.shard_train_state(plain, config=config)


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def stack_loss(params, x):
    return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()


BATCH = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


config_of = shared.config


def reckoned(loss, state, **options):
    return jzero.estimate_step_memory(jzero.make_train_step(loss, **options), state, BATCH)
