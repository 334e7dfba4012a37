"""The check against one device where a loss names axes of the mesh, and over several axes."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import models
from tests.equivalence_cases import (
    BATCHES,
    assert_reference,
    compare,
    line_state,
    make_config,
    plain_run,
)
from tests.tiers import slow


def constrained(mesh, h):
    return lax.with_sharding_constraint(jax.nn.silu(h), NamedSharding(mesh, P(None, "model")))


def named(mesh, h):
    h = lax.with_sharding_constraint(jax.nn.silu(h), P("data", "model"))
    return h / lax.pmean(jnp.square(h).mean(), "data")


def manual(mesh, h):
    halves = {"mesh": mesh, "axis_names": {"model"}, "in_specs": P(None, "model"), "out_specs": P()}
    return jax.shard_map(
        lambda x: lax.all_gather(jax.nn.silu(x), "model", axis=1, tiled=True), **halves, check_vma=False
    )(h)


def placed(mesh, h):
    """Multiplied with numbers of the devices' own, which are one."""
    columns = {"mesh": mesh, "axis_names": {"model"}, "in_specs": P(None, "model"), "out_specs": P(None, "model")}
    return jax.nn.silu(jax.shard_map(lambda x: x * (lax.axis_index("model") >= 0), **columns, check_vma=False)(h))


@pytest.mark.parametrize(
    ("inside", "is_set"),
    [slow(constrained, False), slow(constrained, True), (named, True), (manual, False), slow(placed, False)],
)
def test_losses_that_name_a_further_axis_of_the_mesh(inside, is_set):
    """The reference keeps the axes that the loss names, and is still one device's training."""
    sizes = {"data": 2, "pipe": 2, "model": 2} if inside is placed else {"data": 4, "model": 2}
    mesh = jzero.make_mesh(**sizes)

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


def gathered_and_scattered(h, axes):
    return lax.psum_scatter(lax.all_gather(h, axes, tiled=True), axes, tiled=True) / lax.axis_size(axes)


def there_and_back(h, axes):
    for name in axes:
        h = lax.all_to_all(lax.all_to_all(h, name, 1, 0, tiled=True), name, 0, 1, tiled=True)
    return h


def called_back(h, axes):
    return h * jax.pure_callback(
        lambda i: np.float32(i >= 0), jax.ShapeDtypeStruct((), np.float32), lax.axis_index(axes)
    )


EXCHANGES = {
    "gather": lambda h, axes: h - lax.all_gather(h, axes, tiled=True).mean(0, keepdims=True),
    "mean": lambda h, axes: h - lax.pmean(h.mean(0, keepdims=True), axes),
    "scatter": gathered_and_scattered,
    "all_to_all": there_and_back,
    "callback": called_back,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchanges", "sizes", "names"),
    [
        ("callback", {"data": 8}, False),  # jax has none beside automatic axes
        ("gather mean scatter all_to_all", {"data": 2, "model": 2, "replica": 2}, True),
        slow("gather mean", {"data": 2, "model": 2, "replica": 2}, False),
        slow("gather", {"data": 4, "replica": 2}, False),
        slow("mean", {"data": 4, "model": 2}, True),
        slow("scatter", {"data": 4, "model": 2}, True),
        slow("all_to_all", {"model": 2, "data": 4}, False),
    ],
)
def test_losses_that_exchange_among_the_devices_of_the_batch(exchanges, sizes, names):
    """For the reference these are one device, as all of the batch is; `names` says whether the loss names its mesh."""
    mesh = jzero.make_mesh(**sizes)
    axes = tuple(x for x in ("replica", "data") if x in sizes)

    def loss_of(exchange, params, batch):
        h = batch["x"] @ params["w"]
        return jnp.square(jnp.tanh(exchange(h)) - batch["y"]).mean()

    def inside(h):
        h = constrained(mesh, h) if names else h
        for name in exchanges.split():
            h = EXCHANGES[name](jnp.sin(h), axes)
        return h

    state = jzero.TrainState.create(params={"w": models.mlp_params()["layer_0"]["kernel"][:, :16]}, tx=optax.sgd(0.1))
    batches = [{**x, "y": np.tile(x["y"], 2)[:, :16]} for x in BATCHES]
    config = make_config(3, replica_axis="replica" if "replica" in sizes else None)
    report = compare(functools.partial(loss_of, inside), state, batches=batches, config=config, mesh=mesh)
    report.check(loss=1e-6, grad_norm=1e-6, params=1e-5, drift=1e-4)

    def plain(h):
        h = jax.nn.silu(h) if names else h
        for name in exchanges.split():
            h = jnp.sin(h)
            h = h - h.mean(0, keepdims=True) if name in ("gather", "mean") else h
        return h

    _, losses, norms = plain_run(functools.partial(loss_of, plain), state, batches)
    assert_reference(report, losses, norms)
