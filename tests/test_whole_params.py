"""Stages 1 and 2 hold parameters whole: how new ones are gathered where compilers transpose gathers, as for GPUs."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import jzero
from jzero.layout.platform import PLATFORMS
from tests import test_two_hops
from tests.tiers import slow


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch):
    """Has parameters gathered as for GPUs."""
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(transposes_gathers=True))


def by_hand(loss_fn, tx, params, batches, is_trained=lambda _: True):
    """Returns parameters after steps of optax."""

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        new = optax.apply_updates(params, updates)
        return {name: new[name] if is_trained(name) else params[name] for name in params}, opt_state

    opt_state = jax.jit(tx.init)(params)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params


def assert_equal(state, params):
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)
    jax.tree.map(same, jzero.gather_params(state), params)


BATCHES = [np.roll(test_two_hops.BATCH, i, axis=0) for i in range(2)]


@functools.cache
def two_hops_by_hand():
    is_trained = lambda name: name != "frozen"
    params = test_two_hops.make_params()
    return by_hand(test_two_hops.loss_fn, optax.adam(1e-2), params, BATCHES, is_trained)


@pytest.mark.parametrize(("stage", "sizes"), [(2, {"node": 2, "data": 4}), slow(1, {"replica": 2, "data": 4})])
def test_steps_equal_plain_optax(stage, sizes):
    """Of parameters that are padded, flattened, stacked, cut on their second dimension, or frozen."""
    params = test_two_hops.make_params()
    levels = {f"{name}_axis": name for name in ("node", "replica") if name in sizes}
    state = test_two_hops.sharded(params, jzero.ZeroConfig(stage=stage, **levels), **sizes)
    step = jzero.make_train_step(test_two_hops.loss_fn)
    for batch in BATCHES:
        state, _ = step(state, batch)
    assert_equal(state, two_hops_by_hand())
