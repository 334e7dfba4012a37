"""What a step keeps between its passes if the user says nothing, see [Note: Kept by default]."""

import collections
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jzero
from jzero.analysis import fit
from jzero.core.engine import recompute
from jzero.core.jaxpr.equations import equations_of
from jzero.core.jaxpr.primitives import REMAT
from jzero.core.step import choice, jitted
from jzero.estimate import keeping
from jzero.estimate.block_costs import BlockCost, BlockCosts
from jzero.estimate.step_memory import memory_of_step
from jzero.estimate.traced_collectives import traced_collectives
from jzero.machines import limits
from jzero.machines.machine import machine
from tests import shared
from tests.shared import whole
from tests.test_keep import (
    gathers,
    make_batch,
    make_params,
    scan_loss,
    stacked_params,
)
from tests.test_keep import loss_fn as squeezed_once

LAYERS = 3
PATHS = ["embed", *(f"blocks/{i}/{name}" for i in range(LAYERS) for name in ("down", "up"))]


def loss_fn(params, batch):
    """That of `tests.test_keep`, whose shares have two functions of scores: as written, it saves as much."""
    x = jnp.sin(batch @ params["embed"])
    for w in params["blocks"]:
        q = (x @ w["up"]).reshape(-1, 17, 3)
        shares = jnp.tanh(jnp.tanh(jnp.einsum("bik,bjk->bij", q, jnp.sin(q))))
        x = x + jnp.einsum("bij,bjk->bik", shares, jnp.cos(q)).reshape(-1, 51) @ w["down"]
    return jnp.square(jax.nn.softmax(x @ params["embed"].T)).mean()


@functools.cache
def on_one_device():
    """Its value and gradients by plain jax."""
    return jax.jit(jax.value_and_grad(loss_fn))(make_params(LAYERS), make_batch())


def perceptron(params, batch):
    """Activations between products with weights: to save them takes less time than to make them again."""
    x = batch @ params["embed"]
    for w in params["blocks"]:
        x = x + jax.nn.gelu(x @ w["up"] + 1) @ w["down"]
    return jnp.square(x @ params["embed"].T).mean()


def perceptron_params(*widths):
    draw = lambda *shape: (np.random.default_rng(2).normal(size=shape) / 32).astype(np.float32)
    return {"embed": draw(23, 35), "blocks": [{"up": draw(35, width), "down": draw(width, 35)} for width in widths]}


def make_state(params=None, stage=3, **fields):
    return shared.sharded(make_params(LAYERS) if params is None else params, shared.sgd(1.0), stage, **fields)


@pytest.fixture
def memory(monkeypatch):
    """Gives the devices a memory, of which a step may use what is set; without, they are virtual CPU devices."""
    of_device = types.SimpleNamespace(limit=None)
    monkeypatch.setattr(choice, "memory_to_spend", lambda *args: (of_device.limit, machine("h200:8")))
    return of_device


def reckoned(remat, batch):
    step = jzero.make_train_step(loss_fn, remat=remat)
    return memory_of_step(step, (make_state(), batch, None), machine("h200:8")).peak


