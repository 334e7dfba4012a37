"""`check_equivalence`: its reference is training without jzero, and it finds what is no equal training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import jzero
from jzero.core.arrays import collectives as _collectives
from tests import models
from tests.drawn import initializer
from tests.tiers import slow

ROWS = 16
BATCHES = [models.mlp_batch(ROWS, seed) for seed in range(2)]


def make_config(stage, precision="fp32", **options):
    return jzero.ZeroConfig(stage=stage, precision=precision, **{"persistence_threshold": 0, **options})


def mlp_state(tx=None, cls=TrainState):
    return cls.create(
        apply_fn=None, params=models.mlp_params(sizes=models.TWO_LAYERS), tx=tx or optax.adamw(1e-3, eps=1e-6)
    )


def line_state():
    """A model of one layer, for what does not need two."""
    return jzero.TrainState.create(params={"w": models.mlp_params()["layer_0"]["kernel"][:, :11]}, tx=optax.sgd(0.1))


def line_loss(params, batch):
    return jnp.square(jnp.tanh(batch["x"] @ params["w"]) - batch["y"]).mean()


def compare(loss_fn=models.mlp_loss, state=None, *, stage=2, batches=BATCHES, **options):
    options.setdefault("config", make_config(stage))
    return jzero.check_equivalence(loss_fn, mlp_state() if state is None else state, batches, **options)


def norm_of(grads):
    return np.sqrt(sum(float(jnp.square(g).sum()) for g in jax.tree.leaves(grads)))


def plain_run(loss_fn, state, batches, clip_norm=None):
    """The loop that anyone would write on one device."""

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, clip_norm / (norm + 1e-6)), grads)
        return state.apply_gradients(grads=grads), loss, norm

    losses, norms = [], []
    for batch in batches:
        state, loss, norm = step(state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    return state, losses, norms


def assert_reference(report, losses, norms):
    np.testing.assert_allclose([x.reference_loss for x in report.steps], losses, rtol=1e-6)
    np.testing.assert_allclose([x.reference_grad_norm for x in report.steps], norms, rtol=1e-5)


@pytest.mark.smoke
def test_honest_training_passes():
    """Of some of the parameters, from a state that is partitioned already and not consumed."""
    plain = mlp_state(optax.sgd(0.1, momentum=0.9))  # which sees the clipping, as Adam does not
    few = jzero.make_mesh(devices=jax.devices()[:4])
    state = jzero.shard_train_state(plain, config=make_config(3), trainable="layer_1/.*", mesh=few)
    options = {"clip_norm": 0.5, "accumulate_steps": 2}
    report = jzero.check_equivalence(models.mlp_loss, state, BATCHES, **options)
    report.check()
    assert (report.stage, report.num_shards, len(report.steps)) == (3, 4, 2)
    assert report.drift < 1e-3
    assert [leaf.path for leaf in report.leaves] == [leaf.path for leaf in jzero.plan_of(state).leaves]
    leaves = {leaf.path: leaf for leaf in report.leaves}
    assert leaves["layer_0/kernel"].absolute == leaves["layer_0/kernel"].drift == 0
    loss = lambda params, batch: models.mlp_loss({**plain.params, "layer_1": params["layer_1"]}, batch)
    assert_reference(report, *plain_run(loss, plain, BATCHES, clip_norm=0.5)[1:])
    jax.tree.map(np.testing.assert_array_equal, jzero.gather_params(state), plain.params)


def test_a_weighted_loss_as_a_plain_mean_is_found():
    """A batch without weight is skipped by both, and integers beside the parameters stay."""
    some = (np.arange(ROWS) < 5).astype(np.float32)  # devices have two tokens, one or none
    batches = [{**BATCHES[0], "mask": mask} for mask in (some, 0 * some, some)]
    state = jzero.TrainState.create(params={**line_state().params, "table": jnp.arange(5)}, tx=optax.sgd(0.1))

    def sums(params, batch):
        masked = {"x": batch["x"] * batch["mask"][:, None], "y": batch["y"] * batch["mask"][:, None]}
        return line_loss(params, masked) * batch["x"].shape[0]

    def weighted(params, batch, scale=2.0):  # a default is no need
        return jzero.Weighted(scale * sums(params, batch), batch["mask"].sum())

    report = compare(weighted, state, batches=batches, stage=3, accumulate_steps=2)
    report.check()
    assert [x.applied for x in report.steps] == [True, False, True]
    assert report.steps[1].loss == report.steps[1].reference_loss == 0
    assert "steps that jzero skipped: [1]" in str(report)
    assert {leaf.path: leaf.absolute for leaf in report.leaves}["table"] == 0
    local_means = lambda params, batch: sums(params, batch) / jnp.maximum(batch["mask"].sum(), 1)
    assert compare(local_means, line_state(), batches=batches[:1]).loss > 1e-2


@pytest.fixture
def traced_anew():
    """jax keeps what it traced for leaves of a kind, also with a fault."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("traced_anew")
