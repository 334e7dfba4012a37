"""ZeRO beside tensor parallelism: the loss constrains what it computes to a further axis of the mesh."""

from __future__ import annotations

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import models
from tests.model_axis_models import constrained
from tests.tiers import default_for

TX = optax.sgd(1.0, momentum=0.9)
VOCAB, WIDTH, HIDDEN, HEADS, LAYERS = 128, 32, 96, 4, 3


class Layer(nn.Module):
    """A layer of a Llama, its heads and its hidden units over the model axis."""

    mesh: jax.sharding.Mesh | None

    @nn.compact
    def __call__(self, x, _=None):
        dense = functools.partial(nn.Dense, use_bias=False)
        y = nn.RMSNorm()(x)
        q, k, v = (dense(WIDTH, name=name)(y).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
        q, k, v = (constrained(y, self.mesh, "data", None, "model", None) for y in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / float(np.sqrt(WIDTH // HEADS))
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + dense(WIDTH, name="out")(y)
        y = nn.RMSNorm()(x)
        gate, up = (constrained(dense(HIDDEN, name=n)(y), self.mesh, "data", None, "model") for n in ("gate", "up"))
        return x + dense(WIDTH, name="down")(jax.nn.silu(gate) * up), None


class Llama(nn.Module):
    mesh: jax.sharding.Mesh | None
    scan: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        layer = nn.remat(Layer, prevent_cse=not self.scan) if self.remat else Layer
        if self.scan:
            scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = scanned(self.mesh, name="layers")(x, None)
        else:
            for i in range(LAYERS - 1):
                x, _ = layer(self.mesh, name=f"layer_{i}")(x)
        logits = nn.Dense(VOCAB, use_bias=False, name="head")(nn.RMSNorm()(x))
        return constrained(logits, self.mesh, "data", None, "model")


def next_token_loss(model, params, tokens):
    logits = model.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def split(params, mesh):
    """Kernels of what is constrained, cut over the model axis as Megatron does it."""

    def place(path, x):
        name = path[-2].key if len(path) > 1 else ""
        spec = {"down": (-2,), "out": (-2,)}.get(name, (-1,) if name in ("q", "k", "v", "gate", "up", "head") else ())
        names = ["model" if d - x.ndim in spec else None for d in range(x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, P(*names)))

    return jax.tree_util.tree_map_with_path(place, params)


@functools.cache
def trained_on_one_device(scan):
    """Parameters before and after two steps, and their losses; nothing is constrained."""
    model = Llama(None, scan=scan)
    params = models.draw_params(model, batches()[0])
    state, losses, first = TX.init(params), [], params

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(functools.partial(next_token_loss, model))(params, tokens)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for tokens in batches():
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, first), jax.tree.map(np.asarray, params), losses


def batches():
    return np.random.default_rng(0).integers(0, VOCAB, size=(2, 8, 13))


CASES = [*((scan, remat, 3, 1) for scan in (True, False) for remat in (True, False))]
CASES += [(False, True, stage, 1) for stage in range(3)] + [(True, False, 1, 2)]


@pytest.mark.parametrize(("scan", "remat", "stage", "accumulate_steps"), default_for([(True, True, 3, 1)], CASES))
def test_a_llama_trains_as_on_one_device(scan, remat, stage, accumulate_steps):
    """The reference has one micro-batch: their means are of as many tokens each."""
    mesh = jzero.make_mesh(data=4, model=2)
    first, want, losses = trained_on_one_device(scan)
    model = Llama(mesh, scan=scan, remat=remat)
    state = jzero.TrainState.create(params=split(first, mesh), tx=TX)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    loss_fn = functools.partial(next_token_loss, model)
    step = jzero.make_train_step(loss_fn, remat="as_written", accumulate_steps=accumulate_steps)
    compiled = step.lower(state, batches()[0]).compile()
    for tokens, loss in zip(batches(), losses, strict=True):
        state, metrics = compiled(state, tokens)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    got = jax.tree.map(np.asarray, jzero.gather_params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
    found = re.findall(r"f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    products = {p for p in found if str(HIDDEN) in p.split(",")}
    assert not products, "hidden units lie over two devices"
    assert_each_part_travels_alone(jzero.analyze(step, state, batches()[0]))


def test_sums_over_micro_batches_travel_in_parts():
    mesh, rng = jzero.make_mesh(data=4, model=2), np.random.default_rng(0)
    params = {"up": rng.normal(size=(WIDTH, HIDDEN)) / 6, "down": rng.normal(size=(HIDDEN, WIDTH)) / 9}
    params = jax.tree.map(np.float32, params)
    batch = rng.normal(size=(16, WIDTH)).astype(np.float32)

    def loss_fn(params, x, mesh=mesh):
        return jnp.square(constrained(jnp.tanh(x @ params["up"]), mesh, "data", "model") @ params["down"]).mean()

    specs = {"up": P(None, "model"), "down": P("model")}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
    state = jzero.TrainState.create(params=placed, tx=optax.sgd(1.0))
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=1, persistence_threshold=0), mesh=mesh)
    step = jzero.make_train_step(loss_fn, accumulate_steps=2)
    assert_each_part_travels_alone(jzero.analyze(step, state, batch))
    new, _ = step(state, batch)
    grads = jax.jit(jax.grad(lambda p: loss_fn(p, batch, None)))(params)
    found = jzero.gather_params(new)
    for name, grad in grads.items():
        np.testing.assert_allclose(found[name], params[name] - grad, rtol=1e-5, atol=1e-6)


def assert_each_part_travels_alone(report):
    """Devices along the data axis exchange what one device of the model axis holds; along that none is gathered."""
    plan = report.plan
    held = sum(leaf.param.size // (2 if any(leaf.param.base) else 1) for leaf in plan.leaves)
    assert held < 0.6 * sum(leaf.param.size for leaf in plan.leaves)
    moved = collections.Counter()
    for row in report.collectives:
        moved[row.kind, row.axis] += row.elements
    numbers = 10  # the loss, the norm, each a sum
    if plan.config.stage == 0:
        assert 0 <= moved.pop(("all-reduce", "data")) - 2 * held < numbers
    else:
        assert moved.pop(("reduce-scatter", "data")) == held
        assert moved.pop(("all-reduce", "data")) < numbers
        # At most as often: compilers for CPUs merge gathers of the forward and the backward pass.
        assert 0 < moved.pop(("all-gather", "data")) <= (2 * held if plan.config.stage == 3 else held)
    assert list(moved) == [("all-reduce", "model")], "sums of partial products"
    assert not report.violations


def test_exchanging_a_parameter_whole_is_a_violation(monkeypatch):
    """So compilers do it where a collective over the data axis is left to them: they gather the operand first."""
    monkeypatch.setattr("jzero.layout.route.apply_to_parts", lambda collective, x, before, after: collective(x))
    mesh = jzero.make_mesh(data=4, model=2)
    params = {"w": jnp.ones((64, 128)), "v": jnp.ones((128, 256))}
    params["w"] = jax.device_put(params["w"], NamedSharding(mesh, P(None, "model")))
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(persistence_threshold=0), mesh=mesh)
    step = jzero.make_train_step(lambda p, batch: jnp.tanh(jnp.tanh(batch @ p["w"]) @ p["v"]).mean())
    with pytest.raises(jzero.PlanViolation) as error:
        jzero.analyze(step, state, jnp.ones((8, 64))).verify()
    moved = [
        re.search(r"moves ([\d,]+) elements by (\S+), the traced one ([\d,]+): ", x) for x in error.value.violations
    ]
    found = {x[2]: [int(x[i].replace(",", "")) for i in (1, 3)] for x in moved if x}
    assert sorted(found) == ["all-gather", "reduce-scatter"]
    part = 64 * 128 // 2  # of w, which each device should exchange alone
    assert all(compiled - traced == part for compiled, traced in found.values())
