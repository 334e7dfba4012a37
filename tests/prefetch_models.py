"""Losses whose parameters are gathered ahead, and their programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jzero
from jzero import _compat
from jzero.layout.platform import PLATFORMS
from tests import shared

AMPLE = 2**30


@pytest.fixture(autouse=True)
def short_loops_too(monkeypatch):
    """Loops of these tests have few turns, whose last gathers a large share in vain."""
    monkeypatch.setattr("jzero.engine.prefetch.MOST_IN_VAIN", 1.0)


def on(platform, monkeypatch):
    """Has steps traced as for such devices."""
    facts = {name: getattr(PLATFORMS[platform], name) for name in ("second_gather", "postpones", "prefetches")}
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(**facts))


def two_products(p, batch):
    def layer(h, w):
        return jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"]), None

    return jnp.square(lax.scan(layer, batch, p)[0]).mean()


def stack_state(limit, layers=5, width=32, inner=64, precision="fp32"):
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(layers, width, inner)).astype(np.float32) / 6,
        "down": rng.normal(size=(layers, inner, width)).astype(np.float32) / 8,
    }
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, prefetch_bytes=limit, precision=precision)
    return jzero.shard_train_state(jzero.TrainState.create(params=params, tx=shared.sgd(0.1)), config=config)


def carried_shapes(fn, *args):
    """The shapes that loops carry from turn to turn, one list for each loop with a gather in it."""
    found = []

    def search(jaxpr):
        for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
            if eqn.primitive.name == "scan" and "zero_gather" in str(eqn.params["jaxpr"]):
                consts, carry = _compat.scan_groups(eqn)
                found.append([v.aval.shape for v in eqn.invars[consts : consts + carry]])
            for inner in _compat.contained_jaxprs(eqn):
                search(inner)

    search(jax.make_jaxpr(fn)(*args))
    return found
