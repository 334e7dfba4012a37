"""The loss is ordinary code: whatever it does with its parameters, loss and gradients are those of plain jax."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jzero
from tests import engine_losses
from tests.engine_losses import COUPLED, assert_equal, nested_jit, remat, scan, weight_decay_over_all_leaves


def nested_scan(p, batch):
    grouped = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), p["stack"])
    body = lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), None)
    outer = lambda h, group: (lax.scan(body, h, group)[0], None)
    with_warning = lax.scan(outer, batch["x"], grouped)[0]
    return engine_losses.out(p, with_warning, batch)


@functools.cache
def together(*losses):
    """The sum of losses, each over the parameters that it uses."""

    def loss_fn(p, batch):
        return sum(loss(p, batch) for loss in losses)

    return loss_fn if len(losses) > 1 else losses[0]


@functools.cache
def positive_batch():
    """`branches` takes a branch by the local batch: at N=1 that is the whole one, which must agree. 5 divides it."""
    batch = engine_losses.batch(rows=120)
    return batch | {"x": np.abs(batch["x"])}


@functools.cache
def on_one_device(losses):
    return jax.jit(jax.value_and_grad(together(*losses)))(engine_losses.params(), positive_batch())


TOGETHER = [
    (engine_losses.jit_casting_all_parameters,),
    (
        engine_losses.plain,
        engine_losses.tied,
        engine_losses.vmapped,
        engine_losses.while_loop,
        engine_losses.custom_rules,
        engine_losses.scan_reversed_with_outputs,
        engine_losses.remat_with_policy,
        engine_losses.scan_carrying_weights,
    ),
    (
        engine_losses.weight_norm,
        engine_losses.fori_indexing_the_stack,
        remat,
        engine_losses.mixed_parameters,
        engine_losses.scan_of_remat,
    ),
    COUPLED,
    (engine_losses.loops_after_whole_numbers,),
    (scan, nested_jit, weight_decay_over_all_leaves),
]
"""Every loss, several in one program."""


@pytest.mark.parametrize("losses", TOGETHER, ids=lambda losses: "-".join(loss.__name__ for loss in losses[:2]))
def test_gradients_equal_plain_jax_at_stage_3(losses):
    """The losses that look at all rows run on five devices, which divide nothing."""
    coupled = set(losses) & set(COUPLED)
    state = engine_losses.sharded(3, 5 if coupled else 8)
    assert_equal(state, together(*losses), positive_batch(), want=on_one_device(losses), check_rows=not coupled)


@pytest.mark.parametrize(
    ("stage", "devices", "options"),
    [
        (0, 3, {}),
        (3, 8, {"replica_axis": "replica", "reshard_after_forward": False, "reduce_scatter": False}),
    ],
)
def test_gradients_equal_plain_jax_at_every_stage(stage, devices, options):
    state = engine_losses.sharded(stage, devices, **options)
    assert_equal(state, together(*TOGETHER[-1]), positive_batch(), want=on_one_device(TOGETHER[-1]))


@pytest.mark.slow
def test_the_loss_has_a_gradient_by_the_batch_too(monkeypatch):
    """Also that of what layers hand on which does not depend on parameters."""
    monkeypatch.setattr("jzero.engine.prefetch.MOST_IN_VAIN", 1.0)

    def loss_fn(p, batch):
        def layer(carry, w):
            h, x = carry
            return (jnp.tanh(h @ w["w"] + w["b"][None]), jnp.sin(x)), jnp.cos(x).mean()

        carry, ys = lax.scan(layer, (batch["x"], batch["x"]), p["stack"])
        (h, x), y = jax.checkpoint(layer)(carry, {"w": p["w"], "b": p["b"]})
        return engine_losses.out(p, h, batch) + x.mean() + ys.sum() + y

    want = jax.jit(jax.grad(loss_fn, argnums=1))(engine_losses.params(), engine_losses.batch())
    state = engine_losses.sharded(3, 8, prefetch_bytes=10**6)
    got = jax.jit(jax.grad(lambda batch: jzero.value_and_grad(loss_fn)(state, batch)[0]))(engine_losses.batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


def test_no_tracer_outlives_its_trace():
    """`jax.checking_leaks` finds what caches of jax would keep alive, and users' own leaks only if there are none."""
    state = engine_losses.sharded(3, 8, prefetch_bytes=10**6)
    with jax.checking_leaks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.make_jaxpr(jzero.value_and_grad(remat))(state, engine_losses.batch())


def test_stack_cut_along_the_scan_is_warned_about():
    """A reshaped stack cannot be sliced on its shards: it is gathered before the loop, and the user is told."""
    with pytest.warns(UserWarning, match=r"LeafRule\(scan_dim=0\)"):
        jax.make_jaxpr(jzero.value_and_grad(nested_scan))(engine_losses.sharded(3, 8), engine_losses.batch())
