"""The loss is ordinary code: whatever it does with its parameters, loss and gradients are those of plain jax."""

from __future__ import annotations

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.core.step.inputs import place_inputs
from tests import engine_losses, shared
from tests.engine_losses import COUPLED, D, assert_equal, nested_jit, remat, scan, weight_decay_over_all_leaves


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
        engine_losses.parameters_handed_on,
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
    monkeypatch.setattr("jzero.core.engine.loops.MOST_IN_VAIN", 1.0)

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


# Loops of one's own: micro-batches, updates in one program, and batches that change.


def test_two_updates_of_parameters_held_whole_keep_their_layout():
    """Were the sums not laid out that optax makes, the compiler would return parameters cut as their gradients are."""
    state = shared.sharded({"w": jnp.ones((D, D))}, optax.adam(1e-2), 1)
    loss = lambda p, x: jnp.square(x @ p["w"]).mean()

    @jax.jit
    def two_steps(state, x):
        for _ in range(2):
            state = state.apply_gradients(grads=jax.grad(loss)(state.params, x))
        return state

    assert two_steps(state, engine_losses.batch()["x"]).params["w"].sharding.is_fully_replicated


@pytest.mark.slow
def test_each_call_takes_its_own_batch_whatever_the_last_one_was_like():
    """A batch that is like the last one is not looked at; one that differs in anything is."""
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=shared.sgd(0.0))
    state = jzero.shard_train_state(state, stage=1)
    plan = jzero.plan_of(state)
    loss = lambda p, batch, rng=None: (batch["x"] @ p["w"]).mean() + batch.get("more", 0.0)
    train = jzero.make_train_step(loss)

    def call(batch, **kwargs):
        nonlocal state
        state, metrics = train(state, batch, **kwargs)
        return float(metrics["loss"])

    numpy = lambda value, rows=16: {"x": np.full((rows, 8), value, np.float32)}
    on_mesh = lambda *args: jax.device_put(numpy(*args), plan.batch_sharding)
    elsewhere = lambda *args: jax.device_put(numpy(*args), jax.devices()[0])
    for i, make in enumerate([on_mesh, on_mesh, numpy, on_mesh, elsewhere, on_mesh, numpy, numpy, on_mesh, on_mesh]):
        assert call(make(i)) == i
        assert call(make(-i, 8 * (1 + i % 2))) == -i
    key = jax.random.key(0)
    for rng in (None, key, key, jax.device_put(key, plan.whole_sharding), None):
        assert call(on_mesh(2), rng=rng) == 2
    for more in (1.0, 3.0):
        assert call({**on_mesh(2), "more": jnp.float32(more)}) == 2 + more
        assert call({**on_mesh(2), "more": jax.device_put(jnp.float32(more), plan.whole_sharding)}) == 2 + more
    assert call(on_mesh(5)) == 5
    assert call(elsewhere(7)) == 7
    with pytest.raises(ValueError, match=r"must be divisible by 8"):
        call(elsewhere(5, 12))
    with pytest.raises(TypeError, match=r"x: float"):
        call({"x": 1.0})
    assert call(on_mesh(6)) == 6


def test_a_batch_that_is_overwritten_after_the_call_does_not_change_on_the_devices():
    """Memory that begins at a multiple of 64 bytes is what jax would use where it lies."""
    memory = np.ones(8 * 64 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    batch = memory[start : start + 8 * 64].reshape(8, 64)
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=shared.sgd(0.0))
    plan = jzero.plan_of(jzero.shard_train_state(state, stage=1))
    placed, _, in_place = place_inputs(plan, {"x": batch}, None, 1)
    jax.block_until_ready(placed)
    memory[:] = 7
    assert not in_place
    assert np.all(np.asarray(placed["x"]) == 1)


def test_a_batch_too_small_for_micro_batches_is_refused_after_one_that_fits():
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=shared.sgd(0.0))
    state = jzero.shard_train_state(state, stage=1)
    step = jzero.make_train_step(lambda p, x: (x @ p["w"]).mean(), accumulate_steps=2)
    rows = lambda n: jax.device_put(np.ones((n, 8), np.float32), jzero.plan_of(state).batch_sharding)
    for _ in range(2):
        state, _ = step(state, rows(16))
    with pytest.raises(ValueError, match=r"divisible by 16 .* x accumulate_steps=2"):
        step(state, rows(8))


