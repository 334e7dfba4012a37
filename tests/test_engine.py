"""The loss is ordinary code: whatever it does with its parameters, loss and gradients are those of plain jax."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding

import jzero
from tests import models
from tests.tiers import default_for, singles, slow, stages

D = 24


def _params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(
        rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), jnp.float32
    )
    return {
        "w": normal(D, D),
        "v": normal(D, 17),
        "b": normal(D * 5)[:D],
        "odd": normal(13, 11),
        "stack": {"w": normal(6, D, D), "b": normal(6, D)},
        "unused": normal(D, D),
    }


def _batch(rows=24):
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(rows, D)).astype(np.float32), "y": rng.normal(size=(rows, 17)).astype(np.float32)}


def _out(p, h, batch):
    return jnp.square(h @ p["v"] - batch["y"]).mean()


def plain(p, batch):
    return _out(p, jnp.tanh(batch["x"] @ p["w"] + p["b"][None]), batch)


def scan(p, batch):
    body = lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), None)
    return _out(p, lax.scan(body, batch["x"], p["stack"])[0], batch)


def scan_reversed_with_outputs(p, batch):
    body = lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), (layer["b"] * 2).sum())
    h, ys = lax.scan(body, batch["x"], p["stack"], reverse=True, unroll=2)
    return _out(p, h, batch) + ys.sum()


def scan_with_constant_weights(p, batch):
    body = lambda h, _: (jnp.tanh(h @ p["w"] + p["b"][None]), None)
    return _out(p, lax.scan(body, batch["x"], None, length=3)[0], batch)


def scan_carrying_weights(p, batch):
    body = lambda carry, _: ((jnp.tanh(carry[0] @ carry[1]), carry[1]), None)
    return _out(p, lax.scan(body, (batch["x"], p["w"]), None, length=3)[0][0], batch)


def nested_scan(p, batch):
    grouped = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), p["stack"])
    body = lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), None)
    outer = lambda h, group: (lax.scan(body, h, group)[0], None)
    with_warning = lax.scan(outer, batch["x"], grouped)[0]
    return _out(p, with_warning, batch)


def fori_indexing_the_stack(p, batch):
    def body(i, h):
        layer = jax.tree.map(lambda x: x[i], p["stack"])
        return jnp.tanh(h @ layer["w"] + layer["b"][None])

    return _out(p, lax.fori_loop(0, 6, body, batch["x"]), batch)


def python_loop_over_the_stack(p, batch):
    h = batch["x"]
    for i in range(6):
        h = jnp.tanh(h @ p["stack"]["w"][i] + p["stack"]["b"][i][None])
    return _out(p, h, batch)


def remat(p, batch):
    block = jax.checkpoint(lambda w, b, h: jnp.tanh(h @ w + b[None]))
    return _out(p, block(p["w"], p["b"], block(p["w"], p["b"], batch["x"])), batch)


def remat_with_policy(p, batch):
    policy = jax.checkpoint_policies.everything_saveable
    block = jax.checkpoint(lambda w, b, h: jnp.sin(jnp.tanh(h @ w.T.reshape(D, D) + b[None])), policy=policy)
    return _out(p, block(p["w"], p["b"], batch["x"]), batch)


def scan_of_remat(p, batch):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    body = jax.checkpoint(lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), None), policy=policy)
    return _out(p, lax.scan(body, batch["x"], p["stack"])[0], batch)


@jax.jit
def _inner(w, b, h):
    return jnp.tanh(h @ w + b[None])


def nested_jit(p, batch):
    outer = jax.jit(lambda q, h: (_inner(q["w"], q["b"], h), q))
    h, q = outer(p, batch["x"])
    return _out(q, _inner(q["w"], q["b"], h), batch)


def jit_casting_all_parameters(p, batch):
    half = jax.jit(lambda q: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), q))(p)
    return plain(half, batch)


def branches(p, batch):
    h = lax.cond(batch["x"].sum() > 0, lambda q, x: x @ q["w"], lambda q, x: x * q["b"][None], p, batch["x"])
    h = lax.switch(jnp.int32(1), [lambda x: x, lambda x: x @ p["w"] + p["b"][None], jnp.sin], h)
    return _out(p, jnp.tanh(h), batch)


def while_loop(p, batch):
    steps = lax.while_loop(lambda c: (c[1] * jnp.abs(p["b"]).max()) < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0))[0]
    return plain(p, batch) * lax.stop_gradient(steps.astype(jnp.float32))


@jax.custom_vjp
def _scaled(w, h):
    return jnp.sin(h @ w)


_scaled.defvjp(lambda w, h: (_scaled(w, h), (w, h)), lambda r, g: ((r[1].T @ g), 2 * (g @ r[0].T)))


@jax.custom_jvp
def _cubed(x):
    return x**3


_cubed.defjvp(lambda primals, tangents: (_cubed(*primals), 2 * primals[0] ** 2 * tangents[0]))


def custom_rules(p, batch):
    h = _scaled(p["w"], batch["x"] @ p["w"])  # a gradient that differs from autodiff's, on purpose
    return _out(p, h + _cubed(p["b"])[None], batch) + _cubed(p["odd"]).sum()


def vmapped(p, batch):
    return jax.vmap(lambda x, y: jnp.square(jnp.tanh(p["w"] @ x + p["b"]) @ p["v"] - y).mean())(
        batch["x"], batch["y"]
    ).mean()


def gradient_inside(p, batch):
    inner = jax.grad(lambda w: jnp.tanh(batch["x"] @ w).mean())(p["w"])
    return plain(p, batch) + jnp.square(inner).sum() * 0 + jnp.mean(batch["x"] @ p["w"])


def tied(p, batch):
    return _out(p, jnp.tanh(jnp.tanh(batch["x"] @ p["w"]) @ p["w"].T), batch)


def weight_decay_over_all_leaves(p, batch):
    return plain(p, batch) + 0.1 * sum(jnp.square(x).sum() for x in jax.tree.leaves(p))


def weight_norm(p, batch):
    w = p["w"] / jnp.sqrt(jnp.square(p["w"]).sum(0, keepdims=True) + 1e-6)
    return _out(p, jnp.tanh(batch["x"] @ w), batch) + optax.tree.norm(p)


def mixed_parameters(p, batch):
    w = p["w"] + p["unused"] @ p["stack"]["w"][2] + jnp.concatenate([p["w"][:, 12:], p["w"][:, :12]], axis=1)
    return _out(p, jnp.tanh(batch["x"] @ jnp.where(w > 0, w, 0.1 * w)), batch) + jnp.sort(p["odd"], axis=0)[3].sum()


def reused_cheap_results(p, batch):
    """Each step uses its operand twice: repeated naively, 2^12 gathers."""
    w = p["w"]
    for _ in range(12):
        w = w - 0.1 * w * w
    return _out(p, jnp.tanh(batch["x"] @ w), batch)


def recurrence_over_parameters(p, batch):
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
    _, h = lax.associative_scan(combine, (jax.nn.sigmoid(p["w"]), 2 * jax.nn.sigmoid(p["w"])), axis=0)
    return _out(p, jnp.tanh(batch["x"] @ h), batch)


def embedding_lookup(p, batch):
    rows = jnp.abs(batch["x"][:, :4] * 10).astype(jnp.int32) % D
    return _out(p, jnp.take(p["w"], rows, axis=0).mean(1), batch)


def loop_after_layers_that_count(p, batch):
    """Layers also hand on what has no derivative, to what cannot be differentiated."""

    def layer(carry, w):
        h, count = carry
        h = jnp.tanh(h @ w["w"] + w["b"][None])
        one = lax.stop_gradient(h * 0 + 1)
        return (h, count + one.max()), one.mean()

    carry, ones = lax.scan(layer, (batch["x"], 0.0), p["stack"])
    for checkpointed in (layer, jax.checkpoint(layer), jax.checkpoint(layer)):
        carry, one = checkpointed(carry, {"w": p["w"], "b": p["b"]})
        ones = jnp.append(ones, one)
    h, count = carry
    count = lax.while_loop(lambda x: x < 50, lambda x: 2 * x, count + ones.sum())
    return _out(p, h, batch) * count


def loops_after_whole_numbers(p, batch):
    """Calls and loops in loops hand on whole numbers, flags and keys, to what cannot be differentiated."""
    whole = {"w": p["w"], "b": p["b"]}

    def layer(carry, w):
        h, (count, flag, key) = carry
        h = jnp.tanh(h @ w["w"] + w["b"][None])
        return (h, (count + 1, ~flag, jax.random.fold_in(key, count))), count

    def layers(carry, _):
        carry, counts = lax.scan(layer, carry, p["stack"])
        carry, count = layer(carry, whole)
        return carry, counts.sum() + count

    carry = (batch["x"], (0, True, jax.random.key(0)))
    carry, counts = lax.scan(layer, carry, p["stack"])
    carry, more = lax.scan(layers, carry, None, length=2)
    (h, (count, flag, key)), last = jax.jit(jax.checkpoint(layer))(carry, whole)
    rows = jnp.searchsorted(p["b"], jnp.linspace(-1, 1, 4)).astype(jnp.int32)
    size = jnp.abs(lax.stop_gradient(p["w"]) - 1).sum()
    start = (size + count + counts.sum() + more.sum() + last + flag + rows[0], key)
    size, key = lax.while_loop(lambda x: x[0] < 1e4, lambda x: (2 * x[0], jax.random.split(x[1])[0]), start)
    return _out(p, h, batch) * size * 1e-4 * jax.random.uniform(key)


LOSSES = [
    plain,
    scan,
    scan_reversed_with_outputs,
    scan_with_constant_weights,
    scan_carrying_weights,
    fori_indexing_the_stack,
    python_loop_over_the_stack,
    remat,
    remat_with_policy,
    scan_of_remat,
    nested_jit,
    jit_casting_all_parameters,
    branches,
    while_loop,
    custom_rules,
    vmapped,
    gradient_inside,
    tied,
    weight_decay_over_all_leaves,
    weight_norm,
    mixed_parameters,
    reused_cheap_results,
    recurrence_over_parameters,
    embedding_lookup,
    loop_after_layers_that_count,
    loops_after_whole_numbers,
]


@functools.cache
def _sharded(stage, num_devices, **options):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, **options)
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices])
    state = jzero.TrainState.create(params=_params(), tx=optax.sgd(1.0))
    return jzero.shard_train_state(state, config=config, mesh=mesh)


@jax.jit
def _updated(state, grads):
    return state.apply_gradients(grads=grads)


COUPLED = (branches, gradient_inside, loop_after_layers_that_count)
"""Losses that ask something of all rows of a device, with the same answer everywhere."""


def _gradients(state, loss_fn, batch, *, check_rows=True):
    """Loss and whole gradients: with plain SGD at rate 1 the update is the gradient."""
    check_rows = check_rows and loss_fn not in COUPLED
    loss, grads = jzero.value_and_grad(loss_fn, check_rows=check_rows)(state, batch)
    new = _updated(state, grads)
    old, new = jzero.gather_params(state), jzero.gather_params(new)
    return loss, jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), old, new)


def _assert_equal(state, loss_fn, batch):
    # The update is read off a difference of parameters of order one: 3e-6 is some 25 ulp of that. Where the loss
    # casts its parameters to bf16, each device's gradient is rounded to 8 bits before the sum, as in DeepSpeed.
    rtol, atol = (2e-2, 2e-3) if loss_fn is jit_casting_all_parameters else (1e-4, 3e-6)
    want_loss, want = jax.jit(jax.value_and_grad(loss_fn))(_params(), batch)
    loss, grads = _gradients(state, loss_fn, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), grads, want)


# `branches` takes a branch by the local batch: at N=1 that is the whole batch, elsewhere the reference must agree.
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_gradients_equal_plain_jax_at_stage_3(loss_fn):
    batch = _batch()
    if loss_fn is branches:
        batch["x"] = np.abs(batch["x"])
    _assert_equal(_sharded(3, 8), loss_fn, batch)


@pytest.mark.parametrize("prefetch_bytes", [None, 10**6])
def test_the_loss_has_a_gradient_by_the_batch_too(prefetch_bytes, monkeypatch):
    """Also that of what layers hand on which does not depend on parameters."""
    monkeypatch.setattr("jzero.engine.prefetch.MOST_IN_VAIN", 1.0)

    def loss_fn(p, batch):
        def layer(carry, w):
            h, x = carry
            return (jnp.tanh(h @ w["w"] + w["b"][None]), jnp.sin(x)), jnp.cos(x).mean()

        carry, ys = lax.scan(layer, (batch["x"], batch["x"]), p["stack"])
        (h, x), y = jax.checkpoint(layer)(carry, {"w": p["w"], "b": p["b"]})
        return _out(p, h, batch) + x.mean() + ys.sum() + y

    state = _sharded(3, 8, prefetch_bytes=prefetch_bytes)
    got = jax.jit(jax.grad(lambda batch: jzero.value_and_grad(loss_fn)(state, batch)[0]))(_batch())
    want = jax.grad(loss_fn, argnums=1)(_params(), _batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


@pytest.mark.parametrize("prefetch_bytes", [slow(None), 10**6])
@pytest.mark.parametrize("loss_fn", default_for([remat], LOSSES), ids=lambda f: f.__name__)
def test_no_tracer_outlives_its_trace(loss_fn, prefetch_bytes):
    """`jax.checking_leaks` finds what caches of jax would keep alive, and users' own leaks only if there are none."""
    state = _sharded(3, 8, prefetch_bytes=prefetch_bytes)
    with jax.checking_leaks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.make_jaxpr(jzero.value_and_grad(loss_fn, check_rows=loss_fn not in COUPLED))(state, _batch())


