"""Checkpoints of states with optimizer state on disk: the same tree as from memory, in the memory of a few records."""

import functools
import gc
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jzero
from jzero.checkpoint import disk_places, disk_saving
from jzero.checkpoint.disk_places import chunks_of, in_natural, in_stored
from jzero.checkpoint.uninterrupted import Uninterrupted
from jzero.disk import files as disk_files
from jzero.disk.files import DiskError
from jzero.layout.cut import Cut
from jzero.layout.leaves import StateLeaf
from jzero.layout.records import rectangles
from jzero.state.disk import files_of
from tests import disk_checkpoint_run, multiprocess_worker
from tests.checkpoint_states import ONE_DEVICE, arrays, assert_same_bits, mesh
from tests.test_multiprocess import run_processes
from tests.tiers import default_for

ROOT = pathlib.Path(__file__).parents[1]


def make_params():
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "rows": draw(127, 23),  # with padding
        "flat": draw(10, 7),  # both dimensions would be mostly padding: flattened
        "stack": draw(3, 10, 7),  # of layers, each flattened
        "even": draw(64, 48),
        "whole": draw(3),
    }


def loss_fn(params, batch):
    return sum(jnp.square(x).mean() for x in jax.tree.leaves(params)) * jnp.square(batch).mean()


def make_state():
    """A plain state after a step of optax alone, so that moments are numbers of their own."""
    state = jzero.TrainState.create(params=make_params(), tx=optax.adamw(1e-2))
    rng = np.random.default_rng(4)
    return state.apply_gradients(
        grads=jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state.params)
    )


@pytest.fixture(scope="module")
def plain():
    return make_state()


@pytest.fixture(scope="module")
def expected(plain):
    return values(plain)


def values(state):
    return {**arrays({"params": state.params}), **arrays({"opt_state": state.opt_state})}


def whole(state):
    return values(jzero.unshard_train_state(state))


def layout(kind, stage, precision, num=8, path=None):
    offload = {"optimizer": kind} if kind != "disk" else {"optimizer": kind, "path": path, "chunk_bytes": 2048}
    config = jzero.ZeroConfig(
        stage=stage, precision=precision, persistence_threshold=50, offload=jzero.Offload(**offload)
    )
    return {"config": config, "mesh": mesh(num)}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One folder for all, so that plans are equal and each program is compiled once."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def step():
    return jzero.make_train_step(loss_fn)


@pytest.fixture
def on_disk(plain, scratch):
    """Returns a function that places the plain state, with its optimizer state on disk."""
    return lambda stage=3, precision="bf16", num=3: jzero.shard_train_state(
        plain, **layout("disk", stage, precision, num, scratch)
    )


@pytest.fixture
def like(plain, scratch):
    """Returns a function that makes shapes to restore into."""
    return lambda kind="disk", stage=3, precision="bf16", num=3: jzero.abstract_train_state(
        plain, **layout(kind, stage, precision, num, scratch)
    )


def train(step, state, steps, first=0):
    for i in range(first, first + steps):
        state, _ = step(state, np.full(24, 1.0 + i, np.float32))
    return state


OTHERS = weakref.WeakSet()


@pytest.fixture(autouse=True)
def files_of_other_tests():
    """What other tests in this process left open, in a cache or in an error, does not count."""
    gc.collect()
    OTHERS.update(disk_files._OPEN)


def num_open_files():
    gc.collect()
    return len([file for file in disk_files._OPEN if file not in OTHERS])


# Places.


SHAPES = [(7,), (9, 7), (3, 5, 4), (2, 3, 2, 5)]
CUTS = [(shape, dim, flat) for shape in SHAPES for dim in range(len(shape)) for flat in (False, True)]


