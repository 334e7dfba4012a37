"""Blocks of unrolled models: found in the jaxpr, and recomputed one by one by `remat="cheap"`."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import _compat
from jzero._blocks import keeps_heavy, parts_of
from jzero._remat import with_remat
from tests import models

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


def parts(fn, *args):
    return parts_of(_compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0])


def remats(jaxpr):
    """Yields the `jax.checkpoint` equations of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("remat", "remat2", "checkpoint"):
            yield eqn
        for inner in _compat.contained_jaxprs(eqn):
            yield from remats(inner)


def test_layers_are_found_and_cut_at_the_residual_stream():
    found = parts(loss_fn, make_params(), make_batch())
    blocks = [part for part in found if part.is_block]
    assert len(blocks) == LAYERS
    for part in blocks:
        assert [eqn.primitive.name for eqn in part.eqns].count("dot_general") == 2
        assert [v.aval.shape for v in part.outvars] == [(24, WIDTH)]
        assert sorted(v.aval.shape for v in part.invars) == [(24, WIDTH), (WIDTH, 64), (64, WIDTH)]
    assert sum(len(part.eqns) for part in found) == len(
        _compat.open_jaxpr(jax.make_jaxpr(loss_fn)(make_params(), make_batch()))[0].eqns
    )


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda params, batch: jnp.square(batch @ params["first"]).mean(), "one layer"),
        (
            lambda params, batch: jnp.sin(jnp.sin(jnp.sin(jnp.sin(batch)))).mean() + params["first"].sum(),
            "nothing heavy",
        ),
        (lambda params, batch: batch.mean(), "nothing twice"),
        (lambda params, batch: 0.0, "no equations"),
    ],
)
def test_where_there_are_no_blocks_nothing_is_cut(fn, why):
    assert not any(part.is_block for part in parts(fn, make_params(), make_batch())), why


def test_what_is_kept():
    heavy = jax.make_jaxpr(lambda x: jax.random.normal(jax.random.key(0), x.shape) @ jnp.sort(x))(jnp.ones((4, 4)))
    names = {eqn.primitive.name for eqn in heavy.eqns if keeps_heavy(eqn.primitive)}
    assert {"dot_general"} < names
    assert names & {"sort", "jit", "pjit"}
    light = jax.make_jaxpr(lambda x: jnp.exp(x - x.max(-1, keepdims=True)).sum() / jnp.where(x > 0, x, 2.0))(
        jnp.ones(4)
    )
    kept = {eqn.primitive.name for eqn in light.eqns if keeps_heavy(eqn.primitive)}
    assert kept <= {"jit", "pjit"}  # whose bodies are asked about


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["plain", "jit"])
def test_each_block_keeps_its_products_alone(wrap):
    params, batch = make_params(), make_batch()
    jaxpr = jax.make_jaxpr(wrap(loss_fn))(params, batch)
    leaves = jax.tree.leaves((params, batch))
    rewritten = jax.make_jaxpr(lambda *xs: with_remat(jaxpr, xs, remat="cheap"))(*leaves)
    assert len(list(remats(_compat.open_jaxpr(rewritten)[0]))) == LAYERS
    # What the backward pass gets: of each layer its input, its first product, and its weights.
    _, vjp = jax.vjp(lambda *xs: with_remat(jaxpr, xs, remat="cheap")[0], *leaves)
    kept = [x.shape for x in jax.tree.leaves(vjp) if hasattr(x, "shape") and x.shape == (24, 64)]
    assert len(kept) == LAYERS  # without: the square's input, its result, the derivative of tanh, and so on
    _, plain = jax.vjp(loss_fn, params, batch)
    assert len([x for x in jax.tree.leaves(plain) if getattr(x, "shape", None) == (24, 64)]) >= 2 * LAYERS


def test_what_the_loss_recomputes_itself_stays_as_it_is():
    def own(params, batch):
        x = jnp.sin(batch @ params["first"])
        for block in params["blocks"]:
            x = jax.checkpoint(layer)(block, x)
        return jnp.square(x @ params["last"]).mean()

    params, batch = make_params(), make_batch()
    jaxpr = jax.make_jaxpr(own)(params, batch)
    with pytest.warns(UserWarning, match="changes nothing"):
        rewritten = jax.make_jaxpr(lambda *xs: with_remat(jaxpr, xs, remat="cheap"))(*jax.tree.leaves((params, batch)))
    found = list(remats(_compat.open_jaxpr(rewritten)[0]))
    assert [eqn.params["policy"] for eqn in found] == [None] * LAYERS


@pytest.mark.parametrize(
    ("stage", "scan"),
    [(3, False), pytest.param(3, True, marks=pytest.mark.slow), pytest.param(1, False, marks=pytest.mark.slow)],
)
def test_a_step_is_that_of_plain_jax(stage, scan):
    model = models.GPT(scan=scan)
    tokens, loss = models.tokens(16), models.gpt_loss(model)
    params = model.init(jax.random.key(0), np.zeros((1, models.SEQ), np.int32))["params"]
    state = jzero.TrainState.create(params=params, tx=optax.sgd(1.0))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))
    want_loss, want = jax.value_and_grad(loss)(params, tokens)
    new, metrics = jzero.make_train_step(loss, remat="cheap")(state, tokens)
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-6)
    for old, x, g in zip(*map(jax.tree.leaves, (params, jzero.gather_params(new), want)), strict=True):
        # Sums over the batch in another order: float32's rounding, relative to the largest element.
        np.testing.assert_allclose(old - x, g, rtol=1e-4, atol=1e-5 * float(jnp.abs(g).max()) + 1e-7)


def test_dropout_draws_once():
    """A mask is kept, not drawn again, and is the same in both passes."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(4):
                x = x + nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(16)(x)))
            return x

    model, batch, key = Model(), make_batch(), jax.random.key(3)
    params = model.init({"params": key, "dropout": key}, batch)["params"]
    loss = lambda params, batch, rng: jnp.square(model.apply({"params": params}, batch, rngs={"dropout": rng})).mean()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(params, batch, key)
    plain = jax.make_jaxpr(loss)(params, batch, key)
    leaves = jax.tree.leaves(params)
    fn = lambda leaves: with_remat(plain, [*leaves, batch, key], remat="cheap")[0]
    want = jax.tree.leaves(jax.value_and_grad(loss)(params, batch, key))
    found = jax.tree.leaves(jax.value_and_grad(fn)(leaves))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    counts = [str(x).count("random_bits") for x in (jaxpr, jax.make_jaxpr(jax.value_and_grad(fn))(leaves))]
    assert counts[0] == counts[1] > 0


@pytest.mark.filterwarnings("error")
def test_an_option_that_changes_nothing_says_so():
    params, batch = make_params(1), make_batch()
    jaxpr = jax.make_jaxpr(loss_fn)(params, batch)
    leaves = jax.tree.leaves((params, batch))
    with pytest.warns(UserWarning, match="`remat='cheap'` changes nothing: the loss has no scan and no repeated block"):
        jax.make_jaxpr(lambda *xs: with_remat(jaxpr, xs, remat="cheap"))(*leaves)
    with_remat(jaxpr, leaves, remat=True)
    stack = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
    with_remat(stack(jnp.ones((2, 16, 16)), batch), [jnp.ones((2, 16, 16)), batch], remat="cheap")
