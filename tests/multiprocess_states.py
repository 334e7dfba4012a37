"""What two processes train, and the numbers that one process compares with."""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from tests import models

NUM_PROCESSES, DEVICES_PER_PROCESS = 2, 2
NUM_STEPS, ROWS = 3, 24
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))  # one, so that steps are compiled once
LAMB = optax.lamb(1e-2)


def message(attempt: Any) -> str:
    """Returns what an attempt that must fail says."""
    try:
        attempt()
    except (TypeError, ValueError, jzero.CheckpointError) as error:
        return str(error)
    raise AssertionError("it did not fail")


def whole(state: Any) -> dict[str, str]:
    """Returns a digest of the bits of each parameter."""
    return {
        leaf.path: hashlib.sha256(np.asarray(jzero.get_full_param(state, leaf.path)).tobytes()).hexdigest()
        for leaf in jzero.plan_of(state).leaves
    }


def config(stage: int) -> jzero.ZeroConfig:
    return jzero.ZeroConfig(stage=stage, persistence_threshold=50, padding_threshold=0)


def mesh() -> jax.sharding.Mesh:
    """Returns a mesh of as many devices as the processes have, also in one process that has more."""
    return jzero.make_mesh(devices=jax.devices()[: NUM_PROCESSES * DEVICES_PER_PROCESS])


def sharded(state: jzero.TrainState, config: jzero.ZeroConfig) -> Any:
    return jzero.shard_train_state(state, config=config, mesh=mesh())


def make_state(key: jax.Array) -> jzero.TrainState:
    """Makes two sharded kernels, one along each dimension, a sharded vector and one that is kept whole."""
    size, hidden, last = models.MLP_SIZES[0], models.MLP_SIZES[1], models.MLP_SIZES[-1]  # four divides none
    rng = np.random.default_rng(0)
    layer = {
        "kernel": np.float32(rng.normal(size=(size, hidden)) / np.sqrt(size)),
        "bias": np.float32(rng.normal(size=hidden) / 10),
    }
    out = np.float32(rng.normal(size=(hidden, last)) / np.sqrt(hidden))
    params = {"layer_0": layer, "layer_1": {"kernel": out}, "shift": jax.random.normal(key, (size,)) / 10}
    return jzero.TrainState.create(params=params, tx=TX)


def make_pair(tx: optax.GradientTransformation = TX) -> jzero.TrainState:
    """Makes a sharded kernel and a vector that is kept whole: each leaf of records is several programs."""
    size, hidden = models.MLP_SIZES[:2]
    kernel = np.random.default_rng(0).normal(size=(size, hidden)) / np.sqrt(size)
    params = {"kernel": np.float32(kernel), "shift": np.full(size, 0.1, np.float32)}
    return jzero.TrainState.create(params=params, tx=tx)


def loss_of_pair(params: Any, batch: Any) -> jax.Array:
    x = (batch["x"] + params["shift"][None]) @ params["kernel"]
    return jnp.square(jnp.tanh(x).mean(1) - batch["y"].mean(1)).mean()


def loss_of(params: Any, batch: Any) -> jax.Array:
    x = batch["x"] + params["shift"][None]
    x = jnp.tanh(x @ params["layer_0"]["kernel"] + params["layer_0"]["bias"][None])
    return jnp.square(x @ params["layer_1"]["kernel"] - batch["y"]).mean()


def noisy_loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    noise = jax.random.normal(rng, batch["x"].shape) / 10
    return loss_of(params, {**batch, "x": batch["x"] + noise})


step_of = functools.cache(jzero.make_train_step)  # what it has compiled serves several scenarios


def train_from(state: Any, loss_fn: Any, **rng: jax.Array) -> tuple[Any, dict[str, float]]:
    """Returns the state after some steps, and the losses and gradient norms."""
    step = step_of(loss_fn)
    numbers = {}
    for i in range(NUM_STEPS):
        state, metrics = step(state, models.mlp_batch(ROWS, seed=i), **rng)
        numbers |= {f"loss {i}": float(metrics["loss"]), f"norm {i}": float(metrics["grad_norm"])}
    return state, numbers


def whole_values(state: Any) -> dict[str, float]:
    """Returns what evaluation says, and digests of all that gathers a state."""
    evaluate = jzero.make_eval_step(lambda params, batch: {"loss": loss_of(params, batch), "rows": count(batch)})
    evaluated = evaluate(state, models.mlp_batch(ROWS, seed=99))
    kernels = r"layer_\d/kernel"
    halved = jzero.update_params(state, lambda p: jax.tree.map(lambda x: x / 2, p), paths=kernels)
    doubled = jzero.set_full_param(state, "shift", value=2 * jzero.get_full_param(state, "shift"))
    return {
        **{name: float(x) for name, x in evaluated.items()},
        **digest("doubled", jzero.get_full_param(doubled, "shift")),
        **digest("moment", jzero.get_full_opt_state(doubled, "layer_0/kernel", name="nu")),
        **digest("params", jzero.gather_params(state)),
        **digest("halved", jzero.gather_params(halved, paths=kernels)),
        **digest("moments", jzero.unshard_train_state(state).opt_state[1][0].mu),
    }


def count(batch: Any) -> jzero.Summed:
    return jzero.Summed(jnp.ones(batch["x"].shape[0], jnp.int32).sum())


def digest(name: str, tree: Any) -> dict[str, float]:
    """Returns the norm of each (whole) leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): float(np.linalg.norm(np.asarray(x, np.float64))) for path, x in leaves}
