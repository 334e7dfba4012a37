"""Stages 1 and 2 hold parameters whole: how new ones are gathered where compilers transpose gathers, as for GPUs."""

from __future__ import annotations

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.layout.platform import PLATFORMS
from tests import test_two_hops
from tests.tiers import default_for, stages

LAYERS, WIDTH = 6, 128
TX = optax.sgd(0.1, momentum=0.9)


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


SIZES = {"node": 2, "data": 4}, {"replica": 2, "data": 4}, {"data": 8}


@pytest.mark.parametrize(("stage", "sizes"), default_for([(2, SIZES[0])], itertools.product([1, 2], SIZES)))
def test_steps_equal_plain_optax(stage, sizes):
    """Of parameters that are padded, flattened, stacked, cut on their second dimension, or frozen."""
    params = test_two_hops.make_params()
    levels = {f"{name}_axis": name for name in ("node", "replica") if name in sizes}
    state = test_two_hops.sharded(params, jzero.ZeroConfig(stage=stage, **levels), **sizes)
    step = jzero.make_train_step(test_two_hops.loss_fn)
    for batch in BATCHES:
        state, _ = step(state, batch)
    assert_equal(state, two_hops_by_hand())


SHAPES = {"stack": {"in": (LAYERS, WIDTH, 4 * WIDTH), "out": (LAYERS, 4 * WIDTH, WIDTH)}, "head": (WIDTH, 2 * WIDTH)}


def stack_loss(params, batch):
    layer = lambda x, w: (x + jnp.tanh(x @ w["in"]) @ w["out"], None)
    return jnp.square(lax.scan(layer, batch, params["stack"])[0] @ params["head"]).mean()


def stack_params():
    rng = np.random.default_rng(0)
    draw = lambda shape: (rng.normal(size=shape) / WIDTH**0.5).astype(np.float32)
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def stacked_state(params, stage, *, precision="bf16", mesh=None):
    plain = jzero.TrainState.create(params=params, tx=TX)
    return jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, precision=precision), mesh=mesh)


def gathered_shapes(step, *args):
    """Returns the shapes of the results of all gathers."""
    text = step.lower(*args).as_text()
    found = re.findall(r"stablehlo\.all_gather.*?-> tensor<([\dx]+)xbf16>", text)
    return [tuple(map(int, shape.split("x"))) for shape in found]


@pytest.mark.slow
@stages(1, of=(1, 2))
def test_stacks_are_gathered_row_by_row(stage):
    """Gathered as a whole, a stack would be in memory twice. No shard is transposed: they come one behind the other."""
    step, batch = jzero.make_train_step(stack_loss), jnp.ones((8, WIDTH))
    state = stacked_state(stack_params(), stage)
    row, head = 4 * WIDTH**2, 2 * WIDTH**2
    found = gathered_shapes(step, state, batch)
    assert sorted(map(math.prod, found)) == sorted([head, *[row] * (2 * LAYERS)])
    assert (8, WIDTH, 2 * WIDTH // 8) in found, "the head is cut on its second dimension"
    report = jzero.analyze(step, state, batch)
    report.verify()
    assert sum(row.elements for row in report.collectives if row.kind == "all-gather") == head + 2 * LAYERS * row
