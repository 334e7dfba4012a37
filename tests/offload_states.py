"""States whose optimizer state is on the host, trained and compared to the last bits."""

import functools

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero
from tests import models, optimizers, shared
from tests.checkpoint_states import arrays

ONE_LAYER = models.ONE_LAYER
HOST = jzero.Offload(optimizer="host")
SMALL = jzero.Offload(optimizer="host", chunk_bytes=2048)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def config(stage, precision="fp32", offload=HOST, **options):
    options = {"persistence_threshold": 50, "padding_threshold": 0} | options
    return jzero.ZeroConfig(stage=stage, precision=precision, offload=offload, **options)


ADAMW = optax.adamw(1e-2)


step_of = functools.partial(shared.make_train_step, models.mlp_loss)


def small_state(stage, precision="fp32", offload=HOST, tx=ADAMW, sizes=models.TWO_LAYERS, **options):
    """Of two layers, since each leaf is several programs."""
    state = jzero.TrainState.create(params=models.mlp_params(sizes=sizes), tx=tx)
    return jzero.shard_train_state(state, config=config(stage, precision, offload, **options))


def train(state, steps=3, **options):
    return shared.train(step_of(**options), state, [models.mlp_batch(48, seed=i) for i in range(steps)])


def whole(state):
    """Masters and moments, whole and natural."""
    plain = jzero.unshard_train_state(state)
    return {**arrays(plain.params), **arrays(plain.opt_state)}


def assert_close(found, expected, ulps):
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_max_ulp(found[path] + np.float32(1), x + np.float32(1), maxulp=ulps)


def deviation_from_optax(optimizer, offload, model="two layers"):
    """Trains 20 steps in float64 at stage 3; returns the largest deviation from optax on one device, and the state."""
    params, loss_fn, batches = optimizers.problem(model, "float64")
    tx = (optimizers.OPTIMIZERS | optimizers.TOGETHER)[optimizer]()
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0, offload=offload))
    state, losses = shared.train(jzero.make_train_step(loss_fn), state, batches)
    run = optimizers.Run(np.array(losses), jax.tree.map(np.asarray, jzero.gather_params(state)))
    return max(optimizers.deviation(run, optimizers.run_plain(model, optimizer, "float64"))), state
