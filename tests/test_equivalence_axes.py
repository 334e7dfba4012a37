"""The check against one device where a loss names axes of the mesh, and over several axes."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests.equivalence_cases import (
    BATCHES,
    assert_reference,
    compare,
    line_state,
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