@pytest.mark.filterwarnings("error")
def test_a_scan_over_each_devices_part_of_a_constant_gathers_nothing():
    """No warning says that it does: the stack is not made of parameters."""

    def loss_fn(params, batch):
        part = lax.dynamic_slice_in_dim(jnp.arange(8.0), lax.axis_index("data") * 4, 4)
        return batch.mean() * params["w"].sum() + lax.scan(lambda c, x: (c + x, None), 0.0, part)[0]

    mesh = jzero.make_mesh(devices=jax.devices()[:2])
    state = shared.sharded({"w": jnp.ones((8, 8))}, optax.sgd(0.1), 3, mesh=mesh)
    assert jzero.value_and_grad(loss_fn)(state, jnp.ones((2, 2)))[0] == 64 + sum(range(8)) / 2


# Derivative rules of the loss's own (`custom_vjp`, `custom_jvp`) and the values that they close over.


RANDOM = np.random.default_rng(0)
PARAMS = {"w": RANDOM.normal(size=(6, 5)).astype(np.float32)}
X = RANDOM.normal(size=(8, 6)).astype(np.float32)


def scaled_backward(factor):
    @jax.custom_vjp
    def scaled(h):
        return h

    scaled.defvjp(lambda h: (h, None), lambda _, g: (g * factor,))
    return scaled


def scaled_tangents(factor):
    @jax.custom_jvp
    def scaled(h):
        return h

    scaled.defjvp(lambda primals, tangents: (primals[0], tangents[0] * factor))
    return scaled


def scaled_forward(factor):
    @jax.custom_vjp
    def scaled(h):
        return h * factor

    scaled.defvjp(lambda h: (h * factor, None), lambda _, g: (g,))
    return scaled


WAYS = {
    "plain": lambda fn, h: fn(h),
    "scan": lambda fn, h: jax.lax.scan(lambda h, _: (jnp.sin(fn(h)), None), h, None, length=2)[0],
    "checkpoint": lambda fn, h: jax.checkpoint(lambda h: jnp.sin(fn(h)))(h),
    "jit": lambda fn, h: jax.jit(lambda h: jnp.sin(fn(h)))(h),
    "vmap": lambda fn, h: jax.vmap(fn)(h),
}


def loss_of(make, way, factor_of):
    """A loss with a rule that closes over `factor_of(batch)`."""
    return lambda params, x: jnp.square(jnp.tanh(WAYS[way](make(factor_of(x)), x @ params["w"]))).mean()


@functools.cache
def sharded(stage):
    """A state for tracing, which consumes none."""
    return shared.sharded(PARAMS, optax.sgd(0.1), stage)


@pytest.mark.parametrize(
    ("way", "make"), [*zip(WAYS, itertools.cycle([scaled_backward, scaled_forward, scaled_tangents]))]
)
def test_a_rule_that_closes_over_a_value_of_the_loss_is_named(make, way):
    kind = "custom_jvp" if make is scaled_tangents else "custom_vjp"
    loss = loss_of(make, way, lambda x: 1 + jnp.abs(x).mean())
    step = jzero.make_train_step(loss, check_rows=False)  # the value is one of several rows
    for stage in (0, 3) if way == "plain" else (3,):
        with pytest.raises(ValueError, match=rf"float32\[\]: .*`{kind} scaled`") as error:
            step.lower(sharded(stage), X)
    assert way != "plain" or __file__ in str(error.value)
    jzero.make_eval_step(loss, check_rows=False).eval_shape(sharded(3), X)  # no rule runs


@pytest.mark.parametrize("make", [scaled_backward, scaled_tangents])
def test_values_from_around_the_step_may_be_closed_over(make):
    loss = lambda way, t: loss_of(make, way, lambda _: t)
    grads = jax.jit(lambda state, t, way: jzero.value_and_grad(loss(way, t))(state, X)[1], static_argnums=2)
    found = grads(sharded(3), jnp.float32(3), "plain")
    expected = jax.jit(jax.grad(loss("plain", 3.0)))(PARAMS, X)
    np.testing.assert_allclose(found["w"][:6], expected["w"], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="as an argument"):
        grads(sharded(3), jnp.float32(3), "jit")
