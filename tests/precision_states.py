"""States in mixed precision, trained and compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero
from tests import models

BF16 = jnp.bfloat16
ROWS = 24
LOW = jzero.Precision(compute_dtype="bfloat16", master_dtype="bfloat16", state_dtype="bfloat16")


mlp_params = functools.partial(models.mlp_params, sizes=models.ONE_LAYER)


def make_config(stage, precision="bf16", **options):
    return jzero.ZeroConfig(stage=stage, precision=precision, **{"persistence_threshold": 0, **options})


ADAMW = optax.adamw(1e-2)


def mlp_state(config, tx=ADAMW, params=None, **options):
    plain = TrainState.create(apply_fn=None, params=params or mlp_params(), tx=tx)
    return jzero.shard_train_state(plain, config=config, **options)


@functools.cache
def step_of(loss_fn):
    """Returns one step for all tests: of states with equal plans and one optimizer it compiles one program."""
    return jzero.make_train_step(loss_fn)


def train(state, num_steps=5, loss_fn=models.mlp_loss):
    losses = []
    for _ in range(num_steps):
        state, metrics = step_of(loss_fn)(state, models.mlp_batch(ROWS))
        losses.append(float(metrics["loss"]))
    return state, losses


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, host(a), host(b))