def test_a_fault_of_jzero_is_found(monkeypatch):
    """One device gets the gradient of its neighbour for its part of each leaf; norms do not see it."""

    def reduce_shard(x, cut, route, sums):
        reduced = collective(x, cut, route, sums)
        return jax.lax.ppermute(reduced, "data", [(i, (i + 1) % 8) for i in range(8)])

    collective = _collectives.reduce_shard
    monkeypatch.setattr("jzero.core.engine.placed.reduce_shard", reduce_shard)
    report = compare(line_loss, line_state(), config=make_config(1, "bf16"), batches=BATCHES[:1])
    assert max(report.loss, report.grad_norm) < 1e-3
    with pytest.raises(AssertionError, match=r"'w' drifts .* 0\.1"):
        report.check(loss=1e-2, grad_norm=1e-2, params=0.1)


def test_a_loss_that_is_not_finite_fails():
    report = compare(lambda params, batch: line_loss(params, batch) * jnp.log(params["w"]).mean(), line_state())
    assert report.loss == report.grad_norm == report.params == report.drift == math.inf
    with pytest.raises(AssertionError, match="nan"):
        report.check(loss=1e30, grad_norm=1e30, params=1e30, drift=1e30)


class NormedModel(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(37, 24, use_bias=False, kernel_init=initializer(0), rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(24, axis_name="data", rngs=nnx.Rngs(0))
        self.b = nnx.Linear(24, 11, kernel_init=initializer(1), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.b(nnx.relu(self.norm(self.a(x))))


def model_loss(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


@pytest.mark.parametrize(
    ("precision", "together", "is_set", "frozen"),
    [
        ("fp32", True, True, "a"),
        slow("bf16", False, False, ""),
    ],
)
def test_nnx(precision, together, is_set, frozen):
    model = NormedModel()
    tx = optax.sgd(0.1, momentum=0.9)
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains(frozen)))
    state = nnx.ModelAndOptimizer(model, tx, wrt=wrt) if together else (model, nnx.Optimizer(model, tx, wrt=wrt))
    with jax.set_mesh(jzero.make_mesh()) if is_set else contextlib.nullcontext():
        report = compare(model_loss, state, config=make_config(3, precision))
    report.check(**({} if precision == "fp32" else {"loss": 1e-2, "grad_norm": 1e-2, "params": 1e-2}))
    trained = ["b/bias", "b/kernel", "norm/bias", "norm/scale", *([] if frozen else ["a/kernel"])]
    assert sorted(leaf.path for leaf in report.leaves if not leaf.path.startswith("rest")) == sorted(trained)
    assert "rest/norm/mean" in {leaf.path for leaf in report.leaves}
    assert not np.any(model.norm.mean[...])  # not consumed, not trained
    model.norm.axis_name = None
    if precision == "fp32":
        fn = nnx.value_and_grad(model_loss, argnums=nnx.DiffState(0, wrt))
        want, grads = nnx.jit(fn)(model, BATCHES[0])
        assert_reference(dataclasses.replace(report, steps=report.steps[:1]), [want], [norm_of(grads)])


def named(mesh, h):
    h = lax.with_sharding_constraint(jax.nn.silu(h), P("data", "model"))
    return h / lax.pmean(jnp.square(h).mean(), "data")


def manual(mesh, h):
    halves = {"mesh": mesh, "axis_names": {"model"}, "in_specs": P(None, "model"), "out_specs": P()}
    return jax.shard_map(
        lambda x: lax.all_gather(jax.nn.silu(x), "model", axis=1, tiled=True), **halves, check_vma=False
    )(h)


@pytest.mark.parametrize(("inside", "is_set"), [(named, True), (manual, False)])
def test_losses_that_name_a_further_axis_of_the_mesh(inside, is_set):
    """The reference keeps the axes that the loss names, and is still one device's training."""
    mesh = jzero.make_mesh(data=4, model=2)

    def with_activation(activation, params, batch):
        return jnp.square(activation(batch["x"] @ params["w"]) - batch["y"]).mean()

    loss_fn = functools.partial(with_activation, functools.partial(inside, mesh))

    def of_local_rows(params, batch):
        return loss_fn(params, {**batch, "y": batch["y"] - batch["y"].mean()})

    def plain(h):
        h = jax.nn.silu(h)
        return h / jnp.square(h).mean() if inside is named else h

    state = jzero.TrainState.create(params={"w": jnp.tile(line_state().params["w"], 2)}, tx=optax.sgd(0.1))
    batches = [{**x, "y": jnp.tile(x["y"], 2)} for x in BATCHES]
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        report = compare(loss_fn, state, stage=3, batches=batches, mesh=mesh)
    report.check(loss=1e-6, grad_norm=1e-6, params=1e-5, drift=1e-5)
    if inside is manual:
        wrong = compare(of_local_rows, state, stage=3, batches=batches[:1], mesh=mesh)
        with pytest.raises(AssertionError, match="gradient norm deviates"):
            wrong.check()
    _, losses, norms = plain_run(functools.partial(with_activation, plain), state, batches)
    assert_reference(report, losses, norms)


def test_errors():
    state = mlp_state()
    needs_rng = r"`loss_fn` needs \['rng'\] beside parameters and batch, .* Pass a loss without randomness"
    with pytest.raises(TypeError, match=needs_rng):
        compare(lambda params, batch, rng: 0.0, state)
    with pytest.raises(TypeError, match=r"needs \['batch_stats'\]"):
        compare(lambda params, batch, batch_stats: 0.0, state)
    with pytest.raises(ValueError, match="`batches` is empty"):
        compare(state=state, batches=[])
    for single in (BATCHES[0], BATCHES[0]["x"]):
        with pytest.raises(TypeError, match="`batches` must be a sequence"):
            compare(state=state, batches=single)
    with pytest.raises(ValueError, match="Say what to partition"):
        jzero.check_equivalence(models.mlp_loss, state, BATCHES)
    with pytest.raises(TypeError, match="must be callable"):
        compare(3, state)
    with pytest.raises(ValueError, match="must be divisible by 8"):
        compare(state=state, batches=[models.mlp_batch(12)])


@pytest.mark.filterwarnings("ignore:The mesh has one device")
def test_the_reference_draws_what_the_first_device_draws():
    """From keys that the loss writes and from those that stay, which are others in the second step."""

    def loss(params, batch, extra):
        now, later = jax.random.split(extra["stream"])
        still = jax.random.fold_in(extra["still"], extra["count"])
        noise = sum(jax.random.normal(key, batch["y"].shape) for key in (now, still))
        new = {**extra, "stream": later, "count": extra["count"] + 1}
        return jnp.square(batch["x"] @ params["w"] + noise - batch["y"]).mean(), {"extra": new}

    extra = {"stream": jax.random.key(1), "still": jax.random.key(2), "count": jnp.int32(0)}
    plain = jzero.TrainState.create(params={"w": jnp.ones((37, 11))}, tx=optax.sgd(0.1), extra=extra)
    state = jzero.shard_train_state(plain, stage=1, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
    report = jzero.check_equivalence(loss, state, BATCHES[:2], has_aux=True, mutable=("extra",))
    assert max(report.loss, report.grad_norm) < 1e-5
