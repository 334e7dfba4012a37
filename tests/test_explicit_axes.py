"""Explicit mesh axes that the model itself uses, beside ZeRO's."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests.tiers import slow

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
TX = optax.sgd(0.1)
LAYERS, WIDTH, HIDDEN, VOCAB, SEQ = 3, 12, 16, 18, 6
SPECS = {
    "embed": P(),
    "layers": {"q": P(None, None, "model"), "o": P(None, "model"), "scale": P()},
    "head": P(None, "model"),
}


def draw_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 3
    layers = {"q": draw(LAYERS, WIDTH, HIDDEN), "o": draw(LAYERS, HIDDEN, WIDTH), "scale": draw(LAYERS, WIDTH)}
    return {"embed": draw(VOCAB, WIDTH), "layers": layers, "head": draw(WIDTH, VOCAB)}


PARAMS = draw_params()
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (16, SEQ + 1)).astype(np.int32)


class Plain:
    """The model's operations on one device."""

    einsum = staticmethod(lambda formula, x, y, spec: jnp.einsum(formula, x, y))
    lay_out = staticmethod(lambda x, spec: x)
    take = staticmethod(lambda table, index: table[index])


class Explicit(Plain):
    """The same over an Explicit axis."""

    einsum = staticmethod(lambda formula, x, y, spec: jnp.einsum(formula, x, y, out_sharding=spec))
    lay_out = staticmethod(jax.sharding.reshard)
    take = staticmethod(lambda table, index: table.at[index].get(out_sharding=P(None, None, None)))


def layer(ops, w, x):
    q = ops.einsum("bsd,dh->bsh", x * w["scale"][None, None], w["q"], P(None, None, "model"))
    q = jax.nn.silu(q).reshape(*q.shape[:2], 4, -1)  # heads over the axis
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, q), -1e9)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q).reshape(*x.shape[:2], -1)
    return x + ops.einsum("bsh,hd->bsd", y, w["o"], P(None, None, None))


def loss_of(ops, how):
    def loss_fn(params, tokens):
        x = ops.take(params["embed"], tokens[:, :-1])
        block = lambda w, x: layer(ops, w, x)
        block = jax.checkpoint(block) if "remat" in how else jax.jit(block) if "jit" in how else block
        if "scan" in how:
            x, _ = lax.scan(lambda x, w: (block(w, x), None), x, params["layers"])
        else:
            for i in range(LAYERS):
                x = block(jax.tree.map(lambda w, i=i: w[i], params["layers"]), x)
        if "cond" in how:
            x = lax.cond(params["embed"][0, 0] < 9, jnp.sin, lambda x: x, x)
        logits = ops.lay_out(x @ params["head"], P(None, None, None))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_state(stage=3):
    place = lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec))
    state = jzero.TrainState.create(params=jax.tree.map(place, PARAMS, SPECS), tx=TX)
    return jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0), mesh=MESH)


def trained_on_one_device(how):
    loss, grads = jax.jit(jax.value_and_grad(loss_of(Plain, how)))(PARAMS, TOKENS)
    return loss, optax.apply_updates(PARAMS, jax.tree.map(lambda g: -0.1 * g, grads))


def assert_near(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
    ("how", "stage", "options"),
    [
        ("scan cond", 3, {}),
        slow("unrolled jit", 2, {"accumulate_steps": 2}),
        slow("unrolled", 3, {}),
        slow("unrolled remat", 3, {"remat": "as_written"}),
        slow("scan remat", 1, {}),
        slow("scan", 3, {"remat": True}),
        slow("scan", 3, {"remat": jzero.Keep(params="all")}),
    ],
)
def test_models_train_as_on_one_device(how, stage, options):
    loss, new = trained_on_one_device(how)
    step, state = jzero.make_train_step(loss_of(Explicit, how), **options), make_state(stage)
    with jax.set_mesh(MESH):  # where new arrays have its types
        state, metrics = step(state, jax.device_put(TOKENS, NamedSharding(MESH, P("data"))))
        assert_near(metrics["loss"] + 0, loss)
        assert_near(jzero.gather_params(state), new)
    assert state.params["layers"]["q"].sharding.spec == P(
        *[None, "data", "model"] if stage == 3 else [None, None, "model"]
    )