@singles(
    lambda x: getattr(x, "__name__", None),
    cell=[(0, 3), (1, 3), (2, 3), (2, 8), (3, 3), (3, 5)],  # stage, devices
    loss_fn=[scan, nested_jit, remat, branches, weight_decay_over_all_leaves],
)
def test_gradients_equal_plain_jax_at_every_stage(loss_fn, cell):
    batch = _batch(rows=120)
    batch["x"] = np.abs(batch["x"])
    _assert_equal(_sharded(*cell), loss_fn, batch)


@singles(
    lambda x: getattr(x, "__name__", None),
    options=[{"reshard_after_forward": False}, {"reduce_scatter": False}],
    loss_fn=[scan, nested_jit, scan_with_constant_weights, custom_rules],
)
def test_options_do_not_change_numbers(loss_fn, options):
    _assert_equal(_sharded(3, 8, **options), loss_fn, _batch())


def test_stack_cut_along_the_scan_is_warned_about():
    """A reshaped stack cannot be sliced on its shards: the numbers are right, and the user is told."""
    with pytest.warns(UserWarning, match="gathers the whole stack.*LeafRule\\(scan_dim=0\\)"):
        _assert_equal(_sharded(3, 8), nested_scan, _batch())


def test_devices_may_take_different_branches():
    """A collective inside a branch would hang; the predicate here differs between devices."""

    def loss_fn(p, batch):
        h = lax.cond(batch["flag"].sum() > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x * p["b"][None], batch["x"])
        return _out(p, h, batch)

    def reference(p, batch):
        flag = batch["flag"][:, None] > 0
        return _out(p, jnp.where(flag, jnp.tanh(batch["x"] @ p["w"]), batch["x"] * p["b"][None]), batch)

    batch = {**_batch(), "flag": np.repeat(np.arange(8) % 2, 3).astype(np.float32)}
    want_loss, want = jax.value_and_grad(reference)(_params(), batch)
    loss, grads = _gradients(_sharded(3, 8), loss_fn, batch, check_rows=False)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6), grads, want)


