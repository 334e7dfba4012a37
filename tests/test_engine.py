"""The loss is ordinary code: whatever it does with its parameters, loss and gradients are those of plain jax."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from tests import engine_losses
from tests.engine_losses import (
    COUPLED,
    LOSSES,
    D,
    assert_equal,
    branches,
    custom_rules,
    nested_jit,
    remat,
    scan,
    scan_and_plain,
    scan_with_constant_weights,
    weight_decay_over_all_leaves,
)
from tests.tiers import default_for, singles, slow, stages


def nested_scan(p, batch):
    grouped = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), p["stack"])
    body = lambda h, layer: (jnp.tanh(h @ layer["w"] + layer["b"][None]), None)
    outer = lambda h, group: (lax.scan(body, h, group)[0], None)
    with_warning = lax.scan(outer, batch["x"], grouped)[0]
    return engine_losses.out(p, with_warning, batch)


def together(*losses):
    """The sum of losses, each over the parameters that it uses."""

    def loss_fn(p, batch):
        return sum(loss(p, batch) for loss in losses)

    loss_fn.__name__ = "-".join(loss.__name__ for loss in losses)
    return loss_fn


TOGETHER = [
    (engine_losses.plain,),
    (engine_losses.jit_casting_all_parameters,),
    (scan, engine_losses.tied, engine_losses.vmapped, engine_losses.while_loop, custom_rules),
    (
        engine_losses.scan_reversed_with_outputs,
        scan_with_constant_weights,
        engine_losses.remat_with_policy,
        engine_losses.embedding_lookup,
    ),
    (
        engine_losses.scan_carrying_weights,
        engine_losses.python_loop_over_the_stack,
        nested_jit,
        engine_losses.weight_norm,
    ),
    (
        engine_losses.fori_indexing_the_stack,
        remat,
        engine_losses.mixed_parameters,
        engine_losses.reused_cheap_results,
    ),
    (engine_losses.scan_of_remat, weight_decay_over_all_leaves, engine_losses.recurrence_over_parameters),
    COUPLED,
    (engine_losses.loops_after_whole_numbers,),
]
"""Every loss, several in one program; to find a fault, the slow tier has each by itself."""


@pytest.mark.parametrize(
    "losses",
    [*TOGETHER, *(slow((loss,)) for loss in LOSSES if (loss,) not in TOGETHER)],
    ids=lambda losses: "-".join(loss.__name__ for loss in losses),
)
def test_gradients_equal_plain_jax_at_stage_3(losses):
    batch = engine_losses.batch()
    if branches in losses:  # it takes a branch by the local batch: at N=1 that is the whole one, which must agree
        batch["x"] = np.abs(batch["x"])
    loss_fn = losses[0] if len(losses) == 1 else together(*losses)
    assert_equal(engine_losses.sharded(3, 8), loss_fn, batch, check_rows=not set(losses) & set(COUPLED))


def test_every_loss_is_among_those_together():
    assert sorted(loss.__name__ for losses in TOGETHER for loss in losses) == sorted(x.__name__ for x in LOSSES)


def test_the_loss_has_a_gradient_by_the_batch_too(monkeypatch):
    """Also that of what layers hand on which does not depend on parameters."""
    monkeypatch.setattr("jzero.engine.prefetch.MOST_IN_VAIN", 1.0)

    def loss_fn(p, batch):
        def layer(carry, w):
            h, x = carry
            return (jnp.tanh(h @ w["w"] + w["b"][None]), jnp.sin(x)), jnp.cos(x).mean()

        carry, ys = lax.scan(layer, (batch["x"], batch["x"]), p["stack"])
        (h, x), y = jax.checkpoint(layer)(carry, {"w": p["w"], "b": p["b"]})
        return engine_losses.out(p, h, batch) + x.mean() + ys.sum() + y

    want = jax.jit(jax.grad(loss_fn, argnums=1))(engine_losses.params(), engine_losses.batch())
    for prefetch_bytes in (None, 10**6):
        state = engine_losses.sharded(3, 8, prefetch_bytes=prefetch_bytes)
        of_batch = lambda batch, state=state: jzero.value_and_grad(loss_fn)(state, batch)[0]
        got = jax.jit(jax.grad(of_batch))(engine_losses.batch())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


@pytest.mark.parametrize("prefetch_bytes", [slow(None), 10**6])
@pytest.mark.parametrize("loss_fn", default_for([remat], LOSSES), ids=lambda f: f.__name__)
def test_no_tracer_outlives_its_trace(loss_fn, prefetch_bytes):
    """`jax.checking_leaks` finds what caches of jax would keep alive, and users' own leaks only if there are none."""
    state = engine_losses.sharded(3, 8, prefetch_bytes=prefetch_bytes)
    with jax.checking_leaks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.make_jaxpr(jzero.value_and_grad(loss_fn, check_rows=loss_fn not in COUPLED))(state, engine_losses.batch())