def test_what_the_model_says_is_a_constraint():
    text = jzero.make_train_step(loss_of(Explicit, "unrolled")).lower(make_state(), TOKENS).as_text()
    said = re.findall(r"sdy.sharding_constraint.*\{\}, \{\}, \{\"model\"\}.*tensor<4x6x16xf32>", text)
    assert len(said) >= LAYERS  # each layer's `q`


def test_calls_beside_steps():
    make = lambda key: jzero.TrainState.create(
        params={"w": jax.random.normal(key, (WIDTH, HIDDEN), out_sharding=P(None, "model"))}, tx=TX
    )

    types = set()

    def loss_fn(params, x):
        types.add(jax.typeof(params["w"]).sharding.spec)
        product = jnp.einsum("bd,dh,kh->bk", x, params["w"], params["w"], out_sharding=P(None, None))
        return jnp.square(product - 1).mean()

    config, x = jzero.ZeroConfig(stage=3, persistence_threshold=0), np.ones((16, WIDTH), np.float32)
    state = jzero.init_train_state(make, jax.random.key(0), config=config, mesh=MESH)
    w = np.asarray(jax.random.normal(jax.random.key(0), (WIDTH, HIDDEN)))
    np.testing.assert_array_equal(jzero.gather_params(state)["w"], w)
    assert state.params["w"].sharding.spec == P("data", "model")
    want = np.square(x @ w @ w.T - 1).mean()
    assert_near(jzero.make_eval_step(loss_fn)(state, x), want)
    with jax.set_mesh(MESH):
        assert_near(jax.jit(jzero.value_and_grad(loss_fn))(state, x)[0], want)
    assert types == {P(None, "model")}
    jzero.check_equivalence(loss_fn, state, [x]).check()
    elsewhere = jax.sharding.AbstractMesh((16, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    step = jzero.make_train_step(loss_fn)
    peaks = [jzero.estimate_step_memory(step, state, x, mesh=mesh).peak for mesh in (None, elsewhere)]
    assert min(peaks) > 0


class Partitioned(nnx.Module):
    """A model of Flax's newer examples, whose kernels name mesh axes."""

    def __init__(self, is_explicit):
        draw = lambda key, shape, dtype: jnp.asarray(np.random.default_rng(0).normal(size=shape) / 4, dtype)
        init = lambda *names: nnx.with_partitioning(draw, names)
        make = lambda *sizes, names: nnx.Linear(*sizes, use_bias=False, kernel_init=init(*names), rngs=nnx.Rngs(0))
        self.up, self.down = make(WIDTH, HIDDEN, names=("fsdp", "tensor")), make(HIDDEN, 4, names=("tensor", "fsdp"))
        self.is_explicit = is_explicit

    def __call__(self, x):
        spec = P(None, None) if self.is_explicit else None
        return jnp.einsum("bh,ho->bo", jnp.tanh(self.up(x)), self.down.kernel[...], out_sharding=spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_nnx_models_that_name_axes(kind):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    config = jzero.ZeroConfig(stage=3, axis="fsdp", persistence_threshold=0)
    x = np.random.default_rng(2).normal(size=(16, WIDTH)).astype(np.float32)
    with jax.set_mesh(mesh):
        model = Partitioned(kind == AxisType.Explicit)
        up, down = (np.asarray(layer.kernel[...]) for layer in (model.up, model.down))
        optimizer = jzero.shard_train_state(nnx.ModelAndOptimizer(model, TX, wrt=nnx.Param), config=config, mesh=mesh)
        assert optimizer.model.up.kernel[...].sharding.spec == P("fsdp", "tensor")
        step = jzero.make_train_step(lambda model, x: jnp.square(model(x) - 1).mean())
        optimizer, metrics = step(optimizer, x)
        params = jzero.gather_params(optimizer)
    plain = lambda up, down: jnp.square(jnp.tanh(x @ up) @ down - 1).mean()
    loss, grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(up, down)
    assert_near(np.asarray(metrics["loss"]), loss)
    for name, old, grad in (("up", up, grads[0]), ("down", down, grads[1])):
        assert_near(np.asarray(params[name]["kernel"][...]), old - 0.1 * grad)
