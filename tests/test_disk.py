"""Optimizer state on disk: the same numbers as in memory, for every optimizer, stage and precision; errors that lose
nothing."""

import collections
import contextlib
import gc
import itertools
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.disk.files import DiskError, UnnamedFile
from jzero.core.records.run import RecordPass
from jzero.core.state.record_states import records_of
from tests import models
from tests.checkpoint_states import arrays, assert_same_bits, whole
from tests.disk_states import (
    OPTIMIZERS,
    in_memory,
    loss_fn,
    make_params,
    state_on_disk,
    step_of,
    train,
)
from tests.tiers import slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all, so that plans are equal and each program is compiled once."""
    return tmp_path_factory.mktemp("folder")


def assert_near(found, expected, rtol=2e-6, atol=1e-6):
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, rtol=rtol, atol=atol, err_msg=path)


CASES = [
    ("adamw", 1, "fp16", "host"),  # tests below have other optimizers
    slow("adamw", 2, "fp32", "host"),
    slow("lamb", 0, "fp32", "device"),
    slow("lars", 3, "bf16", "device"),
    slow("momo", 3, "bf16", "device"),
    slow("masked", 3, "bf16", "device"),
]


@pytest.mark.parametrize(("name", "stage", "precision", "compute"), CASES)
def test_state_on_disk_trains_like_state_in_memory(folder, name, stage, precision, compute):
    """After a user edits parameters, too: 16-bit ones change their masters, in memory or on disk."""
    tx = OPTIMIZERS[name]()
    near, losses = train(in_memory(stage, precision, tx), clip_norm=0.5)
    state = state_on_disk(folder, stage, precision, tx, compute=compute, chunk_bytes=512)  # several records a kernel
    assert not any(x.ndim and x.size > 100 for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.float32)
    state, found = train(state, clip_norm=0.5)
    # Chunks in a program and records fuse other multiply-adds; fp16 rounds a last bit of the master to 2^-11.
    np.testing.assert_allclose(found, losses, rtol=1e-6 if precision != "fp16" else 1e-5)
    atol = 1e-6 if precision != "fp16" else 2e-4
    before = whole(state)
    assert_near(before, whole(near), atol=atol)
    if precision == "fp16":
        state = after_a_skipped_step(state, clip_norm=0.5)
        assert_same_bits(whole(state), before)
        near, _ = step_of(clip_norm=0.5)(near, overflowing())
    near, state = (x.replace(params=jax.tree.map(lambda p: p.at[:1].set(2), x.params)) for x in (near, state))
    near, state = (train(x, steps=1, seed=5, clip_norm=0.5)[0] for x in (near, state))
    assert_near(whole(state), whole(near), atol=atol)


def overflowing():
    batch = models.mlp_batch(48, seed=1)
    batch["x"][5] = np.inf
    return batch


def after_a_skipped_step(state, **options):
    """Runs a step that writes nothing."""
    files = records_of(state)
    written, generation = files.pipeline.store.stats.written_bytes, files.generation
    state, metrics = step_of(**options)(state, overflowing())
    assert not bool(metrics["step_applied"])
    assert records_of(state).pipeline.store.stats.written_bytes == written
    assert records_of(state).generation == generation
    assert metrics["perf"] == {"disk_read_bytes_per_s": 0, "disk_write_bytes_per_s": 0, "disk_wait_share": 0}
    return state


MESHES = {
    "replicas": ({"data": 2, "replica": 2}, {"replica_axis": "replica"}),
    "nodes": ({"data": 2, "node": 2}, {"node_axis": "node"}),
    "a tensor axis": ({"data": 2, "model": 2}, {}),
}


@pytest.mark.parametrize(
    ("mesh", "name"), [("replicas", "clipped steps"), slow("nodes", "lamb"), slow("a tensor axis", "prodigy")]
)
def test_each_part_is_kept_once_on_other_meshes(tmp_path, mesh, name):
    (axes, options), tx = MESHES[mesh], OPTIMIZERS[name]()
    found = []
    for offload in (jzero.Offload(optimizer="host"), jzero.Offload(optimizer="disk", path=tmp_path, chunk_bytes=512)):
        config = jzero.ZeroConfig(precision="bf16", persistence_threshold=50, offload=offload, **options)
        state = jzero.TrainState.create(params=make_params(), tx=tx)
        state, _ = train(
            jzero.shard_train_state(state, config=config, mesh=jzero.make_mesh(devices=jax.devices()[:4], **axes))
        )
        found.append(whole(state))
    assert_near(found[1], found[0])
    files = records_of(state)
    parts = {(r.param, r.stored) for r in files.index}
    assert len(parts) == len(files.index)


@pytest.mark.slow
def test_parameters_may_be_on_the_host(folder):
    tx = OPTIMIZERS["adafactor"]()
    near, losses = train(in_memory(precision="bf16", tx=tx), accumulate_steps=2, clip_norm=0.5)
    state = state_on_disk(folder, precision="bf16", tx=tx, params="host")
    state, found = train(state, accumulate_steps=2, clip_norm=0.5)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"pinned_host", "device"}
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert_near(whole(state), whole(near))


def test_reading_editing_and_moving_what_is_on_disk(tmp_path):
    state, _ = train(state_on_disk(tmp_path, precision="bf16"))
    expected, copy = whole(state), jax.tree.map(jnp.copy, state)
    three = jzero.make_mesh(devices=jax.devices()[:3])
    for other in (
        jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=1), mesh=three),
        jzero.reload_train_state(jzero.offload_train_state(jzero.shard_train_state(state))),
    ):
        assert_same_bits(whole(other), expected)
    mu = np.asarray(jzero.get_full_opt_state(state, "layer_1/kernel", name="mu"))
    np.testing.assert_array_equal(mu, expected["[0].mu['layer_1']['kernel']"])
    edited = jzero.set_full_opt_state(state, "layer_1/kernel", name="mu", value=2 * mu)
    edited = jzero.set_full_param(edited, "layer_1/kernel", value=np.full((37, 11), 1 / 3))
    edited = jzero.update_params(edited, lambda p: jax.tree.map(lambda x: x + 1, p), paths=".*/bias")
    found = whole(edited)
    np.testing.assert_array_equal(found["[0].mu['layer_1']['kernel']"], 2 * mu)
    np.testing.assert_array_equal(found["['layer_1']['kernel']"], np.float32(1 / 3))
    np.testing.assert_array_equal(found["['layer_1']['bias']"], expected["['layer_1']['bias']"] + 1)
    np.testing.assert_array_equal(found["[0].nu['layer_1']['kernel']"], expected["[0].nu['layer_1']['kernel']"])
    train(edited, steps=1)
    with pytest.raises(RuntimeError, match="later step overwrote"):
        train(copy, steps=1)


@contextlib.contextmanager
def failing(owner, name, error):
    """Makes the third read, write or computation of a pass fail."""
    real, calls = getattr(owner, name), itertools.count(1)  # several threads count

    def fails(*args):
        if next(calls) == 3:
            raise error
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield


FAULTS = {
    1: (UnnamedFile, "read", DiskError("Reading failed: EIO.")),
    2: (UnnamedFile, "write", DiskError("Writing failed: ENOSPC.")),
    3: (RecordPass, "_visit", KeyboardInterrupt()),
}
"""What happens in which step."""


@pytest.mark.parametrize("delay", [0, 1])
def test_a_failed_step_changes_nothing_and_can_be_repeated(folder, delay):
    options = {"compute": "host", "delay": 1} if delay else {}
    make = lambda: state_on_disk(folder, precision="bf16", **options)
    expected, losses = train(make(), steps=4)
    step, state = step_of(), make()
    for i in range(4):
        batch = models.mlp_batch(48, seed=i)
        if i in FAULTS and (i == 2 or not delay):
            *where, error = FAULTS[i]
            before = arrays(jzero.gather_params(state))
            with failing(*where, error), pytest.raises(type(error)):
                step(state, batch)
            assert_same_bits(arrays(jzero.gather_params(state)), before)
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == losses[i]
    assert_same_bits(whole(state), whole(expected))


def test_errors_before_any_space_is_taken(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"`scale_by_muon` .*'layer_1/kernel'"):
        state_on_disk(tmp_path, tx=optax.contrib.muon(1e-2))
    with pytest.raises(ValueError, match=r"`Offload.path` .*/nowhere"):
        state_on_disk(tmp_path / "nowhere")
    monkeypatch.setattr("jzero.core.disk.stores.free_bytes", lambda folder: 12345)
    with pytest.raises(DiskError, match=r"two slots .* 12,345 are free"):
        state_on_disk(tmp_path)
    for options, message in (
        ({"optimizer": "disk"}, r"`Offload.path` is the folder for `optimizer='disk'`.*path=None"),
        ({"optimizer": "host", "path": "scratch"}, r"optimizer='host', path='scratch'. Set both, or neither"),
        ({"optimizer": "disk", "path": 3}, r"`Offload.path` must be .* a folder"),
        ({"optimizer": "disk", "path": "x", "disk_threads": 0}, r"`Offload.disk_threads` must be an integer >= 1"),
        ({"optimizer": "disk", "path": "x", "disk_checksum": 1}, r"`Offload.disk_checksum` must be True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.Offload(**options)


def test_what_programs_cannot_do_is_told(tmp_path):
    state = state_on_disk(tmp_path)
    step = jzero.make_train_step(loss_fn)
    with pytest.raises(ValueError, match="is trained by calls"):
        jax.jit(lambda s: step(s, models.mlp_batch(48)))(state)
    loss, grads = jzero.value_and_grad(loss_fn)(state, models.mlp_batch(48))
    assert np.isfinite(loss)
    with pytest.raises(ValueError, match="steps of `make_train_step` alone"):
        state.apply_gradients(grads=grads)
    with pytest.raises(TypeError, match="'0/mu/layer_1/kernel' is on disk"):
        jnp.sum(state.opt_state.inner[0].mu["layer_1"]["kernel"])
    with pytest.raises(TypeError, match="This state has shapes but no values"):
        step(jzero.abstract_train_state(state), models.mlp_batch(48))


def test_files_close_with_the_last_state(folder):
    state, _ = train(state_on_disk(folder, precision="bf16"), steps=1)
    files = weakref.ref(records_of(state))
    other = state.replace(step=state.step)
    del state
    gc.collect()
    assert files() is not None
    del other
    gc.collect()
    assert files() is None, "a cache keeps the files open"
    assert os.listdir(folder) == []


@pytest.mark.parametrize("home", ["none", "host", "disk"])
def test_a_step_can_forget_its_programs(tmp_path, home):
    """Then it traces loss and optimizer anew, wherever the optimizer's state is."""
    traced = collections.Counter()

    def loss_fn(params, batch):
        traced["loss"] += 1
        return jnp.square(batch @ params["w"]).mean()

    def update(grads, trace, params=None):
        traced["update"] += 1
        trace = jax.tree.map(lambda x, g: 0.9 * x + g, trace, grads)
        return jax.tree.map(lambda x: -0.1 * x, trace), trace

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    state = jzero.TrainState.create(params={"w": np.ones((16, 64), np.float32)}, tx=tx)
    offload = jzero.Offload(optimizer=home, path=tmp_path if home == "disk" else None)
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=2, offload=offload))
    step, counts = jzero.make_train_step(loss_fn), []
    for forgets in (False, False, True):
        if forgets:
            step.clear_cache()
        before = dict(traced)
        state, _ = step(state, np.ones((8, 16), np.float32))
        counts.append({name: traced[name] - before.get(name, 0) for name in ("loss", "update")})
    _, second, after = counts
    assert not any(second.values())
    assert all(after.values())
