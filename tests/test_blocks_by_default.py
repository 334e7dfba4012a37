"""What is recomputed by default, and where."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero import _compat
from tests import shared
from tests.block_models import LAYERS, WIDTH, layer, loss_fn, make_batch, make_params, num_activations


def make_stack():
    blocks = make_params()["blocks"]
    return {name: np.stack([block[name] for block in blocks]) for name in ("up", "down")}


@pytest.mark.parametrize(
    ("fields", "remat", "expected"),
    [
        ({}, None, "cheap"),
        ({}, "as_written", "as_written"),
        ({"reshard_after_forward": False}, None, "as_written"),
        ({"persistence_threshold": 10**6}, None, "as_written"),
        ({"stage": 2}, None, "as_written"),
        ({"stage": 2}, "cheap", "cheap"),
    ],
)
def test_layers_are_recomputed_by_default_where_parameters_are_gathered_again(fields, remat, expected):
    config = jzero.ZeroConfig(**{"stage": 3, "persistence_threshold": 0, **fields})
    state = jzero.TrainState.create(params=make_params(2), tx=shared.sgd(1.0))
    step = jzero.make_train_step(loss_fn, remat=remat)
    assert step.recomputation(jzero.shard_train_state(state, config=config), make_batch()) == expected


def test_what_is_recomputed_by_default_is_told():
    state = jzero.TrainState.create(params=make_params(2), tx=shared.sgd(1.0))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    notes = jzero.analyze(jzero.make_train_step(loss_fn), state, make_batch()).notes
    assert any('`remat="as_written"` keeps what the loss keeps' in note for note in notes)


def test_gradients_outside_of_a_step_are_recomputed_alike():
    state = jzero.TrainState.create(params=make_params(), tx=shared.sgd(1.0))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    gradients = jzero.value_and_grad
    fns = (gradients(loss_fn), gradients(loss_fn, remat="as_written"), jzero.make_eval_step(loss_fn))
    jaxprs = [_compat.open_jaxpr(jax.make_jaxpr(fn)(state, make_batch()))[0] for fn in fns]
    differentiated, as_written, evaluated = map(num_activations, jaxprs)
    assert differentiated == 2 * LAYERS
    assert as_written == evaluated == LAYERS


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_what_prints_is_not_run_twice(scan, capfd):
    """`jax.debug.print` in a layer: a recomputed one would say everything again."""

    def noisy(w, x):
        jax.debug.print("a layer: {}", x[0, 0])
        return layer(w, x)

    def loss(params, batch):
        if scan:
            return jnp.square(jax.lax.scan(lambda x, w: (noisy(w, x), None), batch, params)[0]).mean()
        for block in params["blocks"]:
            batch = noisy(block, batch)
        return jnp.square(batch).mean()

    params, batch = (make_stack() if scan else make_params()), np.ones((24, WIDTH), np.float32)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=shared.sgd(1.0)), config=config)
    jax.block_until_ready(jzero.make_train_step(loss)(state, batch))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("a layer") == LAYERS * jax.device_count()


def test_an_option_that_changes_nothing_says_so():
    """At stage 3 it says that parameters do not stay either."""
    plain = jzero.TrainState.create(params=make_params(1), tx=shared.sgd(1.0))
    states = {
        stage: jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))
        for stage in (2, 3)
    }
    with pytest.warns(UserWarning, match="`remat='cheap'` changes nothing"):
        jzero.make_train_step(loss_fn, remat="cheap").trace(states[2], make_batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jzero.make_train_step(loss_fn, remat="cheap").trace(states[3], make_batch())
        jzero.make_train_step(loss_fn).trace(states[2], make_batch())
