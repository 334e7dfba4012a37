"""What holds a second gather back: whole gradients, or on TPUs one element of those that are larger than what waits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import _compat
from jzero._lazy import first_elements
from tests import models

ROWS, WIDTH, HIDDEN, VOCAB = 48, 32, 64, 512  # rows per device
SIZES = {"inner": (WIDTH, HIDDEN), "outer": (HIDDEN, WIDTH), "head": (WIDTH, VOCAB)}


def make_params():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=size).astype(np.float32) / 8 for name, size in SIZES.items()}


def loss_fn(params, batch):
    x = jnp.tanh(batch @ params["inner"]) @ params["outer"]
    return jax.nn.logsumexp(x @ params["head"], axis=-1).mean()


def batch(rows=8 * ROWS):
    return np.random.default_rng(1).normal(size=(rows, WIDTH)).astype(np.float32)


def make_state():
    state = jzero.TrainState.create(params=make_params(), tx=optax.sgd(0.1))
    return jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))


def barriers(jaxpr):
    """Yields the shapes of what goes into each barrier of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            yield [x.aval.shape for x in eqn.invars]
        for inner in _compat.contained_jaxprs(eqn):
            yield from barriers(inner)


def found_barriers(fn, *args):
    return list(barriers(_compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0]))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_operands_of_barriers(platform, monkeypatch):
    monkeypatch.setattr("jzero._grads.mesh_platform", lambda mesh: platform)
    fences = found_barriers(jzero.value_and_grad(loss_fn), make_state(), batch())
    of_logits, of_x, of_hidden = (ROWS, VOCAB), (ROWS, WIDTH), (ROWS, HIDDEN)
    shards = {"inner": (WIDTH, HIDDEN // 8), "outer": (HIDDEN // 8, WIDTH), "head": (WIDTH, VOCAB // 8)}
    assert len(fences) == 3
    for name, gradient in (("head", of_logits), ("outer", of_x), ("inner", of_hidden)):
        light = platform == "tpu" and name != "outer"  # 48 x 32 < 64 x 32; but 48 x 512 > 32 x 512, 48 x 64 > 32 x 64
        (fence,) = [shapes for shapes in fences if shards[name] in shapes]
        assert ((1, 1) if light else gradient) in fence
        assert light == (gradient not in fence)


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_with_light_fences_are_those_of_plain_jax(scan, monkeypatch):
    monkeypatch.setattr("jzero._grads.mesh_platform", lambda mesh: "tpu")
    model = models.GPT(scan=scan)
    tokens = models.tokens(16)
    params = model.init(jax.random.key(0), np.zeros((1, models.SEQ), np.int32))["params"]
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    loss = models.gpt_loss(model)
    assert any(
        shape and set(shape) == {1}
        for shapes in found_barriers(jzero.value_and_grad(loss), state, tokens)
        for shape in shapes
    )
    _, grads = jzero.value_and_grad(loss)(state, tokens)
    want = jax.grad(loss)(params, tokens)
    for path, x in jax.tree_util.tree_leaves_with_path(want):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = jzero.get_full_grad(state, name, grads=grads)
        # Sums over the batch in another order: float32's rounding, relative to the largest element.
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=2e-6 * float(jnp.abs(x).max()) + 1e-9)


def test_results_without_elements_and_of_whole_numbers():
    """A light fence takes what is there of each gradient."""
    values = [jnp.ones((3, 4)), jnp.zeros((0, 2)), jnp.float32(5), np.zeros((2,), jax.dtypes.float0)]
    assert [x.shape for x in first_elements(values)] == [(1, 1), (0, 1), ()]
