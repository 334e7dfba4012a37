"""Updates on the host's CPU, at once and one step later."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import jzero
from jzero.core.disk.files import DiskError
from jzero.core.disk.stores import RamStore
from jzero.core.jaxpr.equations import equations_of
from jzero.core.state.init import lower_init
from tests import models, optimizers
from tests.checkpoint_states import arrays, assert_same_bits
from tests.offload_states import (
    ADAMW,
    ONE_LAYER,
    SMALL,
    config,
    small_state,
    step_of,
    train,
)

CPU = jzero.Offload(optimizer="host", compute="host")
LATE = dataclasses.replace(CPU, delay=1)
LATE_ALL = dataclasses.replace(LATE, params="host")


def moved(jaxpr):
    """Yields (primitive, bytes, memory) of each move and of each call of the host."""
    for eqn in equations_of(jaxpr):
        if eqn.primitive.name == "compute_on":
            yield eqn.primitive.name, 0, None
        if eqn.primitive.name == "device_put":
            (x,) = eqn.outvars
            yield "device_put", x.aval.size * x.aval.dtype.itemsize, x.aval.memory_space


def test_nothing_but_gradients_and_parameters_travels():
    """Masters and moments stay: 16-bit gradients go down, 16-bit parameters come up with the result of the call."""
    state = small_state(2, "bf16", CPU)
    plan = jzero.plan_of(state)
    jaxpr = jzero.make_train_step(models.mlp_loss).trace(state, models.mlp_batch(48)).jaxpr
    found = list(moved(jaxpr))
    assert sum(name == "compute_on" for name, _, _ in found) == len(plan.leaves)
    assert not [memory for name, _, memory in found if name == "device_put" and memory == jax.memory.Space.Device]
    down = sum(size for name, size, memory in found if name == "device_put" and memory == jax.memory.Space.Host)
    shards = sum(leaf.grad.bytes_per_device for leaf in plan.leaves)
    # Gradients and, so that edits are noticed, parameters, in bf16; the scale of gradients is a number.
    assert shards == sum(np.prod(leaf.grad.stored_shape) for leaf in plan.leaves) // 8 * 2
    assert down == 2 * shards


def test_what_needs_more_than_elements_is_refused():
    state = small_state(3, offload=CPU, tx=optimizers.OPTIMIZERS["muon"]())
    with pytest.raises(ValueError, match=r"compute='host'.*layer_0/kernel"):
        jzero.make_train_step(models.mlp_loss)(state, models.mlp_batch(48))


def late_reference(tx, steps, *, clip_norm):
    """Training with optax on one device, each gradient applied one step later."""
    params = models.mlp_params(jnp.float64, models.TWO_LAYERS)
    opt_state, waiting, losses = tx.init(params), None, []

    @jax.jit
    def clipped(params, batch):
        loss, grads = jax.value_and_grad(models.mlp_loss)(params, batch)
        scale = jnp.minimum(1, clip_norm / (optax.tree.norm(grads) + 1e-6))
        return loss, jax.tree.map(lambda g: g * scale, grads)

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i in range(steps):
        batch = models.mlp_batch(48, seed=i, dtype=np.float64)
        loss, grads = clipped(params, batch)
        losses.append(float(loss))
        if waiting is not None:
            params, opt_state = update(waiting, opt_state, params)
        waiting = grads
    settled, _ = update(waiting, opt_state, params)
    return losses, params, settled


def assert_near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), a, b)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (3, dataclasses.replace(LATE, ratio=0.5)),
        (3, LATE_ALL),
    ],
)
def test_one_step_later(stage, offload):
    """Equal, in float64, to a loop on one device that applies each gradient one step later."""
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 4)))
    with jax.enable_x64(True):
        state = jzero.TrainState.create(params=models.mlp_params(jnp.float64, models.TWO_LAYERS), tx=tx)
        state = jzero.shard_train_state(state, config=config(stage, offload=offload))
        step, losses = jzero.make_train_step(models.mlp_loss, clip_norm=0.2), []
        for i in range(4):
            state, metrics = step(state, models.mlp_batch(48, seed=i, dtype=np.float64))
            losses.append(float(metrics["loss"]))
        expected, params, settled = late_reference(tx, 4, clip_norm=0.2)
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert int(state.step) == 3
        assert_near(jzero.gather_params(state), params)
        done = jzero.apply_pending(state)
        assert int(done.step) == 4
        assert_near(jzero.gather_params(done), settled)
        assert jzero.apply_pending(done) is done
        # The same when the state is laid out anew, or made whole.
        again = jzero.shard_train_state(state, config=config(2, offload=jzero.Offload()))
        assert int(again.step) == 4
        assert_same_bits(arrays(jzero.gather_params(again)), arrays(jzero.gather_params(done)))
        assert_same_bits(arrays(jzero.unshard_train_state(state).params), arrays(jzero.gather_params(done)))
        # And when training goes on from there.
        going_on, _ = step(done, models.mlp_batch(48, seed=9, dtype=np.float64))
        assert int(going_on.step) == 4
        assert_same_bits(arrays(jzero.gather_params(going_on)), arrays(jzero.gather_params(again)))


def late_state(precision="bf16"):
    """Returns a state of which all tests that look after a step or two take the same program."""
    return small_state(3, precision, LATE, sizes=ONE_LAYER)


@pytest.mark.slow
def test_checkpoints_lose_no_gradient(tmp_path):
    state, _ = train(late_state(), steps=3)
    done = jzero.apply_pending(state)
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        assert manager.save(state)
        manager.wait()
        assert manager.latest_step() == 3 == int(done.step)
        late = manager.restore(small_state(2, "bf16", LATE, sizes=ONE_LAYER))
    assert int(late.step) == 3
    expected = arrays(jzero.unshard_train_state(done).params)
    assert not bool(late.opt_state.disk.waiting)
    assert_same_bits(arrays(jzero.gather_params(late, masters=True)), expected)
    assert int(state.step) == 2, "saving does not consume the state"
    state, _ = train(state, steps=1)
    assert int(state.step) == 3


def test_states_that_are_made_moved_and_serialized_by_others(tmp_path):
    state, _ = train(late_state(), steps=1)
    with pytest.raises(ValueError, match=r"`Offload\(delay=1\)`"):
        state.tx.init(state.params)
    with pytest.raises(TypeError, match=r"mu/.* is in records in the host's memory.*save_checkpoint"):
        serialization.to_bytes(state.opt_state)
    near = small_state(3, "bf16", SMALL, sizes=ONE_LAYER).opt_state
    before_the_field = serialization.to_state_dict(near)
    del before_the_field["disk"]
    assert serialization.from_state_dict(near, before_the_field).disk is None
    expected = arrays(jzero.unshard_train_state(state).params)
    impossible = config(0, offload=jzero.Offload(optimizer="host", device_budget_bytes=0))
    with pytest.raises(ValueError, match="device_budget_bytes=0"):  # found before anything is consumed
        jzero.shard_train_state(state, config=impossible, donate=True)
    with pytest.raises(ValueError, match=r"`apply_pending` .* outside of `jax.jit`"):
        jax.jit(jzero.apply_pending)(state)
    away = jzero.offload_train_state(state, include=["params"])
    jzero.save_checkpoint(tmp_path / "away", away)
    found = jzero.restore_checkpoint(tmp_path / "away", small_state(1, "fp32", jzero.Offload(), sizes=ONE_LAYER))
    assert_same_bits(arrays(jzero.gather_params(found)), expected)


def test_records_that_an_update_left_half_written_are_never_used(monkeypatch):
    """In memory they have one slot: the step that waits for the update raises, and so does whatever comes next."""
    state, step, real, written = late_state(), step_of(), RamStore.write, []
    for seed in range(2):
        state, _ = step(state, models.mlp_batch(48, seed=seed))

    def fails(*args):
        written.append(True)
        if len(written) == 2:
            raise DiskError("Writing failed.")
        real(*args)

    monkeypatch.setattr(RamStore, "write", fails)
    with pytest.raises(DiskError, match="Writing failed"):
        step(state, models.mlp_batch(48, seed=2))
    for use in (lambda: step(state, models.mlp_batch(48, seed=2)), lambda: jzero.apply_pending(state)):
        with pytest.raises(DiskError, match="was interrupted"):
            use()


def test_born_in_records():
    make_state = lambda key: jzero.TrainState.create(params=models.mlp_params(sizes=ONE_LAYER), tx=ADAMW)
    state = jzero.init_train_state(make_state, jax.random.key(0), config=config(3, "bf16", LATE))
    assert not bool(state.opt_state.disk.waiting)
    larger = lambda key: jzero.TrainState.create(params=models.mlp_params(sizes=models.TWO_LAYERS), tx=ADAMW)
    programs, *_ = lower_init(larger, jax.random.key(0), config(3, "bf16", LATE), jzero.make_mesh())
    plan = jzero.plan_train_state(larger(None), config=config(3, "bf16", LATE))
    away = sum(x.bytes_per_device for x in plan.opt_leaves if x.in_records)
    outputs = [program.compile().memory_analysis().output_size_in_bytes for program in programs]
    assert len(programs) >= 3, "what goes to the host is not made at once"
    assert max(outputs) < 0.9 * away < sum(outputs)
    _, losses = train(late_state(), steps=2)
    _, found = train(state, steps=2)
    np.testing.assert_allclose(found, losses, rtol=1e-6)


class OwnState(TrainState):
    def apply_gradients(self, *, grads, **kwargs):
        return super().apply_gradients(grads=jax.tree.map(jnp.sign, grads), **kwargs)


def test_what_cannot_wait():
    make = lambda cls, tx, **fields: cls.create(params=models.mlp_params(sizes=models.TWO_LAYERS), tx=tx, **fields)
    state = make(OwnState, optax.sgd(0.1, momentum=0.9), apply_fn=None)
    state = jzero.shard_train_state(state, config=config(2, offload=LATE))
    with pytest.raises(TypeError, match=r"OwnState.*gradients.*delay=1"):
        jzero.make_train_step(models.mlp_loss)(state, models.mlp_batch(48))
    with pytest.raises(ValueError, match=r"delay=1.*keeps nothing"):
        jzero.shard_train_state(make(jzero.TrainState, optax.sgd(0.1)), config=config(2, offload=LATE))
    plain = make(jzero.TrainState, optax.adam(0.1))
    waits = late_state()
    _, grads = jzero.value_and_grad(models.mlp_loss)(waits, models.mlp_batch(48))
    with pytest.raises(ValueError, match=r"delay=1.*steps of"):
        waits.apply_gradients(grads=grads)
    with pytest.raises(ValueError, match=r"delay=1.*one step later"):
        jzero.check_equivalence(models.mlp_loss, plain, [models.mlp_batch(48)], config=config(2, offload=LATE))
