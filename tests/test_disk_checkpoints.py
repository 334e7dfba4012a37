"""Checkpoints of states with optimizer state on disk: the same tree as from memory, in the memory of a few records."""

import ctypes
import functools
import gc
import json
import math
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jzero
from jzero.checkpoint import disk_places
from jzero.checkpoint.disk_places import in_natural, in_stored
from jzero.core.layout.box import Box, record_boxes
from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import StateLeaf
from tests.checkpoint_states import assert_same_bits, mesh
from tests.disk_checkpoint_states import (  # noqa: F401  # fixtures
    expected,
    files_of_other_tests,
    layout,
    like,
    on_disk,
    plain,
    saved,
    scratch,
    step,
    train,
    values,
    whole,
)
from tests.example_runs import run_python
from tests.tiers import slow

SHAPES = [(7,), (9, 7), (3, 5, 4), (2, 3, 2, 5)]
CUTS = [(shape, dim, flat) for shape in SHAPES for dim in range(len(shape)) for flat in (False, True)]


@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize(("shape", "dim", "flat"), CUTS)
def test_records_and_chunks_hold_the_elements_of_the_array(shape, dim, flat, most):
    """A stored array is cut into records, these into pieces of the natural array; chunks are found in it again."""
    cut = Cut(dim, shape, 3, flat=flat)
    leaf = StateLeaf("x", shape, np.dtype(np.int32), mesh(3), ("data",), cut=cut)
    natural = np.arange(1, math.prod(shape) + 1).reshape(shape)
    stored = natural.reshape(*shape[:dim], *[1] * (len(shape) - dim - 1), -1) if flat else natural
    widths = [(0, 0)] * stored.ndim
    widths[-1 if flat else dim] = (0, cut.stored_size - cut.natural_size)
    stored = np.pad(stored, widths)
    found = np.zeros(shape, int)
    for place in record_boxes(stored.shape, 1, most):
        record = stored[place.slices]
        for piece in in_natural(place, leaf):
            assert not found[piece.natural.slices].any(), "each element once"
            found[piece.natural.slices] = record[piece.inside].reshape(piece.natural.shape)
    np.testing.assert_array_equal(found, natural)
    tail = dim if flat else 0
    chunk = (*(1 for _ in shape[:tail]), *record_boxes(shape[tail:], 1, most)[0].shape)
    for place in Box.whole(shape).split(chunk):
        np.testing.assert_array_equal(stored[in_stored(place, leaf).slices].reshape(place.shape), natural[place.slices])


@pytest.mark.parametrize("several", [1, 2])
def test_chunks_of_several_processes_end_where_parts_end(on_disk, several, monkeypatch):
    plan = jzero.plan_of(on_disk(num=3))
    monkeypatch.setattr(jax, "process_count", lambda: several)
    for i, leaf in enumerate(plan.leaves):
        if i not in plan.record_fields or not disk_places.is_streamed(leaf.grad):
            continue
        chunk, part = disk_places.chunk_shape(plan, i), leaf.grad.part_shape
        assert math.prod(chunk) <= plan.record_boxes(i)[0].size
        if several == 2:
            cut = [d for d in range(len(part)) if part[d] < leaf.grad.stored_shape[d]]
            assert all(part[d] % chunk[d] == 0 for d in cut)


STREAMED = ("disk", 3, "bf16", 2)
READERS = [STREAMED, ("host", 2, "bf16", 8), ("none", 3, "fp32", 5), ("disk", 1, "fp32", 3)]
CASES = [
    (STREAMED, READERS[3:]),  # what else reads it sees the same tree: the values and notes that tests here compare
    (("none", 3, "fp32", 2), READERS[:1]),
    slow(("disk", 0, "fp16", 2), READERS),
    slow(("host", 1, "bf16", 2), READERS[:1]),
    slow(("none", 1, "fp16", 2), READERS[:1]),
]


def ids(x):
    return "-".join(map(str, x)) if isinstance(x, tuple) else f"{len(x)}"


@pytest.mark.parametrize(("writer", "readers"), CASES, ids=ids)
def test_any_placement_reads_what_any_other_wrote(writer, readers, plain, expected, like, scratch, tmp_path):
    written = jzero.shard_train_state(plain, **layout(*writer, scratch))
    jzero.save_checkpoint(tmp_path / "c", written)
    by_orbax = ocp.StandardCheckpointer().restore(tmp_path / "c" / "default", jax.eval_shape(lambda: plain))
    assert_same_bits(values(by_orbax), expected)
    for reader in readers:
        restored = jzero.restore_checkpoint(tmp_path / "c", like(*reader))
        assert_same_bits(whole(restored), expected)
        assert int(restored.step) == int(plain.step)
        assert_parameters_are_rounded(restored, plain)


def assert_parameters_are_rounded(state, plain):
    plan = jzero.plan_of(state)
    for x, leaf, exact in zip(
        jax.tree.leaves(jzero.gather_params(state)), plan.leaves, jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(exact.astype(leaf.param.dtype)), err_msg=leaf.path)


def test_what_plain_orbax_wrote(plain, expected, like, tmp_path):
    ocp.v1.save(tmp_path / "c", plain)
    assert_same_bits(whole(jzero.restore_checkpoint(tmp_path / "c", like())), expected)


