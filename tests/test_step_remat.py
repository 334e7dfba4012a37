"""Recomputation: it changes no number but memory, and reaches loops, branches and checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.estimate.traced_collectives import traced_collectives
from tests.shared import whole
from tests.step_memory_models import (
    BATCH,
    HIDDEN,
    LAYERS,
    LOCAL,
    ROWS,
    WIDTH,
    config_of,
    layer,
    mlp_loss,
    mlp_state,
    reckoned,
    stack_loss,
    stack_state,
)


def rematted_loss(params, x):
    return jnp.square(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0]).mean()


def jitted_loss(params, x):
    return jax.jit(stack_loss)(params, x)


def test_what_scanned_layers_keep_with_and_without_remat():
    state = stack_state(config_of(3))
    output = LOCAL * WIDTH * 4  # whose square is taken
    kept = LAYERS * LOCAL * (WIDTH + 2 * HIDDEN) * 4 + output  # input, tangents t, and 1 - t for jax
    products = LAYERS * LOCAL * (WIDTH + HIDDEN) * 4 + output  # input and first product
    recomputed = LAYERS * LOCAL * WIDTH * 4 + output  # its input alone
    cases = [
        (stack_loss, None, products),
        (stack_loss, "cheap", products),
        (stack_loss, False, kept),
        (stack_loss, True, recomputed),
        (jitted_loss, True, recomputed),
        (rematted_loss, None, recomputed),
        (rematted_loss, False, kept),
    ]
    for loss, remat, want in cases:
        memory = reckoned(loss, state, remat=remat)
        assert memory.activation_bytes == pytest.approx(want, abs=8), (loss.__name__, remat, memory)  # and a scalar
        assert {row.times for row in memory.activations} == {1, LAYERS}


def chunked_loss(checkpointed):
    """A loop that closes over a parameter, as for the cross-entropy of long sequences, chunk by chunk."""

    def loss(params, x):
        one = lambda rows: jnp.square(jnp.tanh(rows @ params["up"]) @ params["down"]).sum()
        one = jax.checkpoint(one) if checkpointed else one
        return jax.lax.map(one, x.reshape(8, -1, WIDTH)).sum() / x.size

    return loss


@pytest.mark.parametrize(
    ("cell", "stage"), [((True, None), 0), ((False, True), 2), ((False, "as_written"), 3), ((True, False), 3)]
)
def test_loops_that_close_over_parameters_are_recomputed_at_every_stage(stage, cell):
    """Kept without recomputation: t and 1 - t and the output of every chunk; with it: nothing but the rows.

    All train as plain jax does.
    """
    checkpointed, remat = cell
    recomputed = remat is True or (checkpointed and remat is None)
    tx, many = optax.sgd(0.1), np.tile(BATCH, (64, 1))
    step, state = jzero.make_train_step(chunked_loss(checkpointed), remat=remat), chunked_state(stage, tx)
    estimated = jzero.estimate_step_memory(step, state, many)
    rows = 64 * LOCAL
    if recomputed:
        assert estimated.activation_bytes <= rows * WIDTH * 4 + 64
    else:
        assert estimated.activation_bytes >= rows * (2 * HIDDEN + WIDTH) * 4
    compiled = step.lower(state, many).compile()
    limit = rows * 2 * HIDDEN * 4 // 2 + 4 * 4 * 2 * WIDTH * HIDDEN
    assert (compiled.memory_analysis().temp_size_in_bytes < limit) == recomputed
    state, metrics = compiled(state, many)
    plain, want, norm = chunked_gradients()
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    for name, x in whole(state.params).items():
        np.testing.assert_allclose(x, plain[name] - np.float32(0.1) * want[name], rtol=1e-5, atol=1e-6)


def chunked_state(stage, tx):
    """Of parameters that differ, so that a gradient shows which it is of."""
    rng = np.random.default_rng(2)
    draw = lambda *shape: (rng.normal(size=shape) / 8).astype(np.float32)
    params = {"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)}
    return jzero.shard_train_state(jzero.TrainState.create(params=params, tx=tx), config=config_of(stage))


@functools.cache
def chunked_gradients():
    """The parameters, their gradients in plain jax, and the norm of these."""
    params = whole(chunked_state(0, optax.sgd(0.1)).params)
    grads = jax.tree.map(np.asarray, jax.jit(jax.grad(mlp_loss))(params, BATCH))
    return params, grads, np.sqrt(sum(np.square(x).sum() for x in grads.values()))


def test_checkpoints_in_branches_hold_at_stage_3():
    """With `jax.checkpoint` the rows and the result are kept; without it, the branch's hyperbolic tangents as well."""
    block = lambda params, x: jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"])
    # Not as many rows as a parameter has: jax hands what has one shape to the backward pass in one place.
    many, rows = jax.ShapeDtypeStruct((48 * ROWS, WIDTH), jnp.float32), 48 * LOCAL
    kept, temporaries = {}, {}
    for branch in (block, jax.checkpoint(block)):

        def loss(params, x, branch=branch):
            return jnp.square(jax.lax.cond(x[0, 0] > 0, branch, lambda _, x: x, params, x)).mean()

        step = jzero.make_train_step(loss, check_rows=False)  # a branch on one row
        report = jzero.analyze(step, mlp_state(config_of(3)), many)
        kept[branch is block] = report.estimated.activation_bytes
        temporaries[branch is block] = report.memory.temporaries
    assert kept[False] == pytest.approx(2 * rows * WIDTH * 4, abs=16)
    assert kept[True] > rows * 2 * HIDDEN * 4
    assert temporaries[False] < temporaries[True] - rows * HIDDEN * 4


@pytest.mark.parametrize("remat", [None, True])
def test_remat_in_fori_loops_gathers_one_layer_at_a_time(remat):
    def loss(params, x):
        one = lambda i, y: layer(y, jax.tree.map(lambda w: w[i], params))[0]
        return jnp.square(jax.lax.fori_loop(0, LAYERS, one, x)).mean()

    jaxpr = jzero.make_train_step(loss, remat=remat).trace(stack_state(config_of(3)), BATCH).jaxpr
    gathered = [c.num_elements for x in traced_collectives(jaxpr) if x.gathers for c in x.collectives]
    assert set(gathered) == {WIDTH * HIDDEN}


def test_remat_looks_into_branches_and_checkpoints():
    def loss(params, x):
        scanned = lambda x: jax.lax.scan(layer, x, params)[0]
        inner = jax.checkpoint(scanned)
        return jnp.square(jax.lax.cond(x[0, 0] > 0, scanned, inner, x)).mean()

    kept = {}
    for remat in (None, True):
        step = jzero.make_train_step(loss, remat=remat, check_rows=False)  # a branch on one row
        kept[remat] = jzero.estimate_step_memory(step, stack_state(config_of(1)), BATCH).activation_bytes
    assert kept[True] < kept[None] - LAYERS * LOCAL * 2 * HIDDEN * 4 // 2, kept