CELLS = [(0, 3), (1, 3), (2, 3), (3, 5), (2, 8), (3, 3)]  # stage, devices
SEVERAL = [(scan, nested_jit), (remat,), (weight_decay_over_all_leaves,), (branches,)]
CASES = [*zip(SEVERAL, CELLS, strict=False)]
SINGLE = [((loss,), cell) for losses in SEVERAL for loss in losses for cell in CELLS]


@pytest.mark.parametrize(
    ("losses", "cell"),
    [*CASES, *(slow(*case) for case in SINGLE if case not in CASES)],
    ids=lambda x: "-".join(getattr(y, "__name__", str(y)) for y in x),
)
def test_gradients_equal_plain_jax_at_every_stage(losses, cell):
    batch = engine_losses.batch(rows=120)
    batch["x"] = np.abs(batch["x"])
    assert_equal(engine_losses.sharded(*cell), together(*losses), batch, check_rows=branches not in losses)


@singles(
    lambda x: "-".join(y.__name__ for y in x) if isinstance(x, tuple) else None,
    options=[{"reshard_after_forward": False}, {"reduce_scatter": False}],
    losses=[(scan, custom_rules), (nested_jit, scan_with_constant_weights)],
)
def test_options_do_not_change_numbers(losses, options):
    assert_equal(engine_losses.sharded(3, 8, **options), together(*losses), engine_losses.batch())


def test_stack_cut_along_the_scan_is_warned_about():
    """A reshaped stack cannot be sliced on its shards: the numbers are right, and the user is told."""
    with pytest.warns(UserWarning, match=r"LeafRule\(scan_dim=0\)"):
        assert_equal(engine_losses.sharded(3, 8), nested_scan, engine_losses.batch())


@stages(3, of=(1, 3))
def test_parameters_sharded_over_a_model_axis_keep_it(stage):
    mesh = jzero.make_mesh(data=4, model=2)
    params = {name: engine_losses.params()[name] for name in "wvb"}
    create = lambda params: jzero.TrainState.create(params=params, tx=optax.adam(1e-2))
    one_step = lambda x, batch: x.apply_gradients(grads=jax.grad(engine_losses.plain)(x.params, batch))
    reference = jax.jit(one_step)(create(params), engine_losses.batch())
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    state = create({**params, "w": jax.device_put(params["w"], spec)})
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    plan = jzero.plan_of(state)
    assert plan.opt_state[0].mu["w"] == jax.sharding.PartitionSpec("data", "model")
    assert state.opt_state[0].mu["w"].addressable_shards[0].data.shape == (D // 4, D // 2)
    state, _ = jzero.make_train_step(engine_losses.plain)(state, engine_losses.batch())
    got = jzero.gather_params(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, reference.params)
    assert state.params["w"].sharding.spec == plan.params["w"]


@stages(3, of=(1, 2, 3))
def test_hybrid_sharding_replicates_the_shards(stage):
    mesh = jzero.make_mesh(replica=2, data=4)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, replica_axis="replica")
    state = jzero.TrainState.create(params=engine_losses.params(), tx=optax.sgd(1.0))
    assert_equal(jzero.shard_train_state(state, config=config, mesh=mesh), scan_and_plain, engine_losses.batch())
