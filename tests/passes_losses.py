"""Matrices, the states that hold them, and the primitives of a program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jzero
from jzero import _compat
from tests import shared

WIDTH = 16
BATCH = np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)


def sharded(params, stage=3, tx=None, **options):
    plain = jzero.TrainState.create(params=params, tx=tx or shared.sgd(1.0))
    return jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0, **options))


def matrix(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape or (WIDTH, WIDTH)).astype(np.float32) / 4


def names(jaxpr):
    """The primitives of a program, those of the jaxprs that it holds among them."""
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        yield eqn.primitive.name
        for inner in _compat.contained_jaxprs(eqn):
            yield from names(inner)


def unrolled(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
        for _ in range(10):
            x = jnp.sin(x) + 1
    return x.sum()