@stages(1, 3)
def test_integer_boolean_and_complex_leaves(stage):
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(D, D)), jnp.float32),
        "table": jnp.asarray(rng.integers(0, D, (16, 8)), jnp.int32),
        "mask": jnp.asarray(rng.integers(0, 2, (D, 16)), bool),
        "z": jnp.asarray(rng.normal(size=(D, 16)) + 1j * rng.normal(size=(D, 16)), jnp.complex64),
    }

    def loss_fn(p, batch):
        h = batch["x"] @ p["w"][:, p["table"][3]]
        z = (batch["x"] @ p["z"]) * p["mask"].astype(jnp.float32).mean(0)[None]
        return jnp.square(h).mean() + jnp.square(jnp.abs(z)).mean()

    trained = lambda p: jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), p)
    frozen = lambda p: jax.tree.map(lambda x: not jnp.issubdtype(x.dtype, jnp.inexact), p)
    tx = optax.chain(optax.masked(optax.sgd(1.0), trained), optax.masked(optax.set_to_zero(), frozen))
    state = jzero.TrainState.create(params=params, tx=tx)
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))
    batch = _batch()
    new, metrics = jzero.make_train_step(loss_fn)(state, batch)
    inexact = {k: params[k] for k in ("w", "z")}
    want_loss, want = jax.value_and_grad(lambda q: loss_fn({**params, **q}, batch))(inexact)
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(want), rtol=2e-6)
    got = jzero.gather_params(new)
    for name in ("w", "z"):
        np.testing.assert_allclose(got[name], params[name] - want[name], rtol=1e-4, atol=3e-6)
    for name in ("table", "mask"):
        assert (np.asarray(got[name]) == np.asarray(params[name])).all()