@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize(("shape", "dim", "flat"), CUTS)
def test_records_and_chunks_hold_the_elements_of_the_array(shape, dim, flat, most):
    """A stored array is cut into records, these into pieces of the natural array; chunks are found in it again."""
    cut = Cut(dim, shape, 3, flat=flat)
    leaf = StateLeaf("x", shape, np.dtype(np.int32), mesh(3), ("data",), cut=cut)
    natural = np.arange(1, math.prod(shape) + 1).reshape(shape)
    stored = natural.reshape(*shape[:dim], -1) if flat else natural
    widths = [(0, 0)] * stored.ndim
    widths[dim] = (0, cut.stored_size - cut.natural_size)
    stored = np.pad(stored, widths)
    found = np.zeros(shape, int)
    for place in rectangles(stored.shape, 1, most):
        record = stored[place.slices]
        for piece in in_natural(place, leaf):
            assert not found[piece.natural.slices].any(), "each element once"
            found[piece.natural.slices] = record[piece.inside].reshape(piece.natural.shape)
    np.testing.assert_array_equal(found, natural)
    tail = dim if flat else 0
    chunk = (*(1 for _ in shape[:tail]), *rectangles(shape[tail:], 1, most)[0].shape)
    for place in chunks_of(shape, chunk):
        np.testing.assert_array_equal(stored[in_stored(place, leaf).slices].reshape(place.shape), natural[place.slices])


@pytest.mark.parametrize("several", [1, 2])
def test_chunks_of_several_processes_end_where_parts_end(on_disk, several, monkeypatch):
    plan = jzero.plan_of(on_disk())
    monkeypatch.setattr(jax, "process_count", lambda: several)
    for i, leaf in enumerate(plan.leaves):
        if i not in plan.disk_fields or not disk_places.is_streamed(leaf.grad):
            continue
        chunk, part = disk_places.chunk_shape(plan, i), leaf.grad.part_shape
        assert math.prod(chunk) <= plan.records_of(i)[0].size
        if several == 2:
            cut = [d for d in range(len(part)) if part[d] < leaf.grad.stored_shape[d]]
            assert all(part[d] % chunk[d] == 0 for d in cut)


# What is written, and who reads it.


CASES = list(itertools.product(("disk", "host", "none"), (3, 1, 0), ("bf16", "fp32", "fp16")))
QUICK = [("disk", 3, "bf16"), ("disk", 1, "fp32"), ("host", 1, "bf16"), ("none", 3, "fp32")]


@pytest.mark.parametrize(("kind", "stage", "precision"), default_for(QUICK, CASES))
def test_any_placement_reads_what_any_other_wrote(kind, stage, precision, plain, expected, like, scratch, tmp_path):
    written = jzero.shard_train_state(plain, **layout(kind, stage, precision, 8, scratch))
    jzero.save_checkpoint(tmp_path / "c", written)
    by_orbax = ocp.StandardCheckpointer().restore(tmp_path / "c" / "default", jax.eval_shape(lambda: plain))
    assert_same_bits(values(by_orbax), expected)
    readers = [("disk", 3, "bf16", 5), ("host", 2, "bf16", 8), ("none", 3, "fp32", 3), ("disk", 1, "fp16", 8)]
    for reader in readers if kind == "disk" else readers[:1]:
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


@pytest.mark.parametrize("how", ["standard", "v1"])
def test_what_plain_orbax_wrote(how, plain, expected, like, tmp_path):
    if how == "v1":
        ocp.v1.save(tmp_path / "c", plain)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "c", plain)
    assert_same_bits(whole(jzero.restore_checkpoint(tmp_path / "c", like())), expected)


@ONE_DEVICE
def test_one_device_and_leaves_in_one_record(plain, expected, like, tmp_path):
    config = jzero.ZeroConfig(
        stage=0, precision="bf16", persistence_threshold=0, offload=jzero.Offload(optimizer="disk", path=tmp_path)
    )
    state = jzero.shard_train_state(plain, config=config, mesh=mesh(1))
    jzero.save_checkpoint(tmp_path / "c", state)
    assert_same_bits(whole(jzero.restore_checkpoint(tmp_path / "c", like("none", 3, "fp32"))), expected)


def test_the_notes_are_those_of_a_state_in_memory(plain, on_disk, tmp_path):
    jzero.save_checkpoint(tmp_path / "near", jzero.shard_train_state(plain, **layout("none", 3, "bf16")))
    jzero.save_checkpoint(tmp_path / "far", on_disk())
    near, far = (json.loads((tmp_path / name / "jzero" / "metadata").read_text()) for name in ("near", "far"))
    assert near["checksums"] == far["checksums"]
    assert not jzero.inspect_checkpoint(tmp_path / "far", verify=True).damaged


def test_training_goes_on_to_the_bit(on_disk, like, tmp_path, step):
    state = train(step, on_disk(), 2)
    jzero.save_checkpoint(tmp_path / "c", state)
    restored = jzero.restore_checkpoint(tmp_path / "c", like())
    assert_same_bits(whole(train(step, restored, 2, 2)), whole(train(step, state, 2, 2)))


