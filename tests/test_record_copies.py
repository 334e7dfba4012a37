"""Copies of states in records: a copy neither reads nor changes what the newest state has there."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from tests import models, shared
from tests.checkpoint_states import assert_same_bits, whole
from tests.disk_states import ADAMW, loss_fn, make_params, state_on_disk, step_of, train
from tests.tiers import slow

KERNEL, SHAPE = "layer_1/kernel", (37, 11)
STALE = "later step overwrote"
FLOW = jzero.ZenFlow(topk_ratio=0.2, update_interval=2, select_interval=4)
IN_RAM = {"path": None, "optimizer": "host", "compute": "host"}
OFFLOADS = {
    "disk": {},
    "disk, late": {"compute": "host", "delay": 1},
    "ram, late": {**IN_RAM, "delay": 1},
    "disk, flow": {"compute": "host", "zenflow": FLOW},
    "ram, flow": {**IN_RAM, "zenflow": FLOW},
}


def born(folder, name="disk", precision="fp32"):
    return state_on_disk(**{"path": folder, "precision": precision} | OFFLOADS[name])


def copied(state):
    return jax.tree.map(jnp.copy, state)


def copy_and_newest(folder, name="disk", precision="fp32", steps=3):
    """Returns a copy, and the state some steps later, whose moments and parameters differ."""
    state, _ = train(born(folder, name, precision), steps=2)
    kept = copied(state)
    return kept, train(state, steps=steps, seed=2)[0]


ON_RECORDS = {  # what reads or writes moments
    "step": lambda s, _: train(s, steps=1),
    "unshard": lambda s, _: jzero.unshard_train_state(s),
    "shard": lambda s, _: jzero.shard_train_state(s, config=jzero.ZeroConfig(stage=1)),
    "shard, donate": lambda s, _: jzero.shard_train_state(s, config=jzero.ZeroConfig(stage=1), donate=True),
    "read moments": lambda s, _: jzero.get_full_opt_state(s, KERNEL, name="mu"),
    "write moments": lambda s, _: jzero.set_full_opt_state(s, KERNEL, name="mu", value=np.ones(SHAPE)),
    "save": lambda s, folder: jzero.save_checkpoint(folder / "copy", s),
    "load": lambda s, folder: jzero.load_params(s, folder / "weights"),
    "restore a part": lambda s, folder: jzero.restore_checkpoint(folder / "newest", s, params_only=True),
    "restore, donate": lambda s, folder: jzero.restore_checkpoint(folder / "newest", s, donate=True),
    "stats": lambda s, _: jzero.disk_stats(s),
    "release": lambda s, _: jzero.release_disk(s),
}
ON_MASTERS = {  # what reads or writes masters, which bf16 has in records
    "read": lambda s, _: jzero.get_full_param(s, KERNEL),
    "write": lambda s, _: jzero.set_full_param(s, KERNEL, value=np.ones(SHAPE)),
    "update": lambda s, _: jzero.update_params(s, lambda p: jax.tree.map(jnp.zeros_like, p)),
    "gather": lambda s, _: jzero.gather_params(s, masters=True),
    "gather one by one": lambda s, _: jzero.gather_params(s, masters=True, dtype="float32"),
    "export": lambda s, folder: jzero.export_params(s, folder / "exported"),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [("disk", "bf16"), ("ram, late", "fp32"), ("disk, flow", "bf16"), slow("disk", "fp32"), slow("disk, late", "bf16")],
)
def test_a_copy_is_refused_and_the_newest_state_stays_as_it_is(name, precision, tmp_path):
    kept, state = copy_and_newest(tmp_path, name, precision)
    jzero.save_checkpoint(tmp_path / "newest", state)
    jzero.export_params(state, tmp_path / "weights")
    expected = whole(state)
    where = "on disk" if "disk" in name else "in records in the host's memory"
    acts = dict(ON_RECORDS) | (ON_MASTERS if precision == "bf16" else {})
    if "disk" not in name:
        acts = {x: act for x, act in acts.items() if x not in ("stats", "release")}
    if OFFLOADS[name].get("delay") or "flow" in name:
        acts["apply"] = lambda s, _: jzero.apply_pending(s)
    for act in acts.values():  # of one copy: what is refused has freed nothing of it
        with pytest.raises(RuntimeError, match=f"{STALE} what this state has {where}.*`jzero.shard_train_state"):
            act(kept, tmp_path)
    assert_same_bits(whole(state), expected)
    unedited = copy_and_newest(tmp_path, name, precision)[1]
    assert train(state, seed=5)[1] == train(unedited, seed=5)[1]


def test_what_a_copy_has_in_memory_is_its_own(tmp_path):
    state, _ = train(born(tmp_path))
    expected = np.asarray(jzero.get_full_param(state, KERNEL))
    kept = copied(state)
    evaluate = jzero.make_eval_step(loss_fn)
    loss = float(evaluate(state, models.mlp_batch(48)))
    state, _ = train(state)
    np.testing.assert_array_equal(jzero.get_full_param(kept, KERNEL), expected)
    np.testing.assert_array_equal(jzero.gather_params(kept, masters=True)["layer_1"]["kernel"], expected)
    assert float(evaluate(kept, models.mlp_batch(48))) == loss
    restored = jzero.restore_checkpoint(saved(tmp_path, state), kept)
    assert_same_bits(whole(restored), whole(state))
    # Nothing of these is in records.
    edited = jzero.update_params(jzero.set_full_param(kept, KERNEL, value=2 * expected), lambda p: p)
    np.testing.assert_array_equal(jzero.get_full_param(edited, KERNEL), 2 * expected)
    with pytest.raises(RuntimeError, match=STALE):
        train(edited)
    assert np.isfinite(train(state)[1]).all()


def saved(folder, state):
    jzero.save_checkpoint(folder / "saved", state)
    return folder / "saved"


def test_a_state_that_is_sharded_once_more_has_records_of_its_own(tmp_path):
    """Both train on, as optax does on one device."""
    state, _ = train(born(tmp_path))
    kept = jzero.shard_train_state(state)
    want = shared.by_optax(loss_fn, make_params(), ADAMW, [models.mlp_batch(48, seed=i) for i in range(4)])
    for one in (state, kept):
        one, _ = train(one, seed=2)  # noqa: PLW2901
        mu = jzero.get_full_opt_state(one, KERNEL, name="mu")
        np.testing.assert_allclose(mu, want.opt_state[0].mu["layer_1"]["kernel"], rtol=1e-5, atol=1e-7)
        found = jzero.get_full_param(one, KERNEL)
        np.testing.assert_allclose(found, want.params["layer_1"]["kernel"], rtol=1e-5, atol=1e-6)


def test_gradients_that_wait_are_of_one_state(tmp_path):
    """The first step only leaves gradients: it writes no record."""
    state = born(tmp_path, "ram, late")
    kept = copied(state)
    state, _ = train(state, steps=1)
    with pytest.raises(RuntimeError, match=STALE):
        train(kept, steps=1)
    expected = born(tmp_path, "ram, late")
    expected, _ = train(expected, steps=1)
    assert_same_bits(whole(train(state, seed=1)[0]), whole(train(expected, seed=1)[0]))


def test_no_number_comes_twice(tmp_path):
    """Applying what waits starts the columns on the devices anew, but not the number of the state."""
    state = born(tmp_path, "ram, flow")
    kept = [copied(state)]
    for i in range(8):
        state, _ = train(state, steps=1, seed=i)
        kept.append(copied(state))
    state = jzero.apply_pending(state, donate=True)
    for one in kept:
        with pytest.raises(RuntimeError, match=STALE):
            jzero.unshard_train_state(one)
    numbers = [int(one.opt_state.disk.generation) for one in (*kept, state)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("name", ["disk", "ram, late"])
def test_copies_that_cannot_be_made_say_what_to_do(name, tmp_path):
    state, _ = train(born(tmp_path, name))
    where = "on disk" if name == "disk" else "in records in the host's memory"
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=f"^'0/mu/.*' is {where}, .*`jzero.shard_train_state.*`jzero.save_checkpoint`"
        ):
            make(state)
    mu = state.opt_state.inner[0].mu["layer_1"]["kernel"]
    for use in (np.asarray, jnp.sum):
        with pytest.raises(TypeError, match=f"^'0/mu/{KERNEL}' is {where}: it is no array"):
            use(mu)
    with pytest.raises(ValueError, match=f"has {where} is not for programs.*outside of `jax.jit`"):
        jax.jit(lambda s: jzero.get_full_opt_state(s, KERNEL, name="mu"))(state)
    for moved in (jax.device_get(state), jax.device_put(state, jax.devices()[1])):
        for act in ("step", "unshard", "read moments", "write moments", "save"):
            with pytest.raises(
                ValueError, match=f"moved from its devices.*without what it has {where}.*save_checkpoint"
            ):
                ON_RECORDS[act](moved, tmp_path)
    shapes = jzero.abstract_train_state(state)
    assert jax.tree.structure(copy.deepcopy(shapes)) == jax.tree.structure(shapes)
    train(state, steps=1)


@pytest.mark.parametrize("name", ["disk", "ram, flow", slow("disk, late")])
def test_a_step_makes_no_implicit_transfer(name, tmp_path):
    state, _ = train(born(tmp_path, name, "bf16"), steps=2, clip_norm=0.5)
    batch = jax.device_put(models.mlp_batch(48), jzero.plan_of(state).batch_sharding)
    with jax.transfer_guard("disallow"):
        for _ in range(4):
            state, metrics = step_of(clip_norm=0.5)(state, batch)
    assert np.isfinite(metrics["loss"])
