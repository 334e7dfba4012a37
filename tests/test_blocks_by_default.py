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


def stack_loss(params, batch):
    return jnp.square(jax.lax.scan(lambda x, w: (layer(w, x), None), batch, params)[0]).mean()


def make_stack():
    blocks = make_params()["blocks"]
    return {name: np.stack([block[name] for block in blocks]) for name in ("up", "down")}


def num_recomputed(loss_fn, params, batch, **options):
    """How many activations a step computes again: each layer has one."""
    step_options = {k: options.pop(k) for k in ("remat",) if k in options}
    devices = options.pop("num_devices", 8)
    config = jzero.ZeroConfig(**{"stage": 3, "persistence_threshold": 0, **options})
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    state = jzero.shard_train_state(
        jzero.TrainState.create(params=params, tx=shared.sgd(1.0)), config=config, mesh=mesh
    )
    step = jzero.make_train_step(loss_fn, **step_options)
    return num_activations(_compat.open_jaxpr(step.trace(state, batch).jaxpr)[0]) - num_activations(
        _compat.open_jaxpr(jax.make_jaxpr(loss_fn)(params, batch))[0]
    )


@pytest.mark.parametrize(
    ("scan", "options", "is_recomputed"),
    [
        (False, {}, True),
        (True, {}, True),
        (False, {"remat": "cheap"}, True),
        (False, {"remat": "as_written"}, False),
        (True, {"remat": "as_written"}, False),
        (False, {"remat": False}, False),
        (False, {"reshard_after_forward": False}, False),
        (False, {"stage": 2}, False),
        (True, {"stage": 2}, False),
        (False, {"stage": 2, "remat": "cheap"}, True),
        (False, {"num_devices": 1}, False),
        (False, {"persistence_threshold": 10**6}, False),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error", "ignore:The mesh has one device")
def test_layers_are_recomputed_by_default_where_parameters_are_gathered_again(scan, options, is_recomputed):
    loss, params = (stack_loss, make_stack()) if scan else (loss_fn, make_params(2))
    batch = np.ones((24, WIDTH), np.float32) if scan else make_batch()
    found = num_recomputed(loss, params, batch, **options)
    assert (found > 0) == is_recomputed


@pytest.mark.parametrize(
    ("make", "options", "says_so"),
    [(jzero.make_train_step, {}, True), (jzero.value_and_grad, {"remat": "cheap"}, False)],
    ids=["by default", "as asked"],
)
def test_what_is_recomputed_by_default_is_told(make, options, says_so):
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    plain = jzero.TrainState.create(params=make_params(2), tx=shared.sgd(1.0))
    state = jzero.shard_train_state(plain, config=config)
    fn = make(loss_fn, **options)
    assert fn.recomputation(state, make_batch()) == "cheap"
    notes = jzero.analyze(fn, state, make_batch()).notes
    assert any('`remat="as_written"` keeps what the loss keeps' in note for note in notes) == says_so
    assert make(loss_fn, remat="as_written").recomputation(state, make_batch()) == "as_written"
    assert make(loss_fn).recomputation(jzero.shard_train_state(plain, stage=2), make_batch()) == "as_written"


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