def test_edited_parameters_are_saved_as_the_optimizer_would_take_them(plain, expected, on_disk, like, tmp_path):
    state = on_disk()
    params = {**state.params, "flat": state.params["flat"] * 2, "rows": state.params["rows"].at[3, 5].set(7)}
    jzero.save_checkpoint(tmp_path / "c", state.replace(params=params))
    found = whole(jzero.restore_checkpoint(tmp_path / "c", like("none", 3, "fp32")))
    edited = {
        "['params']['flat']": np.asarray(plain.params["flat"].astype(jnp.bfloat16) * 2, np.float32),
        "['params']['rows']": np.asarray(plain.params["rows"].at[3, 5].set(7)),
    }
    assert_same_bits(found, expected | edited)


def test_an_overwritten_state_is_not_saved(on_disk, tmp_path, step):
    old = on_disk()
    kept = old.replace(params=jax.tree.map(lambda x: x.copy(), old.params), step=old.step.copy())
    kept = kept.replace(opt_state=jax.tree.map(lambda x: x.copy(), old.opt_state))
    train(step, old, 1)
    for save in (lambda: jzero.save_checkpoint(tmp_path / "c", kept), lambda: saved(tmp_path / "run", kept)):
        with pytest.raises(RuntimeError, match="later step overwrote"):
            save()
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_what_is_not_restored_stays(plain, expected, on_disk, like, tmp_path, step):
    jzero.save_checkpoint(tmp_path / "c", jzero.shard_train_state(plain, **layout("none", 3, "fp32", 2)))
    state = train(step, on_disk(), 1)
    before = whole(state)
    restored = jzero.restore_checkpoint(tmp_path / "c", state, paths="params/(rows|stack)|opt_state/0/mu/flat")
    is_taken = lambda path: path in ("['params']['rows']", "['params']['stack']") or path.endswith(".mu['flat']")
    assert sum(map(is_taken, before)) == 3
    mixed = {path: expected[path] if is_taken(path) else x for path, x in before.items()}
    assert_same_bits(whole(restored), mixed)
    assert_same_bits(whole(state), before)
    only = jzero.restore_checkpoint(tmp_path / "c", state, params_only=True)
    assert_same_bits(whole(only), {path: expected[path] if "params" in path else x for path, x in before.items()})
    copied = jzero.restore_checkpoint(tmp_path / "c", state, paths="step")
    assert_same_bits(whole(train(step, copied, 1, 1)), whole(train(step, state, 1, 1)))
    with pytest.raises(ValueError, match="`like` has shapes but no values"):
        jzero.restore_checkpoint(tmp_path / "c", like(), params_only=True)


@pytest.mark.slow
def test_parameters_are_exported_leaf_by_leaf_and_loaded(on_disk, expected, plain, tmp_path, step):
    state = on_disk()
    params = {**state.params, "rows": state.params["rows"].at[3, 5].set(7)}
    jzero.export_params(state.replace(params=params), tmp_path / "edited.safetensors")
    loaded = jzero.load_params(state, tmp_path / "edited.safetensors")
    edited = {"['params']['rows']": np.asarray(plain.params["rows"].at[3, 5].set(7))}
    assert_same_bits(whole(loaded), expected | edited)
    with pytest.raises(RuntimeError, match="A later step overwrote"):
        jzero.load_params(state, tmp_path / "edited.safetensors")
    train(step, loaded, 1)


MEMORY_SHAPE = (2048, 2048)
MEMORY_RECORD = 1 << 20


def measure(directory):
    """Saves and restores; returns by how many bytes memory grew meanwhile."""

    def make(key, num_params):
        params = {f"{i}": jnp.full(MEMORY_SHAPE, 1.0 + i) for i in range(num_params)}  # files are not compressed
        return jzero.TrainState.create(params=params, tx=optax.adamw(1e-3))

    os.makedirs(f"{directory}/scratch", exist_ok=True)
    offload = jzero.Offload(optimizer="disk", path=f"{directory}/scratch", chunk_bytes=MEMORY_RECORD)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, precision="bf16", offload=offload)
    grew = {}
    for num_params in (1, 3):  # the first one so that everything is compiled
        state = jzero.init_train_state(functools.partial(make, num_params=num_params), jax.random.key(0), config=config)
        like, path = jzero.abstract_train_state(state, config=config), f"{directory}/{num_params}"
        grew["save"] = growth(functools.partial(jzero.save_checkpoint, path, state))
        grew["restore"] = growth(functools.partial(jzero.restore_checkpoint, path, like))
    plan = jzero.plan_of(state)
    return {
        "on_disk": plan.disk_bytes_per_device // 2 * plan.mesh.size,
        "save": grew["save"],
        "restore": grew["restore"] - 2 * sum(leaf.param.size for leaf in plan.leaves),  # the new parameters, in bf16
        "allowed": 16 * MEMORY_RECORD + (44 << 20),
    }


def growth(call):
    """Returns how far the memory of this process grew while it made a call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed does not count as there
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    kept = call()
    grew = status("VmHWM") - before
    del kept
    return grew


def status(field):
    line = next(x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


MEASURE = """
import json, sys
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from tests.test_disk_checkpoints import measure

print(json.dumps(measure(sys.argv[1])))
"""


@pytest.mark.slow
def test_saving_and_restoring_take_the_memory_of_a_few_records(tmp_path):
    freed = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed goes back to the system at once
    found = json.loads(run_python("-W", "error", "-c", MEASURE, str(tmp_path), **freed).splitlines()[-1])
    assert found["on_disk"] >= 2 * found["allowed"]
    assert found["save"] <= found["allowed"], found
    assert found["restore"] <= found["allowed"], found