@stages(3, of=(1, 3))
def test_parameters_sharded_over_a_model_axis_keep_it(stage):
    mesh = jzero.make_mesh(data=4, model=2)
    params = _params()
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    params["w"] = jax.device_put(params["w"], spec)
    state = jzero.TrainState.create(params=params, tx=optax.adam(1e-2))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    plan = jzero.plan_of(state)
    assert plan.opt_state[0].mu["w"] == jax.sharding.PartitionSpec("data", "model")
    assert state.opt_state[0].mu["w"].addressable_shards[0].data.shape == (D // 4, D // 2)
    reference = jzero.TrainState.create(params=_params(), tx=optax.adam(1e-2))
    grads = jax.grad(scan_and_plain)(reference.params, _batch())
    reference = reference.apply_gradients(grads=grads)
    state, _ = jzero.make_train_step(scan_and_plain)(state, _batch())
    got = jzero.gather_params(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, reference.params)
    assert state.params["w"].sharding.spec == plan.params["w"]


def scan_and_plain(p, batch):
    return scan(p, batch) + plain(p, batch)


@stages(3, of=(1, 2, 3))
def test_hybrid_sharding_replicates_the_shards(stage):
    mesh = jzero.make_mesh(replica=2, data=4)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, replica_axis="replica")
    state = jzero.TrainState.create(params=_params(), tx=optax.sgd(1.0))
    _assert_equal(jzero.shard_train_state(state, config=config, mesh=mesh), scan_and_plain, _batch())


class Dropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(32)(x))


@pytest.mark.parametrize("stage", [1, 3])
def test_dropout_key_is_folded_with_the_device(stage):
    model = Dropout()
    x = np.ones((8, D), np.float32)
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.sgd(1.0))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))

    def loss_fn(params, batch, rng):
        out = model.apply({"params": params}, batch, rngs={"dropout": rng})
        return jnp.square(out).mean(), jzero.PerExample(out)

    (_, out), _ = jzero.value_and_grad(loss_fn, has_aux=True)(state, x, rng=jax.random.key(7))
    masks = np.asarray(out) != 0
    assert len({row.tobytes() for row in masks}) == 8
    keys = [jax.random.fold_in(jax.random.key(7), i) for i in range(8)]
    want = [model.apply(variables, x[i : i + 1], rngs={"dropout": key})[0] for i, key in enumerate(keys)]
    np.testing.assert_allclose(out, np.stack(want), rtol=1e-5)


class BatchNormState(TrainState):
    batch_stats: dict


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name, momentum=0.9)(nn.Dense(32)(x))
        return nn.Dense(17)(nn.relu(x))


@stages(3, of=(0, 2, 3))
def test_batch_norm_over_the_zero_axis_equals_the_whole_batch(stage):
    plain_model, model = Normed(), Normed(axis_name="data")
    batch = _batch()
    variables = plain_model.init(jax.random.key(0), batch["x"])
    tx = optax.sgd(0.1)
    state = BatchNormState.create(apply_fn=None, tx=tx, **variables)
    sharded = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))
    assert type(sharded) is BatchNormState

    def loss_of(model):
        def loss_fn(params, batch, *, batch_stats):
            variables = {"params": params, "batch_stats": batch_stats}
            out, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
            return jnp.square(out - batch["y"]).mean(), {"batch_stats": new["batch_stats"], "size": jnp.abs(out).mean()}

        return loss_fn

    step = jzero.make_train_step(loss_of(model), has_aux=True, mutable=("batch_stats",))
    grad = jax.value_and_grad(loss_of(plain_model), has_aux=True)
    for _ in range(3):
        (loss, aux), grads = grad(state.params, batch, batch_stats=state.batch_stats)
        state = state.apply_gradients(grads=grads, batch_stats=aux["batch_stats"])
        sharded, metrics = step(sharded, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["aux"]["size"], aux["size"], rtol=1e-5)
    assert set(metrics["aux"]) == {"size"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), sharded.batch_stats, state.batch_stats
    )
    got = jzero.gather_params(sharded)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, state.params)