@pytest.mark.parametrize("stage", [3, 1])
def test_edited_parameters_are_saved_as_the_optimizer_would_take_them(stage, plain, expected, on_disk, like, tmp_path):
    state = on_disk(stage)
    params = {**state.params, "flat": state.params["flat"] * 2, "even": state.params["even"].at[3, 5].set(7)}
    jzero.save_checkpoint(tmp_path / "c", state.replace(params=params))
    found = whole(jzero.restore_checkpoint(tmp_path / "c", like("none", 3, "fp32")))
    edited = {
        "['params']['flat']": np.asarray(plain.params["flat"].astype(jnp.bfloat16) * 2, np.float32),
        "['params']['even']": np.asarray(plain.params["even"].at[3, 5].set(7)),
    }
    assert_same_bits(found, expected | edited)


def test_an_overwritten_state_is_not_saved(on_disk, tmp_path, step):
    old = on_disk()
    kept = old.replace(params=jax.tree.map(lambda x: x.copy(), old.params), step=old.step.copy())
    kept = kept.replace(opt_state=jax.tree.map(lambda x: x.copy(), old.opt_state))
    train(step, old, 1)
    for save in (lambda: jzero.save_checkpoint(tmp_path / "c", kept), lambda: saved(tmp_path / "run", kept)):
        with pytest.raises(RuntimeError, match="A later step overwrote what this state has on disk"):
            save()
    assert not (tmp_path / "c").exists()


def saved(directory, *states):
    with jzero.CheckpointManager(directory) as manager:
        for state in states:
            manager.save(state)


# Parts of a state.


def test_what_is_not_restored_stays(plain, expected, on_disk, like, tmp_path, step):
    jzero.save_checkpoint(tmp_path / "c", jzero.shard_train_state(plain, **layout("none", 3, "fp32")))
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


def test_donated_files_are_freed_before_new_ones_are_made(on_disk, expected, tmp_path, monkeypatch):
    state = on_disk()
    jzero.save_checkpoint(tmp_path / "c", state)
    assert num_open_files() == 2
    there = []
    opened = disk_files.UnnamedFile.__init__
    monkeypatch.setattr(
        disk_files.UnnamedFile, "__init__", lambda self, *args: (there.append(num_open_files()), opened(self, *args))[1]
    )
    restored = jzero.restore_checkpoint(tmp_path / "c", state, donate=True)
    assert there == [0, 1]
    assert_same_bits(whole(restored), expected)
    again = jzero.restore_checkpoint(tmp_path / "c", restored, donate=True, paths="opt_state/0/mu/.*")
    assert num_open_files() == 2
    assert_same_bits(whole(again), expected)


def test_parameters_are_exported_leaf_by_leaf_and_loaded(on_disk, expected, plain, tmp_path, step):
    state = on_disk()
    params = {**state.params, "even": state.params["even"].at[3, 5].set(7)}
    jzero.export_params(state.replace(params=params), tmp_path / "edited.safetensors")
    loaded = jzero.load_params(state, tmp_path / "edited.safetensors")
    edited = {"['params']['even']": np.asarray(plain.params["even"].at[3, 5].set(7))}
    assert_same_bits(whole(loaded), expected | edited)
    with pytest.raises(RuntimeError, match="A later step overwrote"):
        jzero.load_params(state, tmp_path / "edited.safetensors")
    train(step, loaded, 1)


# Saving beside training.


@pytest.fixture
def held(monkeypatch):
    """Holds back the reads of saves in the background until it is set."""
    may_read, reads = threading.Event(), []
    real = disk_saving.Snapshot.read

    def read(self, number, buffer):
        reads.append(number)
        assert may_read.wait(60)
        real(self, number, buffer)

    monkeypatch.setattr(disk_saving.Snapshot, "read", read)
    may_read.reads = reads
    return may_read


def test_one_step_runs_beside_a_save_and_the_next_waits(on_disk, like, tmp_path, held, step):
    state = train(step, on_disk(), 1)
    at_save = whole(state)
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(state)
        state = train(step, state, 1, 1)
        done = []
        second = threading.Thread(target=lambda: done.append(train(step, state, 1, 2)))
        second.start()
        second.join(2)
        assert not done, "it would overwrite what is not saved yet"
        held.set()
        second.join(60)
        manager.save(done[0])
        manager.wait()
        assert_same_bits(whole(manager.restore(like(), step=2)), at_save)
        assert_same_bits(whole(manager.restore(like(), step=4)), whole(done[0]))


