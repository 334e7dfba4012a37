"""`prefetch_bytes`: the same numbers, gathered ahead, by no more than the bound."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jzero
from tests import engine_losses
from tests.engine_losses import D
from tests.prefetch_models import (
    AMPLE,
    short_loops_too,  # noqa: F401  # fixtures
)
from tests.tiers import slow


def scan_in_a_scan(p, batch):
    inner = lambda h, w: (jnp.tanh(h @ w["w"] + w["b"][None]), None)
    outer = lambda h, _: (lax.scan(inner, h, p["stack"])[0], None)
    return engine_losses.out(p, lax.scan(outer, batch["x"], None, length=2)[0], batch)


def scan_with_everything(p, batch):
    """A constant with a gradient, an integer carry, integers and keys among the rows, results of both kinds."""
    keys = jax.random.split(jax.random.key(3, impl="unsafe_rbg"), 6)
    constant = jnp.cos(p["b"][None] * batch["x"])

    def layer(carry, row):
        h, count, total = carry
        w, i, key, scale = row
        h = jnp.tanh(h @ w["w"] + w["b"][None] * scale) + constant * h
        h = h * ((jax.random.bits(key, (1, D), jnp.uint8) > 25) * (i >= 0))
        return (h, count + i, total + h.mean()), (h.mean() * count, i * 2)

    rows = (p["stack"], jnp.arange(6), keys, jnp.linspace(0.5, 1.5, 6) * p["b"][:6])
    (h, count, total), (ys, numbers) = lax.scan(layer, (batch["x"], jnp.int32(1), jnp.float32(0)), rows)
    return engine_losses.out(p, h, batch) + ys.sum() * 1e-3 + total * count + numbers.sum()


def scan_casting_its_rows(p, batch):
    def layer(h, w):
        return jnp.tanh(h @ w["w"].astype(jnp.bfloat16).astype(jnp.float32) + w["b"][None]), None

    return engine_losses.out(p, lax.scan(layer, batch["x"], p["stack"])[0], batch)


def scan_of_remat_with_keys(p, batch):
    """What the loop keeps by turn may be keys, made in the turn."""

    @jax.checkpoint
    def dropped(h, w, key):
        return jnp.tanh(h @ w["w"] + w["b"][None]) * (jax.random.bits(key, (1, D), jnp.uint8) > 25)

    def layer(carry, row):
        h, i = carry
        w, key = row
        return (dropped(h, w, jax.random.fold_in(key, i)) * 2.0, i + 1), None

    rows = (p["stack"], jax.random.split(jax.random.key(3, impl="unsafe_rbg"), 6))
    return engine_losses.out(p, lax.scan(layer, (batch["x"], jnp.int32(0)), rows)[0][0], batch)


def scan_of_a_call(p, batch):
    layer = lambda h, w: (engine_losses._inner(w["w"], w["b"], h), None)
    return engine_losses.out(p, lax.scan(layer, batch["x"], p["stack"], reverse=True)[0], batch)


def one_after_another(p, batch):
    """Gathers outside of loops, which wait for each other where little may be ahead."""
    x = batch["x"]
    for i in range(3):
        x = jnp.tanh(x @ p["stack"]["w"][i] + p["stack"]["b"][i][None])
    return engine_losses.nested_jit(p, batch | {"x": x}) + scan_of_a_call(p, batch)


def together(p, batch):
    losses = scan_with_everything, scan_of_remat_with_keys, scan_in_a_scan
    return sum(loss(p, batch) for loss in losses) / len(losses)


@pytest.mark.parametrize(
    ("limit", "loss_fn"),
    [
        (AMPLE, together),
        (AMPLE, engine_losses.scan_reversed_with_outputs),
        (D * D * 4, one_after_another),
        slow(D * D * 4, together),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_gradients_equal_plain_jax(limit, loss_fn):
    state = engine_losses.sharded(3, 8, prefetch_bytes=limit)
    engine_losses.assert_equal(state, loss_fn, engine_losses.batch())


def test_a_gather_ahead_travels_in_the_dtype_that_the_layer_casts_to():
    lowered = jzero.make_train_step(scan_casting_its_rows).lower(
        engine_losses.sharded(3, 8, prefetch_bytes=AMPLE), engine_losses.batch()
    )
    gathers = [line for line in lowered.as_text().splitlines() if "stablehlo.all_gather" in line]
    whole = f"tensor<{D}x{D}x"
    of_stack = [line.rsplit("->", 1)[1] for line in gathers if whole in line.rsplit("->", 1)[1]]
    assert of_stack
    assert all("xbf16" in line for line in of_stack), of_stack
