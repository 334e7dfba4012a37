"""What differentiating first makes right: casts, computed weights, and what the loss recomputes itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from tests.passes_losses import BATCH, matrix, names, sharded, unrolled

# What differentiating first makes right.


@pytest.mark.parametrize(
    ("values", "chain"),
    [
        ([1e5, 3e-8, 1.003, -7e4], (jnp.bfloat16, jnp.float16, jnp.float32)),
        ([1.125, 1.13, -1.625, 3.25], (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32)),
        ([1.0009765625, 3.0e-5, -2.7, 65519.0], (jnp.float16, jnp.float32, jnp.bfloat16, jnp.float32)),
    ],
    ids=["bf16-f16", "e4m3-e5m2", "f16-f32-bf16"],
)
def test_each_rounding_of_a_chain_of_casts_happens(values, chain):
    """A second one to a dtype as narrow as the first, of another range, is one, too. Against NumPy, to the bit."""
    w = np.tile(np.array(values, np.float32), 16)

    def cast(x):
        for dtype in chain:
            x = x.astype(dtype)
        return x

    found = jzero.make_eval_step(lambda params, batch: {"w": cast(params["w"])})(sharded({"w": w}), BATCH)["w"]
    with np.errstate(over="ignore"):
        expected = cast(w)
    np.testing.assert_array_equal(np.asarray(found), expected)


def gated(params, x):
    return jax.nn.sigmoid(x @ params["w"])


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 2), ("fp16", 3)])
def test_a_weight_that_depends_on_parameters_is_differentiated(stage, precision):
    """Against jax's gradient of the quotient over the whole batch. fp16 rounds to 11 bits."""
    loss = lambda p, x: jzero.Weighted((gated(p, x) * x).sum(), gated(p, x).sum())
    whole = lambda p: (gated(p, BATCH) * BATCH).sum() / gated(p, BATCH).sum()
    value, grads = jzero.value_and_grad(loss)(sharded({"w": matrix()}, stage, precision=precision), BATCH)
    want, want_grads = jax.jit(jax.value_and_grad(whole))({"w": matrix()})
    rtol = 1e-5 if precision == "fp32" else 2e-2
    np.testing.assert_allclose(value, want, rtol=rtol, atol=rtol * 1e-2)
    scale = float(jnp.abs(want_grads["w"]).max())
    np.testing.assert_allclose(np.asarray(grads["w"], np.float32), want_grads["w"], rtol=rtol, atol=rtol * scale)


def test_a_weight_that_depends_on_parameters_needs_one_micro_batch():
    loss = lambda p, x: jzero.Weighted((gated(p, x) * x).sum(), gated(p, x).sum())
    state = sharded({"w": matrix()}, 2)
    with pytest.raises(ValueError, match=r"`Weighted.weight` depends on"):
        jzero.make_train_step(loss, accumulate_steps=2).lower(state, BATCH)
    fixed = lambda p, x: jzero.Weighted((gated(p, x) * x).sum(), lax.stop_gradient(gated(p, x).sum()))
    jzero.make_train_step(fixed, accumulate_steps=2).lower(state, BATCH)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("regathers", [True, False])
def test_what_the_loss_recomputes_itself_is_gathered_as_often_as_the_plan_says(scan, regathers):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))

    def loss(params, x):
        if scan:
            return jnp.square(lax.scan(layer, x, params["layers"])[0]).mean()
        for w in params["layers"]:
            x, _ = layer(x, w)
        return jnp.square(x).mean()

    stack = np.full((4, 64, 64), 1 / 64, np.float32)
    params = {"layers": stack if scan else list(stack)}
    state = sharded(params, tx=optax.adam(1e-3), reshard_after_forward=regathers)
    step, batch = jzero.make_train_step(loss), np.ones((16, 64), np.float32)
    gathers = list(names(step.trace(state, batch).jaxpr)).count("zero_gather")
    assert gathers == (1 if scan else 4) * (2 if regathers else 1), "in the program, before a compiler merges any"
    planned = 1 + jzero.plan_of(state).gathered_bytes / stack.nbytes  # gathers, and one reduction
    assert planned == (3 if regathers else 2)
    estimated = jzero.estimate_step_memory(step, state, batch)
    assert estimated.gathered_bytes == estimated.planned_bytes == jzero.plan_of(state).gathered_bytes
    if scan == regathers:  # what compilers might merge or move
        report = jzero.analyze(step, state, batch)
        report.verify()
        assert report.communication_elements / stack.size == pytest.approx(planned, rel=0.02)


def test_what_calls_gather_again_is_not_merged_with_what_was_gathered_before():
    """Of layers that are calls of one function; the first is not used in the backward pass: rows need no gradient."""
    loss = lambda p, x: unrolled(p, x) / x.size
    state = sharded([matrix(64, 64, seed=i) for i in range(4)])
    report = jzero.analyze(jzero.make_train_step(loss, remat="as_written"), state, np.ones((16, 64), np.float32))
    assert report.communication_elements / (4 * 64 * 64) == pytest.approx((4 + 3 + 4) / 4, rel=0.01)
