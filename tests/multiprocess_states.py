"""What two processes train, and the numbers that one process compares with."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from tests import models

NUM_PROCESSES, DEVICES_PER_PROCESS = 2, 4
NUM_STEPS, ROWS = 5, 24


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
    return jzero.ZeroConfig(stage=stage, persistence_threshold=50)


def make_state(key: jax.Array) -> jzero.TrainState:
    noise = jax.random.normal(key, (models.MLP_SIZES[0],)) / 10
    params = {**models.mlp_params(), "shift": noise}  # sizes that eight does not divide
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return jzero.TrainState.create(params=params, tx=tx)


def loss_of(params: Any, batch: Any) -> jax.Array:
    return models.mlp_loss(params, {**batch, "x": batch["x"] + params["shift"][None]})


def noisy_loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    noise = jax.random.normal(rng, batch["x"].shape) / 10
    return loss_of(params, {**batch, "x": batch["x"] + noise})


def train_from(
    state: Any, loss_fn: Any, *, accumulate_steps: int = 1, **rng: jax.Array
) -> tuple[Any, dict[str, float]]:
    """Returns the state after five steps, and the losses and gradient norms."""
    step = jzero.make_train_step(loss_fn, accumulate_steps=accumulate_steps)
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