def test_weighted_loss_is_the_mean_over_tokens_not_over_devices():
    batch = {**_batch(), "mask": (np.arange(24) % 7 < np.arange(24) // 4).astype(np.float32)}

    def weighted(p, batch):
        losses = jnp.square(jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]).mean(1)
        return jzero.Weighted((losses * batch["mask"]).sum(), (batch["mask"] > 0).sum())  # an integer count will do

    def reference(p, batch):
        result = weighted(p, batch)
        return result.sum / result.weight

    want_loss, want = jax.value_and_grad(reference)(_params(), batch)
    for stage in (1, 3):
        loss, grads = _gradients(_sharded(stage, 8), weighted, batch)
        np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6), grads, want)
    # Without any weight the step is skipped, and the state keeps its values to the bit.
    nothing = {**batch, "mask": np.zeros(24, np.float32)}
    state = jzero.shard_train_state(_sharded(3, 8), stage=3)
    before = jax.tree.map(np.asarray, jzero.unshard_train_state(state))
    state, metrics = jzero.make_train_step(weighted)(state, nothing)
    assert not metrics["step_applied"]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, jzero.unshard_train_state(state)), before)


def test_auxiliary_values_are_reduced_as_they_say():
    def loss_fn(p, batch):
        out = batch["x"] @ p["w"]
        aux = {"mean": out.mean(), "count": jzero.Summed((out > 0).sum()), "rows": jzero.PerExample(out.sum(1))}
        return jnp.square(out).mean(), aux

    batch = _batch()
    out = batch["x"] @ np.asarray(_params()["w"])
    for steps in (1, 3):
        step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=steps)
        _, metrics = step(jzero.shard_train_state(_sharded(3, 8), stage=3), batch)
        np.testing.assert_allclose(metrics["aux"]["mean"], out.mean(), rtol=1e-4, atol=1e-6)
        assert int(metrics["aux"]["count"]) == int((out > 0).sum())
        np.testing.assert_allclose(metrics["aux"]["rows"], out.sum(1), rtol=1e-4, atol=1e-5)


def test_narrow_auxiliary_values_do_not_overflow():
    """Averages come back in their dtype, sums in one that holds them; a mark around a tree is one around each leaf."""

    def loss_fn(p, batch):
        means = {"f16": jnp.float16(20000), "bf16": jnp.bfloat16(3e38), "e4m3": jnp.float8_e4m3fn(288)}
        sums = {"u8": jnp.uint8(200), "i8": [jnp.int8(-100)], "bool": jnp.bool_(True), "f16": jnp.float16(20000)}
        aux = {"means": means, "sums": jzero.Summed(sums), "none": jzero.Summed(None)}
        return jnp.square(batch["x"] @ p["w"]).mean(), aux

    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=3)
    _, metrics = step(jzero.shard_train_state(_sharded(2, 8), stage=2), _batch())
    aux = metrics["aux"]
    assert {k: (str(x.dtype), float(x)) for k, x in aux["means"].items()} == {
        "f16": ("float16", 20000),
        "bf16": ("bfloat16", float(jnp.bfloat16(3e38))),
        "e4m3": ("float8_e4m3fn", 288),
    }
    assert jax.tree.map(float, aux["sums"]) == {"u8": 24 * 200, "i8": [-2400], "bool": 24, "f16": 24 * 20000}
    assert aux["none"] is None


@stages(2)
def test_accumulated_micro_batches_equal_the_whole_batch(stage):
    batch = _batch(rows=48)
    once = jzero.make_train_step(scan_and_plain)
    thrice = jzero.make_train_step(scan_and_plain, accumulate_steps=3, clip_norm=0.1)
    clipped = jzero.make_train_step(scan_and_plain, clip_norm=0.1)
    fresh = lambda: jzero.shard_train_state(_sharded(stage, 8), config=jzero.plan_of(_sharded(stage, 8)).config)
    a, b, c = (step(fresh(), batch) for step in (once, thrice, clipped))
    np.testing.assert_allclose(a[1]["loss"], b[1]["loss"], rtol=1e-6)
    np.testing.assert_allclose(a[1]["grad_norm"], b[1]["grad_norm"], rtol=2e-6)
    pair = jzero.gather_params(b[0]), jzero.gather_params(c[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *pair)
    reference = jax.grad(scan_and_plain)(_params(), batch)
    scale = 0.1 / (optax.tree.norm(reference) + 1e-6)
    want = jax.tree.map(lambda p, g: p - scale * g, _params(), reference)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), pair[0], want)


