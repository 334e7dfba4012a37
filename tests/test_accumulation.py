"""Micro-batches inside one step: the numbers of one large batch, and the communication of the stage."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jzero
from jzero.core.jaxpr.equations import equations_of
from tests import models, shared
from tests.tiers import slow

ROWS, K, STEPS = 48, 3, 2


def make_params():
    return models.mlp_params(sizes=models.TWO_LAYERS)


def make_state(stage, precision="fp32", tx=None):
    plain = TrainState.create(apply_fn=None, params=make_params(), tx=tx or optax.adam(1e-3, eps=1e-6))
    return jzero.shard_train_state(plain, config=shared.config(stage, precision=precision))


def weighted_loss(params, batch):
    """A token-weighted mean: rows count very differently, so that a mean of means is far off."""
    x = batch["x"]
    for i in range(2):
        x = x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"][None]
        x = jnp.tanh(x) if i < 1 else x
    losses = jnp.square(x - batch["y"]).mean(-1)
    return jzero.Weighted((losses * batch["w"]).sum(), batch["w"].sum())


def batch(seed=0):
    weights = np.random.default_rng(seed).integers(0, 2, ROWS) * np.arange(ROWS)
    return {**models.mlp_batch(ROWS, seed), "w": weights.astype(np.float32)}


@functools.cache
def plain_run():
    def mean(params, batch):
        whole = weighted_loss(params, batch)
        return whole.sum / whole.weight

    return shared.by_optax(mean, make_params(), optax.adam(1e-3, eps=1e-6), map(batch, range(STEPS)))


@pytest.mark.parametrize(("stage", "reduce"), [(1, "each"), (2, "last"), slow(3, "each"), slow(3, "last")])
def test_equals_one_large_weighted_batch(stage, reduce):
    step = jzero.make_train_step(weighted_loss, accumulate_steps=K, reduce=reduce)
    state, losses, norms = make_state(stage), [], []
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    want = plain_run()
    np.testing.assert_allclose(losses, want.losses, rtol=1e-6)
    np.testing.assert_allclose(norms, want.norms, rtol=1e-6)
    # Adam divides by the root of the gradient's square, which amplifies the order of summation where both are small.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), jzero.gather_params(state), want.params)


ACCUMULATORS = {
    "bf16": jnp.bfloat16,
    jzero.Precision(compute_dtype="bfloat16", accumulate_dtype="float32"): jnp.float32,
    jzero.Precision(compute_dtype="bfloat16", reduce_dtype="float32"): jnp.float32,
}


@pytest.mark.parametrize(("stage", "precision"), [*zip([1, 2, 3], ACCUMULATORS, strict=True)])
def test_dtype_of_the_accumulators(stage, precision):
    """The loop carries sums in the accumulate dtype: whole ones at stage 1, shards at stages 2 and 3."""
    step = jzero.make_train_step(models.mlp_loss, accumulate_steps=K)
    jaxpr = step.trace(make_state(stage, precision), models.mlp_batch(ROWS)).jaxpr
    carried = [v.aval for eqn in equations_of(jaxpr) if eqn.primitive.name == "scan" for v in eqn.outvars]
    shape = (127, 11) if stage == 1 else (16, 11)
    assert [x.dtype for x in carried if x.shape == shape] == [jnp.dtype(ACCUMULATORS[precision])]


@pytest.mark.parametrize("stage", [0, 3])
def test_clip_norm_equals_optax_clipping(stage):
    """DeepSpeed's `clip / (norm + 1e-6)` and optax's `clip / norm` differ by 1e-6 / norm, relative."""
    clip = 0.01
    ours = make_state(stage, tx=optax.sgd(1.0))
    found = [jzero.make_train_step(models.mlp_loss, clip_norm=clip)(ours, models.mlp_batch(ROWS))]
    if stage:  # else optax's own transformation runs as it is
        theirs = make_state(stage, tx=optax.chain(optax.clip_by_global_norm(clip), optax.sgd(1.0)))
        found += [jzero.make_train_step(models.mlp_loss)(theirs, models.mlp_batch(ROWS))]

    grads = jax.tree.map(np.asarray, jax.jit(jax.grad(models.mlp_loss))(make_params(), models.mlp_batch(ROWS)))
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads)))
    want = jax.tree.map(lambda p, g: np.asarray(p) - g * clip / norm, make_params(), grads)
    assert norm > 10 * clip
    for state, metrics in found:
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)  # before clipping
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), jzero.gather_params(state), want)


def test_norm_of_16_bit_gradients_is_summed_in_fp32():
    """100,000 squares in bf16 would stop growing at 256 times the largest."""
    loss = lambda p, batch: (p["w"].astype(jnp.float32) * batch.mean()).sum()
    plain = jzero.TrainState.create(params={"w": jnp.ones((500, 200))}, tx=optax.sgd(0.0))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, precision="bf16"))
    _, metrics = jzero.make_train_step(loss)(state, jnp.ones((8,)))
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(100_000), rel=1e-6)
