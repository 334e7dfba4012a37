"""Parts of checkpoints, other names, other models, and states that cannot be saved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import train_state as flax_train_state

import jzero
from tests import models
from tests.checkpoint_states import (
    StateWithStats,
    arrays,
    assert_holds,
    assert_same_bits,
    like,
    linen_state,
    pointers,
    sharded,
)


@pytest.fixture(scope="module")
def plain():
    return linen_state()


def test_all_but_the_optimizer_and_parameters_alone(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1))
    adafactor = StateWithStats.create(
        apply_fn=None, params=(other := linen_state(5)).params, tx=optax.adafactor(1e-3), batch_stats=other.batch_stats
    )
    start = sharded(adafactor, 3)
    with pytest.raises(ValueError, match=r"(?s)checkpoint.*opt_state/0"):
        jzero.restore_checkpoint(tmp_path / "c", start)
    restored = jzero.restore_checkpoint(tmp_path / "c", start, paths="(?!opt_state/).*")
    assert_holds(restored.params, arrays(plain.params))
    assert_holds(restored.batch_stats, arrays(plain.batch_stats))
    assert int(restored.step) == int(plain.step)
    assert_same_bits(arrays(restored.opt_state), arrays(start.opt_state))
    alone = jzero.restore_checkpoint(tmp_path / "c", start, params_only=True)
    assert_holds(alone.params, arrays(plain.params))
    for field in ("opt_state", "batch_stats"):
        assert_same_bits(arrays(getattr(alone, field)), arrays(getattr(start, field)))
    assert not pointers(alone) & pointers(start)


def test_frozen_parameters_are_always_there(tmp_path):
    def make(seed):
        params = jax.tree.map(lambda x: x + seed, models.mlp_params(sizes=models.TWO_LAYERS))
        return jzero.TrainState.create(params=params, tx=optax.adamw(1e-2))

    config = jzero.ZeroConfig(stage=3, precision="bf16", persistence_threshold=50)
    state = jzero.shard_train_state(make(0), config=config, trainable="layer_1/.*")
    jzero.save_checkpoint(tmp_path / "c", state)
    start = jzero.shard_train_state(make(1), config=config, trainable="layer_1/.*")
    for options in ({}, {"params_only": True}):
        restored = jzero.restore_checkpoint(tmp_path / "c", start, **options)
        assert_same_bits(arrays(restored.params), arrays(state.params))
    report = jzero.export_params(state, tmp_path / "out.safetensors")
    assert report.num_tensors == len(jax.tree.leaves(state.params))


def test_missing_and_unexpected_leaves_are_reported(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    params = {name: x for name, x in plain.params.items() if name != "second"} | {"added": {"bias": jnp.ones(5)}}
    changed = StateWithStats.create(apply_fn=None, params=params, tx=optax.sgd(0.1), batch_stats=plain.batch_stats)
    listed = r"\n  missing in the checkpoint \(1\):\n    params/added/bias\n  only in the checkpoint \(\d+\):\n    "
    with pytest.raises(ValueError, match=listed) as error:
        jzero.restore_checkpoint(tmp_path / "c", sharded(changed, 3))
    assert "\n    params/second/kernel\n" in str(error.value)
    assert "`strict=False`" in str(error.value)
    start = sharded(changed, 3)
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(sharded(plain, 3))
        with pytest.warns(UserWarning, match=r"(?s)bias.*only in the checkpoint"):
            restored = manager.restore(start, strict=False)
    assert manager.last_restore.missing == ("params/added/bias",)
    assert "params/second/kernel" in manager.last_restore.unexpected
    np.testing.assert_array_equal(jzero.get_full_param(restored, "added/bias"), np.ones(5))
    np.testing.assert_array_equal(jzero.get_full_param(restored, "third/bias"), plain.params["third"]["bias"])
    with pytest.raises(ValueError, match=r"`like` .*: params/added/bias\. Pass"):
        jzero.restore_checkpoint(tmp_path / "c", like(changed, 3), strict=False)


def test_renamed_leaves(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    params = {("renamed" if name == "third" else name): x for name, x in linen_state(5).params.items()}
    start = StateWithStats.create(apply_fn=None, params=params, tx=plain.tx, batch_stats=plain.batch_stats)
    rename = {r"(.*)/third/(.*)": r"\1/renamed/\2"}
    restored = jzero.restore_checkpoint(tmp_path / "c", like(start, 1), rename=rename)
    whole = jzero.unshard_train_state(restored)
    np.testing.assert_array_equal(whole.params["renamed"]["kernel"], plain.params["third"]["kernel"])
    np.testing.assert_array_equal(
        whole.opt_state[1][0].mu["renamed"]["kernel"], plain.opt_state[1][0].mu["third"]["kernel"]
    )
    for bad, message in (
        ({"params/nothing": "x"}, "match no leaf of the checkpoint"),
        ({"(": "x"}, "is not a regular expression"),
        ({".*/bias": "params/b"}, "gives two leaves the path"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.restore_checkpoint(tmp_path / "c", like(start, 1), rename=bad)


def test_a_checkpoint_of_another_model(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    params = {**plain.params, "first": {"kernel": jnp.ones((9, 18)), "bias": jnp.ones(18, jnp.int32)}}
    other = StateWithStats.create(apply_fn=None, params=params, tx=optax.sgd(0.1), batch_stats=plain.batch_stats)
    for strict in (True, False):
        with pytest.raises(ValueError, match="is of another model or optimizer") as error:
            jzero.restore_checkpoint(tmp_path / "c", like(other, 3), strict=strict)
    assert "  params/first/kernel: float32[9, 17] in the checkpoint, float32[9, 18] in the state\n" in str(error.value)
    assert "  params/first/bias: float32[17] in the checkpoint, int32[18] in the state\n" in str(error.value)
    with pytest.raises(ValueError, match="`paths` matches no leaf of the state"):
        jzero.restore_checkpoint(tmp_path / "c", like(plain, 3), paths="nothing")


def test_states_that_cannot_be_saved(plain, tmp_path):
    with pytest.raises(TypeError, match="has no ZeRO plan"):
        jzero.save_checkpoint(tmp_path / "c", plain)
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1))
    with pytest.raises(TypeError, match="has no ZeRO plan"):
        jzero.restore_checkpoint(tmp_path / "c", plain)
    with pytest.raises(ValueError, match="a checkpoint never replaces another"):
        jzero.save_checkpoint(tmp_path / "c", sharded(plain, 1))
    empty = jzero.TrainState.create(params={"w": jnp.ones(3), "none": jnp.ones((0, 3))}, tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"without elements: \['params/none'\]"):
        jzero.save_checkpoint(tmp_path / "empty", sharded(empty, 1))


def test_parts_keep_the_loss_scale(tmp_path):
    state = sharded(jzero.TrainState.create(params={"w": jnp.arange(13.0)}, tx=optax.sgd(0.1)), 2, precision="fp16")
    lower = dataclasses.replace(state.opt_state.loss_scale, scale=state.opt_state.loss_scale.scale / 4)
    scaled = state.replace(opt_state=dataclasses.replace(state.opt_state, loss_scale=lower))
    jzero.save_checkpoint(tmp_path / "c", scaled)
    for options, scale in (({}, 2.0**14), ({"paths": ".*"}, 2.0**14), ({"params_only": True}, 2.0**16)):
        restored = jzero.restore_checkpoint(tmp_path / "c", state, **options)
        assert float(restored.opt_state.loss_scale.scale) == scale


def test_fields_that_were_replaced_outside_of_a_step(plain, tmp_path):
    state = sharded(plain, 3)
    kernel = jnp.asarray(plain.params["second"]["kernel"]) * 2
    params = {**state.params, "second": {"kernel": kernel}}  # in its natural shape, on one device
    jzero.save_checkpoint(tmp_path / "c", state.replace(step=5, params=params))
    restored = jzero.restore_checkpoint(tmp_path / "c", like(plain, 0))
    assert int(restored.step) == 5
    np.testing.assert_array_equal(restored.params["second"]["kernel"], kernel)
    wrong = state.replace(params={**state.params, "second": {"kernel": jnp.ones(4)}})
    with pytest.raises(ValueError, match=r"second/kernel has shape \(4,\)"):
        jzero.save_checkpoint(tmp_path / "d", wrong)


class StateWithAverage(flax_train_state.TrainState):
    average: dict


def test_arrays_that_are_kept_are_not_freed(plain, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", sharded(plain, 3))
    twin = StateWithAverage.create(apply_fn=None, params=plain.params, tx=plain.tx, average=plain.params)
    twin = sharded(twin, 3)
    twin = twin.replace(average=twin.params)
    restored = jzero.restore_checkpoint(tmp_path / "c", twin, params_only=True, donate=True)
    assert not any(x.is_deleted() for x in jax.tree.leaves(restored))


class StateWithKey(flax_train_state.TrainState):
    rng: jax.Array


def test_kinds_of_keys_are_not_confused(plain, tmp_path):
    def make(rng):
        return sharded(StateWithKey.create(apply_fn=None, params=plain.params, tx=optax.sgd(0.1), rng=rng), 1)

    jzero.save_checkpoint(tmp_path / "new", make(jax.random.key(3)))
    jzero.save_checkpoint(tmp_path / "old", make(jax.random.PRNGKey(3)))
    restored = jzero.restore_checkpoint(tmp_path / "new", make(jax.random.key(4)))
    assert (jax.random.key_data(restored.rng) == jax.random.PRNGKey(3)).all()
    rbg = jax.random.key(4, impl="rbg")
    for path, rng in (("new", jax.random.PRNGKey(4)), ("old", jax.random.key(4)), ("new", rbg)):
        with pytest.raises(ValueError, match=r"  rng: uint32\[2\].* in the checkpoint"):
            jzero.restore_checkpoint(tmp_path / path, make(rng))


def test_numbers_that_are_too_wide_for_jax_are_refused(tmp_path):
    for step, name in ((7, "small"), (2**40, "large")):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"step": np.array(step), "params": {"w": np.ones((5, 4), np.float32)}})
    start = sharded(jzero.TrainState.create(params={"w": jnp.zeros((5, 4))}, tx=optax.sgd(0.1)), 3)
    assert int(jzero.restore_checkpoint(tmp_path / "small", start).step) == 7
    with pytest.raises(ValueError, match="step holds int64 numbers"):
        jzero.restore_checkpoint(tmp_path / "large", start)


def test_relative_paths_and_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    state = sharded(jzero.TrainState.create(params={"w": jnp.arange(13.0)}, tx=optax.sgd(0.1)), 3)
    for path in ("here/c", "~/c"):
        jzero.save_checkpoint(path, state)
        jzero.restore_checkpoint(path, state)
        assert jzero.inspect_checkpoint(path, verify=True).damaged == {}
        jzero.export_checkpoint(path, f"{path}.safetensors")
        jzero.load_params(state, f"{path}.safetensors")
    assert (tmp_path / "home" / "c.safetensors").exists()