def test_edits_are_saved_as_they_were(on_disk, like, tmp_path, held, step):
    state = on_disk()
    state = state.replace(params=jax.tree.map(lambda x: x * 2, state.params))
    at_save = whole(state)
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        manager.save(state)
        train(step, state, 1)
        held.set()
        manager.wait()
        assert_same_bits(whole(manager.restore(like())), at_save)


FAILURES = {
    "the store": ("jzero.checkpoint.disk_saving.Snapshot.read", DiskError, "Reading failed"),
    "the checkpoint": ("jzero.checkpoint.orbax_io._create", OSError, "No space left on device"),
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_save_that_fails_leaves_training_and_earlier_checkpoints(where, on_disk, like, tmp_path, monkeypatch, step):
    state = on_disk()
    manager = jzero.CheckpointManager(tmp_path / "run")
    manager.save(state)
    manager.wait()
    first, state = whole(state), train(step, state, 1)
    place, kind, text = FAILURES[where]

    def fail(*args):
        raise kind(text)

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        manager.save(state)
        state = train(step, state, 3, 1)  # none of them waits for ever
        with pytest.raises(jzero.CheckpointError, match="could not be written"):
            manager.wait()
        with pytest.raises(jzero.CheckpointError, match="could not be written"):
            jzero.save_checkpoint(tmp_path / "c", state)
        state = train(step, state, 3, 4)
    assert not (tmp_path / "c").exists()
    assert_same_bits(whole(manager.restore(like())), first)
    manager.save(state)
    manager.close()
    assert_same_bits(whole(manager.restore(like())), whole(state))


def test_what_fails_before_the_write_begins_lets_steps_run(on_disk, tmp_path, monkeypatch, step):
    state = on_disk()
    for attempt, error in (
        (lambda state: jzero.save_checkpoint(tmp_path / "c", state, extra={"f": print}), TypeError),
        (lambda state: jzero.save_checkpoint("/proc/nowhere/c", state), jzero.CheckpointError),
        (lambda state: jzero.CheckpointManager("/proc/nowhere").save(state), jzero.CheckpointError),
    ):
        with pytest.raises(error) as caught:  # which holds the frames of the attempt
            attempt(state)
        state = train(step, state, 3)
        assert caught.value


@pytest.mark.parametrize("call", ["_write", "_save", "examine"])
def test_ctrl_c_while_it_saves_holds_no_step_up(call, on_disk, like, tmp_path, monkeypatch, step):
    state, told = on_disk(), []
    at_save, real = whole(state), Uninterrupted.run

    def run(self, function, *args, **kwargs):
        if function.__name__ == call and not told:
            told.append(call)
            self._pool.submit(function, *args, **kwargs)
            raise KeyboardInterrupt
        return real(self, function, *args, **kwargs)

    def examine(self, params):
        raise KeyboardInterrupt

    manager = jzero.CheckpointManager(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Uninterrupted, "run", run)
        if call == "examine":
            patch.setattr(disk_saving.Snapshot, call, examine)
        with pytest.raises(KeyboardInterrupt) as caught:  # which holds the frames of the save
            manager.save(state) if call != "_write" else jzero.save_checkpoint(tmp_path / "c", state)
        train(step, state, 3)
        assert caught.value
    assert not (tmp_path / "c").exists()
    manager.close()
    assert manager.all_steps() == ([1] if call == "_save" else [])
    if call == "_save":
        assert_same_bits(whole(manager.restore(like())), at_save)


# Damage.


def flip_a_bit(files, record, byte=100):
    store = files.pipeline.store
    fd = os.open(f"/proc/self/fd/{store._files[store.slot]._fd}", os.O_RDWR)
    at = store.offsets[record] + byte
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
    os.close(fd)


def test_a_flipped_bit_in_the_store_is_not_saved(on_disk, tmp_path):
    state = on_disk()
    flip_a_bit(files_of(state), 5)
    for attempt in (lambda: jzero.save_checkpoint(tmp_path / "c", state), lambda: saved(tmp_path / "run", state)):
        with pytest.raises(DiskError, match=r"Record 5 in .* is not what was written there"):
            attempt()
    assert not (tmp_path / "c").exists()
    assert not list((tmp_path / "run").glob("*"))


def damage(directory):
    """Flips bits everywhere in the files of values, since some bytes of Orbax's database are read by nobody."""
    for path in directory.rglob("d/*"):
        data = bytearray(path.read_bytes())
        data[::500] = bytes(x ^ 4 for x in data[::500])
        path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_is_noticed_and_leaves_no_files(on_disk, like, tmp_path, step):
    state = on_disk()
    for _ in range(2):
        saved(tmp_path / "run", state)
        state = train(step, state, 1)
    del state
    damage(tmp_path / "run" / "2")
    assert num_open_files() == 0
    manager = jzero.CheckpointManager(tmp_path / "run")
    with pytest.raises(jzero.CheckpointError, match="damaged"):
        manager.restore(like(), step=2)
    assert num_open_files() == 0
    with pytest.warns(UserWarning, match="Step 1 was restored, since what is newer is damaged"):
        restored = manager.restore(like())
    assert num_open_files() == 2
    train(step, restored, 1)


def test_checksums_find_what_the_file_format_does_not(on_disk, like, tmp_path, monkeypatch):
    """As if a bit of the values flipped between the first pass and the second."""
    real = disk_saving.Snapshot.read

    def read(self, number, buffer):
        real(self, number, buffer)
        if number == 5:
            buffer[3] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(disk_saving.Snapshot, "read", read)
        jzero.save_checkpoint(tmp_path / "c", on_disk())
    for kind in ("disk", "host"):
        with pytest.raises(
            jzero.CheckpointError, match="are not what was written, by their checksums:\n  opt_state/0/mu/even"
        ):
            jzero.restore_checkpoint(tmp_path / "c", like(kind))
    assert num_open_files() == 0


def test_a_disk_that_is_too_small_for_the_state(on_disk, like, tmp_path, monkeypatch):
    jzero.save_checkpoint(tmp_path / "c", on_disk())
    monkeypatch.setattr("jzero.disk.stores.free_bytes", lambda folder: 4096)
    with pytest.raises(DiskError, match="is too small for the optimizer state"):
        jzero.restore_checkpoint(tmp_path / "c", like())


# Processes.


def run_script(*arguments, **environment):
    command = [sys.executable, "-W", "error", "-m", "tests.disk_checkpoint_run", *map(str, arguments)]
    environment = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kills", default_for([1], [1, 50]))
def test_kills_at_random_moments_lose_nothing(kills, tmp_path):
    (tmp_path / "scratch").mkdir()
    rows = disk_checkpoint_run.run(str(tmp_path), str(tmp_path / "scratch"), kills, seed=11)
    assert len(rows) == kills + 1
    assert all(row["went_on_from"] >= row["was_complete"] for row in rows)
    assert rows[-1]["went_on_from"] > 0
    assert os.listdir(tmp_path / "scratch") == []


def test_saving_and_restoring_take_the_memory_of_a_few_records(tmp_path):
    # What is freed goes back to the system at once, so that it does not count.
    ended = run_script("--memory", tmp_path, MALLOC_MMAP_THRESHOLD_="131072")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["on_disk"] >= 5 * found["allowed"]
    assert found["save"] <= found["allowed"], found
    assert found["restore"] <= found["allowed"], found


def test_two_processes(tmp_path):
    """What two processes save, one restores, and the other way round; flattened leaves go through memory."""
    (tmp_path / "scratch").mkdir()
    make = functools.partial(multiprocess_worker.make_state, jax.random.key(0))
    one = jzero.shard_train_state(make(), config=multiprocess_worker.config(1))
    jzero.save_checkpoint(tmp_path / "from_one", one)
    outputs = run_processes("disk_checkpoints", tmp_path)
    assert [status for status, _, _ in outputs] == [0, 0], outputs[0][2] + outputs[1][2]
    found = [json.loads(output.splitlines()[-1]) for _, output, _ in outputs]
    like = jzero.abstract_train_state(jax.eval_shape(make), config=multiprocess_worker.config(3))
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        trained = multiprocess_worker.whole(manager.restore(like))
    for results in found:
        assert results["restored"] == multiprocess_worker.whole(one)
        assert results["trained"] == results["again"] == trained
        assert results["edited"] != results["trained"]
        assert "is not what was written there" in results["flipped"]
        assert not results["left"]
