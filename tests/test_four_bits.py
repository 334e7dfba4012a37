"""Frozen parameters of 4 bits: they train adapters, count by their bits, and come back from checkpoints."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jzero
from tests.compiled import analyze
from tests.drawn import to_jax
from tests.tiers import slow

D, V, R, B = 36, 61, 4, 24
"""On 8 devices `odd` is padded, `even` is not."""
LR = 1e-2


def make_params(dtype):
    rng = np.random.default_rng(0)
    low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    draw = lambda *shape: to_jax(rng.integers(low, high + 1, shape), dtype)
    return {
        "odd": draw(V, D),
        "even": draw(64, D),
        "scale": to_jax(np.full(D, 0.05)),
        "lora_a": to_jax(rng.normal(size=(V, R))),
        "lora_b": to_jax(rng.normal(size=(R, D)) / 9),
    }


def loss_fn(params, batch):
    real = batch.dtype
    w = params["odd"].astype(real) * params["scale"].astype(real)[None]
    y = batch @ w + batch @ params["lora_a"].astype(real) @ params["lora_b"].astype(real)
    return jnp.square(y @ params["even"].astype(real).T / 36).mean()


def sharded(params, *, num_devices=8, stage=3, precision="fp32", place=jzero.shard_train_state):
    config = jzero.ZeroConfig(stage=stage, precision=precision, persistence_threshold=0)
    plain = jzero.TrainState.create(params=params, tx=optax.adam(LR))
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices])
    return place(plain, config=config, mesh=mesh, trainable="lora_.")


def batch_of(precision):
    x = np.random.default_rng(1).normal(size=(B, V))
    return x.astype(jnp.bfloat16 if precision == "bf16" else np.float32)


def whole(state):
    return {path: np.asarray(x) for path, x in jzero.gather_params(state, masters=True).items()}


@functools.cache
def losses_on_one_device(dtype):
    params, batch, tx = make_params(dtype), batch_of("fp32"), optax.adam(LR)

    @jax.jit
    def step(adapters, opt_state):
        value, grads = jax.value_and_grad(lambda adapters: loss_fn(params | adapters, batch))(adapters)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(adapters, updates), opt_state, value

    adapters = {name: params[name] for name in ("lora_a", "lora_b")}
    opt_state, losses = tx.init(adapters), []
    for _ in range(4):
        adapters, opt_state, value = step(adapters, opt_state)
        losses.append(float(value))
    return losses


@pytest.mark.smoke
@pytest.mark.parametrize(("dtype", "stage", "precision"), [("int4", 3, "fp32"), slow("uint4", 1, "bf16")])
def test_adapters_train_and_the_base_keeps_its_bits(dtype, stage, precision):
    """As one device trains them, in fp32; in bf16 the loss falls alike."""
    params, batch = make_params(dtype), batch_of(precision)
    state = sharded(params, stage=stage, precision=precision)
    step = jzero.make_train_step(loss_fn)
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, losses_on_one_device(dtype), rtol=1e-5 if precision == "fp32" else 0.03)
    assert losses[-1] < losses[0]
    found = whole(state)
    for name in ("odd", "even"):
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], np.asarray(params[name]))


def test_two_numbers_take_a_byte():
    """By hand, and by the compiler: what it reuses of the state is all of it."""
    state = sharded(make_params("uint4"))
    plan = jzero.plan_of(state)
    parts = [x.addressable_shards[0].data for x in jax.tree.leaves(state.params)]
    assert plan.bytes_per_device.params == sum(x.size // 2 if x.dtype == "uint4" else 4 * x.size for x in parts)
    report = analyze(jzero.make_train_step(loss_fn), state, batch_of("fp32"))
    report.verify()


@pytest.mark.slow
def test_checkpoints_keep_every_bit(tmp_path):
    """From 8 devices at stage 3 to 3 at stage 1; plain Orbax reads the same numbers."""
    params = make_params("uint4")
    state = sharded(params, precision="bf16")
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(state, step=1)
        manager.wait()
        like = sharded(params, num_devices=3, stage=1, precision="bf16", place=jzero.abstract_train_state)
        restored = manager.restore(like)
        assert not [path for path, *_ in manager.last_restore.cast if path in ("params/odd", "params/even")]
    found = whole(restored)
    for name, want in params.items():
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(found[name], np.asarray(want))
    with ocp.StandardCheckpointer() as plain:
        there = plain.restore((tmp_path / "run" / "1" / "default").absolute())["params"]
    for name in ("odd", "even"):
        np.testing.assert_array_equal(np.asarray(there[name]).astype(int), np.asarray(params[name]).astype(int))


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    """Bytes that were never of 4 bits."""
    state = sharded(make_params("uint8"))
    jzero.save_checkpoint(tmp_path / "bytes", state)
    with pytest.raises(ValueError, match=r"params/odd: uint8 .* uint4"):
        jzero.restore_checkpoint(tmp_path / "bytes", sharded(make_params("uint4")))