def test_everything_that_fits_is_kept_by_the_first_trace(memory):
    """And the numbers are those of plain jax."""
    memory.limit, calls = 2**30, []
    step = jzero.make_train_step(lambda params, batch: calls.append(len(batch)) or loss_fn(params, batch))
    state, batch = make_state(), make_batch()
    assert gathers(step.trace(state, batch).jaxpr) == dict.fromkeys(PATHS, 1)
    assert step.recomputation(state, batch) == jzero.Keep(params="all", blocks=LAYERS)
    new, metrics = step(state, batch)
    assert calls.count(len(batch) // 8) <= 2, "the trace that was estimated is the one that runs"
    loss, grads = on_one_device()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    moved = jax.tree.map(np.subtract, make_params(LAYERS), whole(new.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), moved, grads)


def test_as_many_blocks_stay_as_fit(memory):
    """Activations are most of this step: between no block and all of them lies a number of blocks."""
    batch, state = jax.ShapeDtypeStruct((1 << 16, 23), jnp.float32), make_state()
    peaks = [reckoned(jzero.Keep(params="all", blocks=blocks), batch) for blocks in range(LAYERS + 1)]
    for share in (0.35, 0.8):
        memory.limit = (peaks[0] + share * (peaks[-1] - peaks[0])) / keeping.KEPT_SHARE
        plan = jzero.make_train_step(loss_fn).plan(state, batch)
        assert plan.kept.params == set(PATHS)
        assert plan.kept.blocks == sum(peak <= keeping.KEPT_SHARE * memory.limit for peak in peaks) - 1 < LAYERS
        assert plan.kept.peak == peaks[plan.kept.blocks]
        assert f"kept between passes: all parameters, {plan.kept.blocks} of {LAYERS} blocks" in str(plan)
    memory.limit = reckoned("cheap", batch) / keeping.KEPT_SHARE
    assert jzero.make_train_step(loss_fn).plan(state, batch).kept is None


def test_no_more_is_kept_than_plain_jax_saves(memory):
    """Scores and shares of all blocks are more than the shares, all that differentiation saves of `tanh`."""
    memory.limit, batch = 2**30, make_batch()
    step, state = jzero.make_train_step(squeezed_once), make_state()
    assert step.recomputation(state, batch) == jzero.Keep(params="all", blocks=1)
    saved = lambda remat: (
        memory_of_step(
            jzero.make_train_step(squeezed_once, remat=remat), (state, batch, None), machine("h200:8")
        ).activation_bytes
    )
    one, two = (saved(jzero.Keep(params="all", blocks=blocks)) for blocks in (1, 2))
    assert one <= saved(jzero.Keep(params="all", remat="as_written")) < two
    new, _ = step(state, batch)
    grads = jax.jit(jax.grad(squeezed_once))(make_params(LAYERS), batch)
    moved = jax.tree.map(np.subtract, make_params(LAYERS), whole(new.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), moved, grads)


def test_blocks_that_are_faster_as_written_stay_so(memory):
    memory.limit, batch, params = 2**30, make_batch(), perceptron_params(1700, 1700, 1700, 7, 7)
    step, state = jzero.make_train_step(perceptron), make_state(params)
    assert step.recomputation(state, batch) == jzero.Keep(params="all", remat="as_written")
    assert "all parameters, 5 of 5 blocks" in str(step.plan(state, batch))
    assert not any(eqn.primitive.name in REMAT for eqn in equations_of(step.trace(state, batch).jaxpr))
    new, _ = step(state, batch)
    grads = jax.jit(jax.grad(perceptron))(params, batch)
    moved = jax.tree.map(np.subtract, params, whole(new.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), moved, grads)


def test_what_judges_blocks_traces_them_for_the_step(memory, monkeypatch):
    memory.limit, traced, keeping_of = 2**30, [], recompute.keeping

    def counted(eqns, *, fuses_products):
        apply, wrap = keeping_of(eqns, fuses_products=fuses_products)
        return (lambda eqn, xs: (fuses_products or traced.append(eqn.primitive.name), apply(eqn, xs))[1]), wrap

    monkeypatch.setattr(recompute, "keeping", counted)
    state, batch, counts = make_state(), make_batch(), []
    for remat in (None, jzero.Keep(params="all", blocks=LAYERS)):
        traced.clear()
        step = jzero.make_train_step(loss_fn, remat=remat)
        step.trace(state, batch)
        counts.append(traced.count("dot_general"))
        assert step.recomputation(state, batch) == jzero.Keep(params="all", blocks=LAYERS)
    assert counts[0] == counts[1] > 0


def test_large_last_blocks_are_not_left_as_written(memory):
    """Of such blocks compilers compute gradients late, and two live beside all."""
    memory.limit, params = 2**30, perceptron_params(1700, 1700, 1700)
    step = jzero.make_train_step(perceptron)
    assert step.recomputation(make_state(params), make_batch()) == jzero.Keep(params="all", blocks=3)


def test_blocks_that_save_no_more_than_cheap_does_are_kept(memory, monkeypatch):
    """Even if plain jax saves less than either, as of products before a `relu`."""
    bytes_of = {"kept": 5, "cheap": 5, "as_written": 4}
    monkeypatch.setattr(keeping.BlockCosts, "of", lambda self, how: [BlockCost(bytes_of[how], 1.0)] * LAYERS)
    memory.limit = 2**30
    kept = jzero.make_train_step(loss_fn).recomputation(make_state(), make_batch())
    assert kept == jzero.Keep(params="all", blocks=LAYERS)


def test_blocks_that_are_loops_count_as_none():
    def layer(x, w):
        scores = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", x @ w, x))
        return x + jnp.einsum("bqk,bkc->bqc", scores, x), None

    looped = lambda w, x: jnp.square(lax.scan(layer, x, w)[0]).mean()
    costs = BlockCosts(jax.make_jaxpr(looped)(jnp.ones((LAYERS, 16, 16)), jnp.ones((2, 4, 16))), [], machine("h200:8"))
    assert [costs.of(how) for how in ("kept", "as_written")] == [[BlockCost(0, 0.0)]] * 2


def test_nothing_is_estimated_where_all_values_of_the_loss_fit(memory, monkeypatch):
    """Beside a whole state; until somebody asks what was kept. What is only moved takes nothing."""
    batch, calls = make_batch(), []
    everything = reckoned(jzero.Keep(params="all", blocks=LAYERS), batch)
    monkeypatch.setattr(keeping, "memory_of_step", lambda *args: calls.append(args) or memory_of_step(*args))
    for memory.limit, estimated in ((200_000, True), (300_000, False)):
        calls.clear()
        moving = lambda params, batch: (
            loss_fn(params, batch) + jnp.broadcast_to(batch.T, (1_000, *batch.T.shape)).mean()
        )
        jzero.make_train_step(moving).lower(make_state(), batch)
        assert bool(calls) == estimated
        calls.clear()
        step, state = jzero.make_train_step(loss_fn), make_state()
        step.lower(state, batch)
        assert bool(calls) == estimated
        kept = step.plan(state, batch).kept
        assert (kept.blocks, len(calls)) == (LAYERS, 1)
        assert kept.peak == everything < keeping.KEPT_SHARE * memory.limit


def test_an_estimate_that_fails_stops_no_step(memory, checks_may_fail, monkeypatch, caplog):
    monkeypatch.setattr(keeping, "memory_of_step", shared.raising(NotImplementedError("an unknown equation")))
    memory.limit = 2**30
    assert jzero.make_train_step(loss_fn).plan(make_state(), make_batch()).kept.peak is None
    memory.limit = 200_000
    step, state, batch = jzero.make_train_step(loss_fn), make_state(), make_batch()
    assert step.recomputation(state, batch) == "cheap"
    assert np.isfinite(step(state, batch)[1]["loss"])
    assert "A check failed, and the step goes on without it" in caplog.text


def test_a_larger_batch_is_decided_anew(memory):
    """In place, too, where a call skips all checks but whether the arrays of the state are alive."""
    small, large = make_batch(), np.tile(make_batch(), (64, 1))
    low, high = (reckoned(jzero.Keep(params="all", blocks=LAYERS), x) for x in (small, large))
    memory.limit = (low + high) / 2 / keeping.KEPT_SHARE
    step, state = jzero.make_train_step(loss_fn), make_state()
    for batch, num_compiled in ((small, 1), (small, 1), (large, 2)):
        state, _ = step(state, jax.device_put(batch, jzero.plan_of(state).batch_sharding))
        assert len(step._choices.made) == num_compiled
    everything, less = (step.plan(state, batch).kept for batch in (small, large))
    assert everything.blocks == LAYERS
    assert less is None or less.blocks < LAYERS


def test_a_step_inside_another_program_decides_likewise(memory):
    memory.limit = 2**30
    step = jzero.make_train_step(loss_fn)
    assert gathers(jax.jit(step).trace(make_state(), make_batch()).jaxpr) == dict.fromkeys(PATHS, 1)


def test_rows_of_stacks_do_not_stay(memory):
    memory.limit = 2**30
    state = make_state(stacked_params())
    step = jzero.make_train_step(scan_loss)
    assert step.recomputation(state, make_batch()) == jzero.Keep(params=("embed",), blocks=1)
    counts = collections.Counter()
    for x in traced_collectives(step.trace(state, make_batch()).jaxpr):
        counts[x.path] += x.gathers
    assert counts["embed"] == 1
    assert counts["blocks/up"] > 1


def test_what_only_looks_like_a_stack_stays(memory):
    """A kernel of three dimensions beside a stack, which a loop reads."""
    memory.limit = 2**30
    params = {**stacked_params(), "kernel": np.ones((3, 23, 23), np.float32)}
    state = make_state(params)
    assert {x.path: x.scan_dim for x in jzero.plan_of(state).leaves}["kernel"] == 0
    loss = lambda params, batch: scan_loss(params, jnp.einsum("bi,kij->bj", jnp.sin(batch), params["kernel"]))
    kept = jzero.make_train_step(loss).recomputation(state, make_batch())
    assert kept == jzero.Keep(params=("embed", "kernel"), blocks=1)


@pytest.mark.parametrize(
    ("remat", "fields"),
    [("cheap", {}), (False, {}), (None, {"stage": 2}), (None, {"offload": jzero.Offload(optimizer="host")})],
)
def test_who_says_something_gets_that(memory, remat, fields):
    memory.limit = 2**30
    step, state = jzero.make_train_step(loss_fn, remat=remat), make_state(**fields)
    assert step.resolved(state, make_batch()) is step


def test_virtual_devices_keep_what_they_must():
    step = shared.make_train_step(loss_fn)
    assert step.recomputation(make_state(), make_batch()) == "cheap"


def test_a_machine_that_is_not_there_decides_as_if_it_were():
    """A few MiB on 8 H200: everything is kept by an estimate for them, and what is kept takes more."""
    step, batch = jzero.make_train_step(loss_fn), jax.ShapeDtypeStruct((1 << 12, 23), jnp.float32)
    of = lambda remat: jzero.estimate_step_memory(step.with_remat(remat), make_state(), batch, topology="h200:8")
    assert of(None) == of(jzero.Keep(params="all", blocks=LAYERS)) != of("cheap")


def test_fit_keeps_what_a_step_would_within_its_limit(monkeypatch):
    """Of a few MiB, not of an H200's memory; a candidate says what it is, since a step sees the whole machine."""
    monkeypatch.setattr(fit, "_filled", lambda *args, **options: None)
    plain = jzero.TrainState.create(params=make_params(LAYERS), tx=shared.sgd(1.0))
    batch = jax.ShapeDtypeStruct((1 << 12, 23), jnp.float32)
    options = {"topology": "h200:8", "config": shared.config(3), "stages": (3,), "confirm": False}

    def candidate(limit):
        choice = jzero.fit(plain, loss_fn, batch, hbm_bytes=limit, remat=(None,), max_accumulate_steps=1, **options)
        return next(x for x in choice.tried if x.config.reshard_after_forward)

    plenty = candidate(2**30)
    assert plenty.remat == jzero.Keep(params="all", blocks=LAYERS)
    scarce = candidate(plenty.memory.peak)  # a step would take `KEPT_SHARE` of it
    assert scarce.remat == "cheap" or scarce.remat.blocks < LAYERS
    assert scarce.memory.peak < plenty.memory.peak


@pytest.mark.parametrize("taken", [None, 100, 200])  # GiB that jax may take
def test_the_memory_to_spend_is_that_of_the_device(monkeypatch, taken):
    """90 % of an H200's 141 GB, or what jax may take of it, in steps of 256 MiB."""
    stats = {} if taken is None else {"bytes_limit": taken * 2**30 + 5}
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: stats)
    mesh = types.SimpleNamespace(devices=np.array([device] * 2))
    monkeypatch.setattr(limits, "Mesh", types.SimpleNamespace)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    usable = int(0.9 * machine("h200:2").hbm_bytes)
    assert limits.memory_to_spend(mesh, None)[0] == (100 * 2**30 if taken == 100 else usable)


def test_a_call_with_the_state_of_the_last_one_places_nothing(memory, monkeypatch):
    placed = []
    place = jitted.place_inputs
    monkeypatch.setattr(jitted, "place_inputs", lambda *args: placed.append(1) or place(*args))
    step, state = jzero.make_train_step(loss_fn), make_state()
    for _ in range(3):
        state, _ = step(state, jax.device_put(make_batch(), jzero.plan_of(state).batch_sharding))
    assert len(placed) == 1
