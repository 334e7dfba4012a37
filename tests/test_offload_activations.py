"""Activations on the host between forward and backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jzero
from jzero.engine.recompute import recompute
from jzero.jaxpr.primitives import REMAT
from tests import light_decoder, models
from tests.test_offload_params import device_puts

LAYERS, WIDTH = 3, 41


def train(loss_fn, remat, **options):
    plain = light_decoder.make_state(optax.adamw(1e-3), layers=LAYERS, width=WIDTH, vocab=128)
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, persistence_threshold=50))
    step = jzero.make_train_step(loss_fn, remat=remat, **options)
    found = []
    for seed in range(2):
        state, metrics = step(state, models.tokens(16, seed, vocab=128))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return found, step, state


def to_host(jaxpr):
    """Returns the shapes of what is moved to the host, of a slice of a loop or as a whole."""
    return sorted(shape for shape, where, _ in device_puts(jaxpr) if where == "Host")


@pytest.mark.slow
def test_what_goes_between_layers():
    loss_fn = light_decoder.loss_with(jax.checkpoint(light_decoder.apply_layer))
    expected, _, _ = train(loss_fn, True, accumulate_steps=2)
    found, step, state = train(loss_fn, "offload", accumulate_steps=2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jaxpr = step.trace(state, models.tokens(16, vocab=128)).jaxpr.jaxpr
    assert to_host(jaxpr) == [(1, models.SEQ, WIDTH)], "one array per layer: what it is called with"
    back = [shape for shape, _, inside in device_puts(jaxpr) if "scan" in inside]
    assert back.count((1, models.SEQ, WIDTH)) == 2, "there and back"


def test_loops_in_a_layer_recompute_as_written():
    def layer(x, w):
        parts = jax.lax.map(jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x))), x.reshape(4, -1))
        return parts.reshape(x.shape) @ w, None

    loss = lambda w, x: jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()
    jaxpr = jax.make_jaxpr(loss)(jnp.ones((3, 8, 8)), jnp.ones((2, 8)))

    def depths(jaxpr, depth=0):
        for eqn in jaxpr.eqns:
            is_remat = eqn.primitive.name in REMAT
            yield from [depth] * is_remat
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from depths(getattr(inner, "jaxpr", inner), depth + is_remat)

    assert list(depths(recompute(jaxpr, "offload", []).jaxpr)) == [0, 1], "the layer once, and each part in it"


@pytest.mark.slow
def test_named_activations():
    params = {f"w{i}": jnp.asarray(np.random.default_rng(i).normal(size=(64, 64)) / 8) for i in range(3)}

    def layer(w, x):
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return checkpoint_name(jnp.sin(hidden) * 2, "out")

    def loss(policy, params, batch):
        apply = jax.checkpoint(layer, policy=policy) if policy else layer
        for name in sorted(params):
            batch = apply(params[name], batch)
        return jnp.square(batch).mean()

    def run(policy):
        config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
        state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)
        step = jzero.make_train_step(functools.partial(loss, policy))
        batch = np.random.default_rng(9).normal(size=(16, 64)).astype(np.float32)
        moved = to_host(step.trace(state, batch).jaxpr.jaxpr)
        state, metrics = step(state, batch)
        return moved, float(metrics["loss"]), float(metrics["grad_norm"])

    moved, *found = run(jzero.offload_activations("hidden", keep=["out"]))
    none, *expected = run(None)
    assert (moved, none) == ([(2, 64)] * 3, []), "the device's rows, and no gathered parameter"
    np.testing.assert_allclose(found, expected, rtol=1e-6)
