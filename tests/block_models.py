"""Layers that are found as blocks, and what is recomputed of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.base import compat

LAYERS, WIDTH = 5, 32


def layer(w, x):
    return x + jnp.tanh(jnp.square(x @ w["up"]) - 1.0) @ w["down"]


def make_params(layers=LAYERS):
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / 8).astype(np.float32)
    blocks = [{"up": draw(WIDTH, 64), "down": draw(64, WIDTH)} for _ in range(layers)]
    return {"first": draw(16, WIDTH), "blocks": blocks, "last": draw(WIDTH, 8)}


def loss_fn(params, batch):
    x = jnp.sin(batch @ params["first"])
    for block in params["blocks"]:
        x = layer(block, x)
    return jnp.square(jax.nn.softmax(x @ params["last"])).mean()


def make_batch():
    return np.random.default_rng(1).normal(size=(24, 16)).astype(np.float32)


def num_activations(jaxpr):
    own = sum(eqn.primitive.name == "tanh" for eqn in jaxpr.eqns)
    return own + sum(num_activations(inner) for eqn in jaxpr.eqns for inner in compat.contained_jaxprs(eqn))
