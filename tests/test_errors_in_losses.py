"""What a loss may not do, and how it is told: axes, effects, arrays that it closes over."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import jzero
from tests.error_cases import BATCH, leaves_intact, loss_fn, plain_state, raises, sharded_state


@pytest.mark.smoke
@pytest.mark.parametrize("threshold", [0, 10_000])
def test_large_arrays_that_the_loss_closes_over_are_warned_about(threshold):
    table = jnp.ones((100, 101))
    config = jzero.ZeroConfig(stage=3, persistence_threshold=threshold)

    def loss(params, batch):
        return loss_fn(params, batch) + (table * batch.mean()).mean()

    state = sharded_state(config=config)
    step = jzero.make_train_step(loss)
    plan = step.plan(state, BATCH)
    assert [(leaf.shape, leaf.dtype) for leaf in plan.closed_over] == [((100, 101), jnp.float32)]
    (listed,) = [whole for whole in plan.replicated if whole.shape == (100, 101)]
    assert listed.num_bytes == 4 * 100 * 101
    assert "closed over" in listed.reason
    assert "closed over" in str(plan)
    with pytest.warns(UserWarning, match="closes over arrays") as caught:
        step(state, BATCH)
    (warning,) = caught
    for part in ("float32[100, 101]", "40400 bytes", "as parameters"):
        assert part in str(warning.message)


@pytest.mark.parametrize(("threshold", "shape"), [(10_000, (100, 100)), (0, (64, 64))])
def test_small_arrays_that_the_loss_closes_over_are_fine(threshold, shape):
    table = jnp.ones(shape)
    step = jzero.make_train_step(lambda params, batch: loss_fn(params, batch) + (table * batch.mean()).mean())
    state = sharded_state(config=jzero.ZeroConfig(stage=3, persistence_threshold=threshold))
    assert step.plan(state, BATCH).closed_over == ()
    step(state, BATCH)  # warnings are errors here


# Other users of the mesh inside the loss.


def model_axis_loss(params, batch, mesh, axes):
    def product(x, w):  # each device of the axis multiplies its part of the inner dimension
        return jax.lax.psum(x @ w, axes)

    inner = jax.shard_map(
        product,
        mesh=mesh,
        in_specs=(P(None, axes), P(axes, None)),
        out_specs=P(),
        axis_names=set(axes),
        check_vma=False,
    )
    return jnp.square(inner(batch, params["dense"]["w"]) + params["dense"]["b"][None]).mean()


def test_shard_map_over_the_axis_of_zero_is_refused():
    mesh = jzero.make_mesh(data=4, model=2)
    state = sharded_state(mesh)
    for axes in (("data",), ("data", "model")):
        with leaves_intact(state), raises(ValueError, "jax.shard_map", "['data'] is ZeRO's own", "axis_names"):
            jzero.make_train_step(lambda p, b, axes=axes: model_axis_loss(p, b, mesh, axes))(state, BATCH)


def test_shard_map_over_sizes_that_do_not_divide_is_explained():
    mesh = jzero.make_mesh()
    loss = lambda p, b: jax.shard_map(jnp.mean, mesh=mesh, in_specs=P("data"), out_specs=P())(b)
    with raises(ValueError, "jax.shard_map", "already runs once per device along ('data',)", "axis_names"):
        jzero.make_train_step(loss)(sharded_state(), BATCH)


def test_an_axis_of_another_name_is_explained():
    loss = lambda p, b: jax.lax.pmean(loss_fn(p, b), "batch")
    with raises(ValueError, "'batch'", "ZeRO's are ('data',)", "`ZeroConfig(axis='batch')`", "make_mesh(batch=-1)"):
        jzero.make_train_step(loss)(sharded_state(), BATCH)
    with pytest.raises(NameError, match="undefined"):
        jzero.make_train_step(lambda p, b: undefined)(sharded_state(), BATCH)  # noqa: F821


# Effects.


def with_ordered_print(params, batch):
    jax.debug.print("loss on a device", ordered=True)
    return loss_fn(params, batch)


def with_ordered_callback(params, batch):
    io_callback(lambda x: None, None, batch.mean(), ordered=True)
    return loss_fn(params, batch)


@pytest.mark.parametrize("loss", [with_ordered_print, with_ordered_callback])
def test_ordered_effects_are_refused_before_anything_is_compiled(loss, caplog):
    def compilations():
        return sum("XLA compilation" in record.getMessage() for record in caplog.records)

    state = sharded_state()
    step = jzero.make_train_step(loss)
    with jax.log_compiles():
        with leaves_intact(state):
            for call in (step, step.trace, step.eval_shape, jzero.value_and_grad(loss)):
                with raises(ValueError, "ordered effects", "ordered=False"):
                    call(state, BATCH)
        assert not compilations()
        jzero.make_train_step(loss_fn)(state, BATCH)
        assert compilations(), "else the count above says nothing"


@pytest.mark.parametrize("is_set", [False, True])
def test_values_that_the_loss_casts_to_varying(is_set):
    """jax knows no such type where the loss is traced."""
    mesh = jzero.make_mesh()
    state = jzero.shard_train_state(plain_state(), stage=3, mesh=mesh)
    step = jzero.make_train_step(lambda params, batch: loss_fn(params, jax.lax.pcast(batch, "data", to="varying")))
    context = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    with context, leaves_intact(state), raises(ValueError, "'data'", "`lax.pcast`", "leave that out"):
        step(state, BATCH)


def test_unordered_effects_work(capfd):
    def loss(params, batch):
        jax.debug.print("mean weight {w:.3f}", w=jnp.abs(params["dense"]["w"]).mean())
        return loss_fn(params, batch)

    state = sharded_state(config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    state, _ = jzero.make_train_step(loss)(state, BATCH)
    jax.block_until_ready(state)
    jax.effects_barrier()
    expected = float(jnp.abs(plain_state().params["dense"]["w"]).mean())
    printed = re.findall(r"mean weight ([\d.]+)", capfd.readouterr().out)
    assert len(printed) >= 8, "on each device, whole weights"
    assert set(printed) == {f"{expected:.3f}"}
