"""States and losses that training is compared for with one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jzero
from tests import models

ROWS = 16
BATCHES = [models.mlp_batch(ROWS, seed) for seed in range(2)]


def make_config(stage, precision="fp32", **options):
    return jzero.ZeroConfig(stage=stage, precision=precision, **{"persistence_threshold": 0, **options})


def mlp_state(tx=None, cls=TrainState):
    return cls.create(
        apply_fn=None, params=models.mlp_params(sizes=models.TWO_LAYERS), tx=tx or optax.adamw(1e-3, eps=1e-6)
    )


def line_state():
    """A model of one layer, for what does not need two."""
    return jzero.TrainState.create(params={"w": models.mlp_params()["layer_0"]["kernel"][:, :11]}, tx=optax.sgd(0.1))


def line_loss(params, batch):
    return jnp.square(jnp.tanh(batch["x"] @ params["w"]) - batch["y"]).mean()


def compare(loss_fn=models.mlp_loss, state=None, *, stage=2, batches=BATCHES, **options):
    options.setdefault("config", make_config(stage))
    return jzero.check_equivalence(loss_fn, mlp_state() if state is None else state, batches, **options)


def norm_of(grads):
    return np.sqrt(sum(float(jnp.square(g).sum()) for g in jax.tree.leaves(grads)))


def plain_run(loss_fn, state, batches, clip_norm=None):
    """The loop that anyone would write on one device."""

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, clip_norm / (norm + 1e-6)), grads)
        return state.apply_gradients(grads=grads), loss, norm

    losses, norms = [], []
    for batch in batches:
        state, loss, norm = step(state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return state, losses, norms


def assert_reference(report, losses, norms):
    np.testing.assert_allclose([x.reference_loss for x in report.steps], losses, rtol=1e-6)
    np.testing.assert_allclose([x.reference_grad_norm for x in report.steps], norms, rtol=1e-5)
