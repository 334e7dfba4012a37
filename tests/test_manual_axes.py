"""Losses that call `jax.shard_map` themselves, over an axis of the mesh that is not ZeRO's."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import shared
from tests.stablehlo import in_line

WIDTH, HIDDEN = 16, 64


def first_or_second(yes, no, x):
    return lax.cond(lax.axis_index("model") > 0, yes, no, x)


def turns(body, x):
    return lax.scan(lambda c, _: (body(c), None), x, length=3)[0]


INSIDE = {
    "literals": lambda x: jnp.maximum(2.5 * x + 1, 0.5).at[0].set(1.0),
    "gather": lambda x: x + lax.all_gather(x, "model", axis=1, tiled=True).sum(),
    "exchange": lambda x: x + lax.all_to_all(jnp.stack([x, 2 * x]), "model", 0, 0).sum(0),
    "permute": lambda x: x + lax.ppermute(x, "model", [(0, 1)]),
    "scatter": lambda x: x + lax.psum_scatter(jnp.hstack([x, 2 * x]), "model", scatter_dimension=1, tiled=True),
    "scan": lambda x: turns(lambda c: jax.nn.relu(c) + jnp.sin(c), x),
    "while_loop": lambda x: x * lax.while_loop(lambda c: c < 3, lambda c: c + 1.5, 0.0),
    "cond": lambda x: first_or_second(lambda x: 3 * jax.nn.relu(x), jnp.sin, x),
    "remat_with_policy": jax.checkpoint(
        lambda x: jax.nn.relu(jnp.sin(x) * 2) * x, policy=jax.checkpoint_policies.nothing_saveable
    ),
}


def parameters(layers=()):
    rng = np.random.default_rng(0)
    sizes = {"up": (*layers, WIDTH, HIDDEN), "down": (*layers, HIDDEN, WIDTH)}
    params = {name: rng.normal(size=size).astype(np.float32) / 5 for name, size in sizes.items()}
    return params, rng.normal(size=(8, WIDTH)).astype(np.float32)


def split(fn, mesh):
    """`fn(x, up, down)` on the half of the hidden units that each device along the model axis has."""
    return jax.shard_map(
        lambda *args: lax.psum(fn(*args), "model"),
        mesh=mesh,
        axis_names={"model"},
        in_specs=(P(), P(None, "model"), P("model", None)),
        out_specs=P(),
    )


def state_of(params, mesh, **config):
    """Kernels lie over the model axis as Megatron cuts them."""
    cut = {"up": -1, "down": -2}
    specs = {k: P(*("model" if d - x.ndim == cut[k] else None for d in range(x.ndim))) for k, x in params.items()}
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
    state = jzero.TrainState.create(params=placed, tx=shared.sgd(1.0))
    return jzero.shard_train_state(state, config=jzero.ZeroConfig(**config, persistence_threshold=0), mesh=mesh)


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)


@pytest.mark.slow
def test_what_is_computed_inside():
    """The reference is plain jax: the mean of the loss of each device's rows, by the same `shard_map`."""
    mesh = jzero.make_mesh(data=4, model=2)
    params, batch = parameters()
    layer = split(lambda x, up, down: sum(fn(x @ up) for fn in INSIDE.values()) @ down, mesh)

    def loss_fn(p, batch):
        return jnp.square(layer(batch, p["up"], p["down"])).mean()

    def loss_of_parts(p):
        return lax.map(lambda rows: loss_fn(p, rows), batch.reshape(4, -1, WIDTH)).mean()

    want, want_grads = jax.jit(jax.value_and_grad(loss_of_parts))(params)
    loss_and_grads = jzero.value_and_grad(loss_fn, check_rows=False)
    loss, grads = loss_and_grads(state_of(params, mesh, stage=3), batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert_close(grads, want_grads)


def test_a_gather_of_the_loss_is_not_done_again():
    """The backward pass gathers parameters again; what the loss itself gathers is kept, as without jzero."""
    mesh = jzero.make_mesh(data=4, model=2)
    params, batch = parameters()
    gathering = jax.shard_map(
        lambda x, up, down: jnp.sin(lax.all_gather(jnp.sin(x @ up), "model", axis=1, tiled=True)) @ down,
        mesh=mesh,
        axis_names={"model"},
        in_specs=(P(), P(None, "model"), P()),
        out_specs=P(),
        check_vma=False,
    )

    def loss_fn(p, batch):
        return jnp.square(gathering(batch, p["up"], p["down"])).mean()

    step = jzero.make_train_step(loss_fn, remat="as_written")
    text = in_line(step.lower(state_of(params, mesh, stage=3), batch).as_text())
    gathers = re.findall(r"all_gather.*-> tensor<(\d+)x(\d+)xf32>", text)
    # The gradient of the batch is not wanted, so "up" is needed once.
    assert collections.Counter(gathers) == {("16", "32"): 1, ("32", "16"): 2, ("2", "64"): 1}


@pytest.mark.parametrize(("scan", "check_vma"), [(True, True), (False, False)])
def test_parameters_that_enter_whole_are_not_kept(scan, check_vma):
    """Where jax tracks what varies over an axis it casts a parameter that does not: this is no reason to keep it."""
    mesh = jzero.make_mesh(data=4, model=2)
    layers, width = 3, 64
    params = {"k": np.random.default_rng(0).normal(size=(layers, width, width)).astype(np.float32) / width}
    mixed = jax.shard_map(
        lambda x, k: jnp.sin(x @ k) * 2,
        mesh=mesh,
        axis_names={"model"},
        in_specs=(P("model"), P()),
        out_specs=P("model"),
        check_vma=check_vma,
    )

    def loss_fn(p, batch):
        if scan:
            return lax.scan(lambda x, k: (mixed(x, k), None), batch, p["k"])[0].mean()
        return functools.reduce(lambda x, i: mixed(x, p["k"][i]), range(layers), batch).mean()

    state = shared.sharded(params, shared.sgd(1.0), 3, mesh=mesh)
    step = jzero.make_train_step(loss_fn, remat="as_written")
    lowered = step.lower(state, np.ones((16, width), np.float32))
    gathers = len(re.findall(r"stablehlo.all_gather\"", in_line(lowered.as_text())))
    assert gathers == (2 if scan else 2 * layers - 1), (
        "again in the backward pass, which needs no gradient of the batch"
    )


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["data seq expert", "seq data expert", "expert seq data", "expert data"])
def test_orders_of_axes(order):
    """What would end the process raises: with jax 0.12 an automatic axis beside, and ZeRO's after the loss's own."""
    sizes = dict.fromkeys(order.split(), 2)
    mesh = jzero.make_mesh(devices=jax.devices()[: 2 ** len(sizes)], **sizes)
    params = {"w": np.random.default_rng(0).normal(size=(WIDTH, HIDDEN)).astype(np.float32)}
    batch = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
    columns = {"axis_names": {"expert"}, "in_specs": P(None, "expert"), "out_specs": P(None, "expert")}
    weighted = jax.shard_map(lambda x: x * (1 + lax.axis_index("expert")), mesh=mesh, check_vma=False, **columns)
    loss_fn = lambda p, x: jnp.square(weighted(x @ p["w"])).mean()
    state = shared.sharded(params, shared.sgd(0.1), 3, mesh=mesh)
    if order == "expert seq data" and jax.__version_info__ >= (0, 12):
        with pytest.raises(ValueError, match=r"'expert'.*'data'.*'seq'"):
            jzero.value_and_grad(loss_fn)(state, batch)
        return
    by_column = np.repeat([1, 2], HIDDEN // 2)[None]
    out = batch @ params["w"] * by_column
    loss, grads = jzero.value_and_grad(loss_fn)(state, batch)
    np.testing.assert_allclose(loss, np.square(out).mean(), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], batch.T @ (2 * out * by_column) / out.size, rtol=1e-4, atol=1e-6)