@stages(1, 3)
def test_plain_jit_step_with_apply_gradients(stage):
    """The user's own loop: `jax.grad` on natural parameters and Flax's method under plain `jax.jit`.

    Two updates in a row and two in a scan.
    """
    state = TrainState.create(apply_fn=None, params=models.mlp_params(), tx=optax.adamw(1e-2))
    reference = state
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))

    @jax.jit
    def steps(state, batch):
        def once(state, _):
            grads = jax.grad(models.mlp_loss)(jzero.natural_params(state), batch)
            return state.apply_gradients(grads=grads), None

        state, _ = once(once(state, None)[0], None)
        return jax.lax.scan(once, state, length=2)[0]

    for seed in range(2):
        batch = models.mlp_batch(8, seed)
        state = steps(state, batch)
        for _ in range(4):
            grads = jax.grad(models.mlp_loss)(reference.params, batch)
            reference = reference.apply_gradients(grads=grads)
    assert steps._cache_size() == 1  # nothing recompiled: the state left `jit` with the types it came with
    plan = jzero.plan_of(state)
    want = jax.tree.map(lambda spec, plan=plan: NamedSharding(plan.mesh, spec), (plan.params, plan.opt_state))
    for x, sharding in zip(jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves(want), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    got = jzero.gather_params(state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, reference.params)


@stages(1, of=(1, 2))
def test_two_updates_of_parameters_held_whole_keep_their_layout(stage):
    """Were the sums not laid out that optax makes, the compiler would return parameters cut as their gradients are."""
    plain = jzero.TrainState.create(params={"w": jnp.ones((D, D))}, tx=optax.adam(1e-2))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))
    loss = lambda p, x: jnp.square(x @ p["w"]).mean()

    @jax.jit
    def two_steps(state, x):
        for _ in range(2):
            state = state.apply_gradients(grads=jax.grad(loss)(state.params, x))
        return state

    assert two_steps(state, _batch()["x"]).params["w"].sharding.is_fully_replicated


