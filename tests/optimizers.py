"""Every optimizer that jzero promises equal numbers for, and the ways of running one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero
from tests import models, shared

STEPS = 20
ROWS = 120  # divisible by 1, 2, 3, 5 and 8


def _is_matrix(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def _labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim >= 2 else "vector", params)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-3, eps=1e-6),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "sgd_momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "lamb": lambda: optax.lamb(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3)),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, STEPS)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3, weight_decay=0.1),
    "masked": lambda: optax.chain(optax.adam(1e-3), optax.masked(optax.add_decayed_weights(-1e-4), _is_matrix)),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-3), "vector": optax.sgd(0.1)}, _labels),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=3),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
}


def _by_layer(params):
    return {name: jax.tree.map(lambda _, name=name: name, layer) for name, layer in params.items()}


def _for_each_layer(**names):
    return optax.multi_transform({layer: OPTIMIZERS[name]() for layer, name in names.items()}, _by_layer)


# Several in one step; the model "mlp" has three layers.
TOGETHER = {
    "one_per_layer": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), _for_each_layer(layer_0="adafactor", layer_1="muon", layer_2="lamb")
    ),
    "every_third_step": lambda: optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(0.5),
            _for_each_layer(layer_0="adafactor", layer_1="lamb"),
            optax.inject_hyperparams(optax.scale)(step_size=0.7),
        ),
        3,
    ),
}


class Run(NamedTuple):
    losses: np.ndarray
    params: Any


@functools.cache
def problem(model: str, dtype: str) -> tuple[Any, Any, list[Any]]:
    """Returns `(params, loss_fn, batches)` of a named model."""
    sizes = {"mlp": models.MLP_SIZES, "two layers": models.TWO_LAYERS, "one layer": models.ONE_LAYER}[model]
    params = models.mlp_params(jnp.dtype(dtype), sizes)
    return params, models.mlp_loss, [models.mlp_batch(ROWS, seed, np.dtype(dtype)) for seed in range(STEPS)]


def _host(tree):
    return jax.tree.map(np.asarray, tree)


@functools.cache
def run_plain(model: str, optimizer: str, dtype: str, slices: int = 1) -> Run:
    """One device and plain optax; the gradient of the whole batch, or the mean over `slices` parts of it."""
    params, loss_fn, batches = problem(model, dtype)
    state = TrainState.create(apply_fn=None, params=params, tx=(OPTIMIZERS | TOGETHER)[optimizer]())

    @jax.jit
    def step(state, batch):
        parts = jax.tree.map(lambda x: x.reshape(slices, -1, *x.shape[1:]), batch)
        each = jax.lax.map(lambda part: jax.value_and_grad(loss_fn)(state.params, part), parts)
        loss, grads = jax.tree.map(lambda x: x.sum(0) / slices, each)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return Run(np.array(losses), _host(state.params))


def run_zero(model: str, optimizer: str, dtype: str, stage: int, num_devices: int) -> Run:
    """The same training with jzero on `num_devices` devices."""
    params, loss_fn, batches = problem(model, dtype)
    state = TrainState.create(apply_fn=None, params=params, tx=(OPTIMIZERS | TOGETHER)[optimizer]())
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices])
    state = jzero.shard_train_state(state, config=shared.config(stage), mesh=mesh)
    state, losses = shared.train(jzero.make_train_step(loss_fn), state, batches)
    return Run(np.array(losses), _host(jzero.gather_params(state)))


def deviation(a: Run, b: Run) -> tuple[float, float]:
    """Returns the largest relative deviation of the losses and the largest absolute one of the parameters."""
    loss = float(np.max(np.abs(a.losses - b.losses) / np.abs(b.losses)))
    leaves = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return loss, max(float(np.max(np.abs(x - y))) for x, y in leaves)
