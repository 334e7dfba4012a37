"""ZeRO beside tensor parallelism: the loss constrains what it computes to a further axis of the mesh."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import shared
from tests.tiers import slow

WIDTH, HIDDEN, LAYERS = 32, 96, 3
SPECS = {"up": P(None, None, "model"), "down": P(None, "model", None)}


def constrained(x, mesh, *names):
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*names)))


def layer(mesh, x, w):
    """A layer whose hidden units lie over the model axis."""
    hidden = constrained(jax.nn.silu(x @ w["up"]), mesh, "data", "model")
    return x + hidden @ w["down"], None


def loss_of(mesh, scan):
    block = jax.checkpoint(functools.partial(layer, mesh), prevent_cse=not scan)

    def loss_fn(params, x):
        if scan:
            return jnp.square(jax.lax.scan(block, x, params)[0]).mean()
        for i in range(LAYERS):
            x, _ = block(x, jax.tree.map(lambda w, i=i: w[i], params))
        return jnp.square(x).mean()

    return loss_fn


def draw():
    rng = np.random.default_rng(0)
    sizes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: rng.normal(size=size).astype(np.float32) / 9 for name, size in sizes.items()}
    return params, rng.normal(size=(2, 16, WIDTH)).astype(np.float32)


@functools.cache
def trained_on_one_device():
    """Parameters after two steps, and their losses; nothing is constrained."""
    params, batches = draw()
    tx = shared.sgd(1.0, momentum=0.9)
    state, losses = tx.init(params), []

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of(None, True))(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, params), losses


@pytest.mark.parametrize(
    ("scan", "stage", "accumulate_steps"),
    [(True, 3, 1), (False, 1, 2), slow(True, 0, 1)],
)
def test_layers_train_as_on_one_device(scan, stage, accumulate_steps):
    """The reference has one micro-batch: their means are of as many rows each."""
    mesh, (params, batches) = jzero.make_mesh(data=4, model=2), draw()
    placed = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params.items()}
    state = jzero.TrainState.create(params=placed, tx=shared.sgd(1.0, momentum=0.9))
    state = jzero.shard_train_state(state, config=shared.config(stage), mesh=mesh)
    step = jzero.make_train_step(loss_of(mesh, scan), remat="as_written", accumulate_steps=accumulate_steps)
    assert_each_part_travels_alone(jzero.analyze(step, state, batches[0]))
    want, losses = trained_on_one_device()
    compiled = step.lower(state, batches[0]).compile()
    for batch, loss in zip(batches, losses, strict=True):
        state, metrics = compiled(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    found = jax.tree.map(np.asarray, jzero.gather_params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, want)
    products = {*re.findall(r"f32\[([\d,]+)\]\S* dot\(", compiled.as_text())}
    assert products
    assert not {p for p in products if str(HIDDEN) in p.split(",")}, "hidden units lie over two devices"


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


def test_states_are_born_cut_over_the_models_axis():
    """`init_train_state` goes by the constraints in the function that makes the state."""
    mesh = jzero.make_mesh(data=4, model=2)

    def make_state(key):
        draw = lambda key: jax.random.normal(key, (WIDTH, HIDDEN))
        params = {name: draw(k) for name, k in zip("ab", jax.random.split(key), strict=True)}
        params["a"] = jax.lax.with_sharding_constraint(params["a"], NamedSharding(mesh, P(None, "model")))
        return jzero.TrainState.create(params=params, tx=optax.adam(0.1))

    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    state = jzero.init_train_state(make_state, jax.random.key(0), config=config, mesh=mesh)
    wanted = {"a": P("data", "model"), "b": P(None, "data")}
    for tree in (state.params, state.opt_state[0].mu):
        assert jax.tree.map(lambda x: x.sharding.spec, tree) == wanted
    plain = make_state(jax.random.key(0)).params
    jax.tree.map(np.testing.assert_array_equal, jzero.gather_params(state), plain)
