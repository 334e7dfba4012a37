"""A small state with its optimizer state on disk, and its training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from tests import models
from tests.drawn import to_jax


def make_params(layers=1):
    rng = np.random.default_rng(0)
    draw = lambda *shape: to_jax(rng.normal(size=shape) / 8, jnp.float32)
    if layers == 1:
        return {"layer_1": {"kernel": draw(37, 11), "bias": draw(11)}}
    return {
        "layer_0": {"kernel": draw(37, 61), "bias": draw(61)},
        "layer_1": {"kernel": draw(61, 11), "bias": draw(11)},
    }


def loss_fn(params, batch):
    x = batch["x"]
    if "layer_0" in params:
        x = jnp.tanh(x @ params["layer_0"]["kernel"] + params["layer_0"]["bias"][None])
    return jnp.square(x @ params["layer_1"]["kernel"] + params["layer_1"]["bias"][None] - batch["y"]).mean()


ADAMW = optax.adamw(1e-2)


def two_devices():
    """The programs of a record are compiled for each device, so these tests use few."""
    return jzero.make_mesh(devices=jax.devices()[:2])


def state_on_disk(path, stage=3, precision="fp32", tx=None, mesh=None, layers=1, **offload):
    options = {"optimizer": "disk", "path": path, "chunk_bytes": 2048} | offload
    state = jzero.TrainState.create(params=make_params(layers), tx=tx or ADAMW)
    config = jzero.ZeroConfig(
        stage=stage,
        precision=precision,
        persistence_threshold=50,
        padding_threshold=0,
        offload=jzero.Offload(**options),
    )
    return jzero.shard_train_state(state, config=config, mesh=mesh or two_devices())


def in_memory(stage=3, precision="fp32", tx=None):
    return state_on_disk(None, stage, precision, tx, optimizer="host")


@functools.cache
def step_of(**options):
    """Returns one step for all tests: of states with equal plans and one optimizer it compiles one program."""
    return jzero.make_train_step(loss_fn, **options)


def train(state, steps=2, seed=0, **options):
    step, losses = step_of(**options), []
    for i in range(steps):
        state, metrics = step(state, models.mlp_batch(48, seed=seed + i))
        losses.append(float(metrics["loss"]))
    return state, losses


OPTIMIZERS = {
    "adamw": lambda: ADAMW,
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    # Not a ratio of sums, in which a factor of all of them cancels.
    "clipped steps": lambda: optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.5), optax.scale(-1e-2)),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2),  # sums over what is on disk, then the update
    "lars": lambda: optax.lars(1e-2),
    "prodigy": optax.contrib.prodigy,
    "momo": optax.contrib.momo,
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "masked": lambda: optax.masked(optax.adamw(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
}
