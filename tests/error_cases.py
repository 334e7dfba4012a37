"""What errors are asked of: a sharded state, its loss, and the parts of a message."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero

EVERYTHING = jzero.ZeroConfig(stage=3, persistence_threshold=0)
ADAM = optax.adam(1e-2)
BATCH = np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32)


def plain_state():
    params = {"dense": {"w": jnp.linspace(-1, 1, 32 * 24).reshape(32, 24), "b": jnp.ones(24)}}
    return jzero.TrainState.create(params=params, tx=ADAM)


def sharded_state(mesh=None, config=EVERYTHING):
    return jzero.shard_train_state(plain_state(), config=config, mesh=mesh)


def loss_fn(params, batch):
    return jnp.square(batch @ params["dense"]["w"] + params["dense"]["b"][None]).mean()


@contextlib.contextmanager
def raises(error, *parts):
    """Expects an error whose message holds each of `parts`."""
    with pytest.raises(error) as caught:
        yield caught
    for part in parts:
        assert part in str(caught.value)


@contextlib.contextmanager
def leaves_intact(state):
    """Checks that the state is as good as before."""
    before = jax.tree.map(np.array, (state.params, state.opt_state, state.step))
    yield
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state, state.step), before)
