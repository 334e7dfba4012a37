"""Flax NNX: models, optimizers, tied variables, batch statistics, what a loss writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
from tests import shared

D = 23
TX = optax.adam(1e-2, eps=1e-6)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, norm: bool = False, rate: float = 0.0):
        self.a = nnx.Linear(D, 41, rngs=rngs)
        self.norm = nnx.BatchNorm(41, axis_name="data" if norm else None, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(rate, rngs=rngs) if rate else None
        self.b = nnx.Linear(41, D, rngs=rngs)
        self.c = self.b  # tied

    def __call__(self, x):
        h = self.a(x)
        h = self.norm(h) if self.norm else h
        h = nnx.relu(h)
        h = self.drop(h) if self.drop else h
        return self.c(nnx.relu(self.b(h) @ self.a.kernel[...]))


def loss_fn(model, batch):
    return jnp.square(model(batch) - 1).mean()


def _batch(seed=0):
    return np.random.default_rng(seed).normal(size=(16, D)).astype(np.float32)


def _pair(**kwargs):
    model = MLP(nnx.Rngs(0), **kwargs)
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@functools.cache
def _reference():
    """Parameters and statistics after two steps of plain NNX, and the losses of three."""
    model, optimizer = _pair(norm=True)
    model.norm.axis_name = None  # one device sees the whole batch
    losses = [float(_plain_step(model, optimizer, _batch(seed))) for seed in range(2)]
    params, stats = _params(model), _params(model, nnx.BatchStat)
    return params, stats, [*losses, float(_plain_step(model, optimizer, _batch(2)))]


@nnx.jit
def _plain_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def _params(model, kind=nnx.Param):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, kind)))


def _assert_close(a, b, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


@pytest.mark.smoke
def test_pair_trains_like_plain_nnx():
    """Statistics follow the whole batch. The pair that is sharded is kept; what a step is given is consumed."""
    reference, stats, losses = _reference()
    plain = _pair(norm=True)
    state = first = jzero.shard_train_state(plain, config=shared.config(3))
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(plain)))
    step = jzero.make_train_step(loss_fn)
    for seed, want in enumerate(losses[:2]):
        state, metrics = step(state, _batch(seed))
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    model, optimizer = state
    assert isinstance(model, MLP)
    assert isinstance(optimizer, nnx.Optimizer)
    assert int(optimizer.step[...]) == 2
    assert first[0].a.kernel.get_value().is_deleted()
    assert model.a.kernel.get_value().sharding.spec == jzero.plan_of(state).params["a"]["kernel"]
    with pytest.raises(RuntimeError, match="'a/kernel' was consumed"):
        first[0].a.kernel[...]
    whole, _ = jzero.unshard_train_state(state)
    assert whole.b is whole.c
    _assert_close(_params(whole, nnx.BatchStat), stats)
    found = _params(whole)
    found["a"]["bias"] = reference["a"]["bias"]  # before a norm: the gradient is zero, and rounding
    _assert_close(found, reference)
    value = jzero.make_eval_step(lambda model, batch: {"loss": loss_fn(model, batch)})(state, _batch(2))
    np.testing.assert_allclose(value["loss"], losses[2], rtol=1e-4)


class Raw(nnx.Module):
    """A module that holds arrays rather than variables, one of them not trained."""

    def __init__(self):
        self.w = jnp.asarray(_batch()[:5])
        self.deep = nnx.List([jnp.ones((D, 3)) / D, nnx.Param(jnp.ones((D, 3)))])
        self.shift = jnp.ones(())

    def __call__(self, x):
        return jnp.tanh(x[:, :5] @ self.w) @ (self.deep[0] + self.deep[1][...]) + self.shift


def test_raw_arrays_chosen_by_path_and_size_train_like_plain_nnx():
    wrt = lambda path, x: path[-1] != "shift" and x.size in (5 * D, 3 * D)
    make = lambda model: (model, nnx.Optimizer(model, TX, wrt=wrt))
    (model, optimizer), step = make(Raw()), jzero.make_train_step(loss_fn)
    pair = jzero.shard_train_state(make(Raw()), config=shared.config(3))
    assert np.size(pair[0].w.addressable_shards[0].data) == 15  # padded: 115 elements on 8 devices

    @nnx.jit
    def plain_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, grads)
        return loss

    for seed in range(2):
        pair, metrics = step(pair, _batch(seed))
        np.testing.assert_allclose(metrics["loss"], plain_step(model, optimizer, _batch(seed)), rtol=1e-5)
    found = jzero.unshard_train_state(pair)[0]
    for x, y in ((found.w, model.w), (found.deep[0], model.deep[0]), (found.deep[1][...], model.deep[1][...])):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.shift, 1)


def test_a_swapped_pair_and_a_model_alone_are_refused_by_name():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with pytest.raises(TypeError, match="order of the pair"):
        jzero.shard_train_state((optimizer, model), stage=3)
    with pytest.raises(TypeError, match="MLP alone has no optimizer"):
        jzero.shard_train_state(model, stage=3)


class Writing(nnx.Module):
    """A model that does something to itself in each call."""

    def __init__(self, write):
        self.linear, self.write = nnx.Linear(D, D, rngs=nnx.Rngs(0)), write
        self.cache, self.key = nnx.Cache(jnp.zeros(2, jnp.float16)), nnx.Variable(jax.random.key(0))
        self._calls, self.log = 0, ["made"]

    def __call__(self, x):
        self.write(self, x)
        return self.linear(x)


def _sharded(model, stage=3, **kwargs):
    pair = (model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param))
    return jzero.shard_train_state(pair, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0, **kwargs))


def _normalized():
    return nnx.SpectralNorm(nnx.Linear(D, 13, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


def _loss_that_writes(model, x):
    return jnp.square(model(x, update_stats=True)).mean()


@functools.cache
def _normalized_reference():
    """Parameters after two steps of plain NNX, and their losses."""
    model = _normalized()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(_loss_that_writes)(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, _batch(seed))) for seed in range(2)]
    return _params(model), losses


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # of `nnx.SpectralNorm` in bf16
@pytest.mark.parametrize(("stage", "own_update", "precision"), [(1, False, "bf16"), (2, True, "fp32")])
def test_what_a_model_writes_into_its_parameters_is_kept(stage, own_update, precision):
    reference, losses = _normalized_reference()
    state = _sharded(_normalized(), stage, precision=precision)
    step, loss_and_grads = jzero.make_train_step(_loss_that_writes), jzero.value_and_grad(_loss_that_writes)
    for seed, want in enumerate(losses):
        if own_update:
            loss, grads = loss_and_grads(state, _batch(seed))
            state[1].update(state[0], grads)
        else:
            state, metrics = step(state, _batch(seed))
            loss = metrics["loss"]
        np.testing.assert_allclose(loss, want, rtol=1e-5 if precision == "fp32" else 0.02)
    atol = 1e-5 if precision == "fp32" else 0.01
    _assert_close(_params(jzero.unshard_train_state(state)[0]), reference, atol)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_a_model_sows_is_the_losss_own():
    def loss_fn(model, x):
        loss = jnp.square(model(x)).mean()
        return loss, jzero.PerExample(model.hidden.get_value()[0])

    state = _sharded(Writing(lambda model, x: model.sow(nnx.Intermediate, "hidden", x)))
    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=2)
    for _ in range(2):
        state, metrics = step(state, _batch())
        assert metrics["aux"].shape == (16, D)
    assert not hasattr(state[0], "hidden")


def _appends(model, x):
    model.log.append("called")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda m, x: setattr(m, "_calls", m._calls + 1), "_calls: 0, then 1\n.*nnx.Variable"),
        (_appends, "log/1: None, then 'called'"),
        (lambda m, x: setattr(m, "last", x), "last: None, then JitTracer"),
        (lambda m, x: setattr(m, "hidden", nnx.Intermediate(x[0])), r"hidden: float32\[23\], added"),
        (lambda m, x: delattr(m, "cache"), r"cache: float16\[2\], deleted"),
        (lambda m, x: m.cache.set_value(m.cache[...][:1]), r"cache: float16\[2\], then float16\[1\]"),
        (lambda m, x: m.cache.set_value(m.cache[...] + x[0, :2]), r"cache: float16\[2\], then float32\[2\]"),
    ],
)
def test_changes_that_a_step_cannot_keep_are_refused_by_name(write, message):
    state = _sharded(Writing(write))
    with pytest.raises(ValueError, match=message):
        jzero.make_train_step(loss_fn).eval_shape(state, _batch())
    jzero.make_eval_step(lambda model, x: {"loss": loss_fn(model, x)}).eval_shape(state, _batch())


def test_parameters_on_the_host_cannot_be_written():
    state = _sharded(_normalized(), offload=jzero.Offload(optimizer="host", params="host"))
    with pytest.raises(ValueError, match=r"host .*'layer_instance/kernel'"):
        jzero.make_train_step(lambda model, x: model(x, update_stats=True).mean()).eval_shape(state, _batch())