@pytest.mark.parametrize(("stage", "jitted"), [(3, True), slow(1, True), slow(1, False), slow(3, False)])
def test_line_search_gets_natural_gradients_and_its_function(stage, jitted):
    """`lbfgs` takes `grad=` (as `value_and_grad` returns it, padded) and a callable over whole parameters."""
    batch, params, tx = models.mlp_batch(8), models.mlp_params(), optax.lbfgs()
    state = jzero.TrainState.create(params=params, tx=tx)
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0))

    def step(state):
        value, grad = jzero.value_and_grad(models.mlp_loss)(state, batch)
        extra = {"value": value, "grad": grad, "value_fn": lambda p: models.mlp_loss(p, batch)}
        updates, opt_state = state.tx.update(grad, state.opt_state, state.params, **extra)
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    step = jax.jit(step) if jitted else step
    opt_state = tx.init(params)
    for _ in range(2):
        value, grad = jax.value_and_grad(models.mlp_loss)(params, batch)
        extra = {"value": value, "grad": grad, "value_fn": lambda p: models.mlp_loss(p, batch)}
        updates, opt_state = tx.update(grad, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
        state = step(state)
    got = jzero.gather_params(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, params)


def test_one_use_of_a_computed_weight_gathers_and_reduces_once():
    params = {"w": jnp.ones((24, 64))}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    loss = lambda p, x: jnp.square(x @ (p["w"] * jax.nn.sigmoid(p["w"]) + p["w"] ** 2)).mean()
    text = jzero.make_train_step(loss).lower(state, np.ones((8, 24), np.float32)).as_text()
    assert text.count("stablehlo.all_gather") == 2  # forward and backward
    assert text.count("stablehlo.reduce_scatter") == 1


def test_optimizer_that_mixes_elements_takes_empty_leaves():
    params = {"w": jnp.ones((24, 64)), "empty": jnp.zeros((0, 3))}
    tx = optax.lbfgs(1e-2, linesearch=None)
    state = jzero.TrainState.create(params=params, tx=tx)
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    loss = lambda p, x: jnp.square(x @ p["w"] - 1).mean()
    x = np.ones((8, 24), np.float32)
    updates, _ = tx.update(jax.grad(loss)(params, x), tx.init(params), params)
    got, _ = jzero.make_train_step(loss)(state, x)
    np.testing.assert_allclose(jzero.gather_params(got)["w"], params["w"] + updates["w"], atol=1e-6)


def test_the_key_of_a_loss_is_asked_for_and_refused_by_name():
    state = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(state, stage=1)
    batch, key = jnp.ones((8, 8)), jax.random.key(0)

    def noisy(params, batch, rng):
        return (batch @ params["w"] + jax.random.normal(rng, batch.shape)).mean()

    def scaled(params, batch, scale=2.0):
        return scale * (batch @ params["w"]).mean()

    def silent(params, batch):
        return (batch @ params["w"]).mean()

    value_and_grad = jzero.value_and_grad(noisy)
    assert value_and_grad(state, batch, rng=key)[0].shape == ()
    with pytest.raises(
        TypeError, match=r"The loss takes a third argument, 'rng': pass a key, `step\(state, batch, rng="
    ):
        value_and_grad(state, batch)
    with pytest.raises(TypeError, match=r"A key was passed as `rng`, but the loss takes none"):
        jzero.value_and_grad(silent)(state, batch, rng=key)
    assert float(jzero.value_and_grad(scaled)(state, batch)[0]) == 16.0
    wrapped = functools.wraps(silent)(lambda *args: silent(*args[:2]))  # takes more than it says
    assert jzero.value_and_grad(wrapped)(state, batch, rng=key)[0].shape == ()


@pytest.mark.parametrize("kind", ["train", "gradients", "evaluate"])
def test_each_call_takes_its_own_batch_whatever_the_last_one_was_like(kind):
    """A batch that is like the last one is not looked at; one that differs in anything is."""
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=optax.sgd(0.0))
    state = jzero.shard_train_state(state, stage=1)
    plan = jzero.plan_of(state)
    loss = lambda p, batch, rng=None: (batch["x"] @ p["w"]).mean() + batch.get("more", 0.0)
    train, gradients, evaluate = jzero.make_train_step(loss), jzero.value_and_grad(loss), jzero.make_eval_step(loss)

    def call(batch, **kwargs):
        nonlocal state
        if kind == "train":
            state, metrics = train(state, batch, **kwargs)
            return float(metrics["loss"])
        return float(gradients(state, batch, **kwargs)[0] if kind == "gradients" else evaluate(state, batch, **kwargs))

    numpy = lambda value, rows=16: {"x": np.full((rows, 8), value, np.float32)}
    on_mesh = lambda *args: jax.device_put(numpy(*args), plan.batch_sharding)
    elsewhere = lambda *args: jax.device_put(numpy(*args), jax.devices()[0])
    for i, make in enumerate([on_mesh, on_mesh, numpy, on_mesh, elsewhere, on_mesh, numpy, numpy, on_mesh, on_mesh]):
        assert call(make(i)) == i
        assert call(make(-i, 8 * (1 + i % 3))) == -i
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
    with pytest.raises(TypeError, match=r"x/0: float"):
        call({"x": [1.0, 2.0]})
    with pytest.raises(TypeError, match=r"x: float"):
        call({"x": 1.0})
    assert call(on_mesh(6)) == 6


def test_a_batch_too_small_for_micro_batches_is_refused_after_one_that_fits():
    state = jzero.TrainState.create(params={"w": jnp.eye(8)}, tx=optax.sgd(0.0))
    state = jzero.shard_train_state(state, stage=1)
    step = jzero.make_train_step(lambda p, x: (x @ p["w"]).mean(), accumulate_steps=2)
    rows = lambda n: jax.device_put(np.ones((n, 8), np.float32), jzero.plan_of(state).batch_sharding)
    for _ in range(2):
        state, _ = step(state, rows(16))
    with pytest.raises(ValueError, match=r"divisible by 16 .* x accumulate_steps=2"):
        step(state, rows(8))
