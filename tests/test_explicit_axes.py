"""Explicit mesh axes that the model itself uses, beside ZeRO's."""

from __future__ import annotations

import functools
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
from tests import shared
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
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (24, SEQ + 1)).astype(np.int32)


class Plain:
    """The model's operations on one device."""

    einsum = staticmethod(lambda formula, x, y, spec: jnp.einsum(formula, x, y))
    lay_out = staticmethod(lambda x, spec: x)
    take = staticmethod(lambda table, index: table[index])


class Explicit(Plain):
    """The same over Explicit axes: of the lines, one names ZeRO's, and the others leave it out."""

    einsum = staticmethod(lambda formula, x, y, spec: jnp.einsum(formula, x, y, out_sharding=P("data", *spec[1:])))
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
    return shared.sharded(jax.tree.map(place, PARAMS, SPECS), TX, stage, mesh=MESH)


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
        slow("scan remat", 3, {"remat": jzero.Keep(params="all")}),
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
    said = re.findall(r"sdy.sharding_constraint.*\{\}, \{\}, \{\"model\"\}.*tensor<6x6x16xf32>", text)
    assert len(said) >= LAYERS  # each layer's `q`


def test_calls_beside_steps():
    make = lambda key: jzero.TrainState.create(
        params={"w": jax.random.normal(key, (WIDTH, HIDDEN), out_sharding=P("data", "model"))}, tx=TX
    )

    types = set()

    def loss_fn(params, x):
        types.add(jax.typeof(params["w"]).sharding.spec)
        product = jnp.einsum("bd,dh,kh->bk", x, params["w"], params["w"], out_sharding=P("data", None))
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


class Gemma(nnx.Module):
    """A layer of Flax's example `gemma`: parameters and, with `spec=P`, lines name the mesh's axes, ZeRO's too."""

    def __init__(self, spec):
        rng, rngs = np.random.default_rng(0), nnx.Rngs(0)
        draw = lambda key, shape, dtype: jnp.asarray(rng.normal(size=shape).astype(np.float32) / 3)
        metadata = lambda *names: {"out_sharding": P(*names)}
        make = lambda formula, *shape, names: nnx.Einsum(
            formula, shape, rngs=rngs, kernel_init=draw, kernel_metadata=metadata(*names)
        )
        self.spec = spec
        self.embed = nnx.Embed(
            VOCAB, WIDTH, rngs=rngs, embedding_init=draw, embedding_metadata=metadata("tensor", "fsdp")
        )
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs, scale_init=draw, scale_metadata=metadata("tensor"))
        self.qkv = make("BTD,SNDH->SBTNH", 3, 2, WIDTH, 5, names=(None, "tensor", "fsdp", None))
        self.out = make("BTNH,NHD->BTD", 2, 5, WIDTH, names=("tensor", None, "fsdp"))
        self.up = make("BTD,DF->BTF", WIDTH, HIDDEN, names=("fsdp", "tensor"))
        self.down = make("BTF,FD->BTD", HIDDEN, WIDTH, names=("tensor", "fsdp"))

    def __call__(self, tokens):
        stream = self.spec("fsdp", None, "tensor")  # of [B, T, D] and [B, T, F]
        x = self.embed(tokens, out_sharding=stream)
        q, k, v = self.qkv(self.norm(x), out_sharding=self.spec(None, "fsdp", None, "tensor", None))
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), jnp.einsum("BTNH,BSNH->BNTS", q, k), -1e9)
        x += self.out(jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores), v), out_sharding=stream)
        x += self.down(nnx.gelu(self.up(x, out_sharding=stream)), out_sharding=stream)
        return self.embed.attend(self.norm(x), out_sharding=stream)


def cross_entropy(model, tokens):
    logits = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -(jax.nn.one_hot(tokens[:, 1:], VOCAB) * logits).sum(-1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [(AxisType.Explicit, {"accumulate_steps": 2}), (AxisType.Auto, {})])
def test_flax_gemma_trains_on_its_mesh(kind, options):
    make_mesh = functools.partial(jax.make_mesh, axis_names=("fsdp", "tensor"), axis_types=(kind,) * 2)
    make_model = functools.partial(Gemma, P if kind == AxisType.Explicit else lambda *names: None)
    with jax.set_mesh(make_mesh((1, 1), devices=jax.devices()[:1])):
        plain = make_model()
        loss, grads = nnx.jit(nnx.value_and_grad(cross_entropy))(plain, TOKENS)
        want = jax.tree.map(lambda w, g: np.asarray(w) - np.float32(0.1) * np.asarray(g), nnx.state(plain), grads)
    config, mesh = jzero.ZeroConfig(stage=3, axis="fsdp", persistence_threshold=0), make_mesh((4, 2))
    with jax.set_mesh(mesh):
        optimizer = nnx.ModelAndOptimizer(make_model(), TX, wrt=nnx.Param)
        optimizer = jzero.shard_train_state(optimizer, config=config, mesh=mesh)
        optimizer, metrics = jzero.make_train_step(cross_entropy, **options)(optimizer, TOKENS)
        params = jzero.gather_params(optimizer)
    assert_near(np.asarray(metrics["loss"]), np.asarray(loss))
    assert_near(jax.tree.map(np.asarray, nnx.to_pure_dict(params)), nnx.to_pure_dict(want))
    assert optimizer.model.up.kernel[...].sharding.spec == P("fsdp", "tensor")
