"""What may go wrong with checkpoints: kills, damage, full disks, missing permission, two writers."""

import contextlib
import json
import os
import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import jzero
from jzero.checkpoint import format_1, writer
from jzero.checkpoint.contents import sign
from tests import fault_run, golden, shared
from tests.checkpoint_states import like, numbered, sharded
from tests.monitor_runs import disk_of
from tests.tiers import default_for


def make_state(size=61):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("odd", (size, 509)), ("even", 64))}
    return shared.sharded(params, optax.sgd(0.1, momentum=0.9), 3, persistence_threshold=10)


def shapes(state):
    return jzero.abstract_train_state(state, config=jzero.plan_of(state).config)


def assert_is_step(restored, state, step):
    assert int(restored.step) == step
    for found, expected in zip(jax.tree.leaves(restored.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.fixture(scope="module")
def state():
    return make_state()


@pytest.fixture
def two_steps(state, tmp_path):
    """A directory with steps 1 and 2."""
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            extra = {"step": step, "array": np.full(1000, step)}
            manager.save(numbered(state, step), extra=extra)
    return tmp_path / "run"


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip_bits(path):
    """Flips some bits, so that no array of the file is as it was."""
    data = bytearray(path.read_bytes())
    for sixth in (1, 3, 5):
        data[len(data) * sixth // 6] ^= 4
    path.write_bytes(bytes(data))


DAMAGE = {"truncated": truncate, "flipped": flip_bits, "gone": pathlib.Path.unlink}


@pytest.mark.slow  # by default, `tests/test_multiprocess.py` kills a process while it saves
@pytest.mark.parametrize("options", [{"disk": True}, {"programs": 2}, {"workers": 1}], ids=str)
def test_kills_at_random_moments_lose_nothing(options, tmp_path):
    """The short form of `python -m tests.fault_run --kills 500`."""
    for name in ("run", "compiled", "scratch"):
        (tmp_path / name).mkdir()
    scratch = str(tmp_path / "scratch") if options.pop("disk", False) else None
    fault_run.run(fault_run.Options(str(tmp_path / "run"), str(tmp_path / "compiled"), scratch, **options), 4, 7)
    assert not list((tmp_path / "scratch").iterdir()), "nothing is left on the disk"


@pytest.mark.parametrize("damage", default_for(["flipped"], DAMAGE))
def test_any_damaged_file_is_noticed_or_does_not_matter(damage, state, two_steps):
    start = shapes(state)
    noticed = []
    for path in files(two_steps / "2"):
        kept = path.read_bytes()
        DAMAGE[damage](path)
        manager = jzero.CheckpointManager(two_steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = manager.restore(start)
        went_back = int(restored.step) == 1
        assert_is_step(restored, state, 1 if went_back else 2)
        said = [str(w.message) for w in caught if "is damaged" in str(w.message)]
        assert len(said) == went_back, (path, said)
        assert all(text.startswith("Step 1 was restored, since what is newer is damaged:\n") for text in said)
        try:
            assert manager.restore_extra(step=2)["array"].tolist() == [2] * 1000
        except jzero.CheckpointError:
            noticed.append(path)
        noticed += [path] if went_back else []
        path.write_bytes(kept)
    largest = max(files(two_steps / "2" / "default"), key=lambda path: path.stat().st_size)
    for path in (largest, two_steps / "2" / "jzero" / "metadata", two_steps / "2" / "extra" / "metadata"):
        assert path in noticed
    assert_is_step(jzero.CheckpointManager(two_steps).restore(start), state, 2)


def test_the_error_names_leaf_and_file(state, two_steps):
    largest = max(files(two_steps / "2" / "default"), key=lambda path: path.stat().st_size)
    truncate(largest)
    with pytest.raises(jzero.CheckpointError) as error:
        jzero.CheckpointManager(two_steps).restore(shapes(state), step=2)
    assert "/odd" in str(error.value)
    assert str(largest) in str(error.value)
    assert "Restore an earlier step" in str(error.value)
    info = jzero.inspect_checkpoint(two_steps / "2", verify=True)
    assert info.damaged
    assert all("odd" in path for path in info.damaged)
    assert str(largest) in " ".join(info.damaged.values())
    assert "Restore an earlier step" not in str(info)
    assert len(str(info).splitlines()) == len(jzero.inspect_checkpoint(two_steps / "2").table().splitlines()) + 1 + len(
        info.damaged
    )
    # Parameters and moments may lie in different files.
    for path in {*(two_steps / "2" / "default").rglob("d/*")} - {largest}:
        truncate(path)
    with pytest.raises(jzero.CheckpointError, match="damaged"):
        jzero.export_checkpoint(two_steps / "2", two_steps / "out")
    assert not files(two_steps / "out"), "nothing is left of an export that failed"


def test_nothing_that_can_be_read(state, two_steps):
    for step in (1, 2):
        truncate(two_steps / str(step) / "default" / "manifest.ocdbt")
    with pytest.raises(jzero.CheckpointError, match=r"(?s)can be read:.*run/2.*run/1"):
        jzero.CheckpointManager(two_steps).restore(shapes(state))
    with pytest.raises(jzero.CheckpointError, match=r"no step 5 in .*\[1, 2\]"):
        jzero.CheckpointManager(two_steps).restore(shapes(state), step=5)


def test_what_was_not_completed_does_not_count(state, two_steps):
    suffix = ocp.path.step.TMP_DIR_SUFFIX
    shutil.copytree(two_steps / "2", two_steps / f"3{suffix}")
    (two_steps / f"4{suffix}" / "default").mkdir(parents=True)
    manager = jzero.CheckpointManager(two_steps)
    assert manager.all_steps() == [1, 2]
    assert_is_step(manager.restore(shapes(state)), state, 2)
    with manager:
        manager.save(numbered(state, 3))
    assert sorted(path.name for path in two_steps.iterdir()) == ["1", "2", "3", "jzero.lock"], "and is cleared away"


def test_a_step_that_is_half_removed_is_no_checkpoint(state, tmp_path, monkeypatch):
    """A process that is killed while it removes old steps leaves nothing behind that looks like one."""
    monkeypatch.setattr(writer, "_remove_all", lambda directory: None)
    with jzero.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(numbered(state, step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "jzero.lock", "removed"]
    assert sorted(path.name for path in (tmp_path / "removed").iterdir()) == ["1", "2"]
    monkeypatch.undo()
    with jzero.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        assert manager.all_steps() == [3]
        manager.save(numbered(state, 4))
    assert not list((tmp_path / "removed").iterdir())
    assert_is_step(jzero.CheckpointManager(tmp_path).restore(shapes(state)), state, 4)


def test_two_writers(state, tmp_path):
    with jzero.CheckpointManager(tmp_path) as first, jzero.CheckpointManager(tmp_path) as second:
        first.save(numbered(state, 1))
        assert second.save(numbered(state, 2)), "waits for the first one, and takes over"
        assert first.save(numbered(state, 3))
        first.wait()
        assert second.all_steps() == [1, 2, 3]
        assert_is_step(second.restore(shapes(state)), state, 3)
        first.close()
        assert second.save(numbered(state, 4))
    assert jzero.CheckpointManager(tmp_path).all_steps() == [1, 2, 3, 4]


def unwritable(tmp_path):
    if os.geteuid() == 0:  # root may write anywhere but there
        return pathlib.Path("/sys/jzero")
    tmp_path.chmod(0o555)
    return tmp_path / "run"


def test_no_permission(state, tmp_path):
    directory = unwritable(tmp_path)
    with (
        jzero.CheckpointManager(directory) as manager,
        pytest.raises(jzero.CheckpointError, match=r"PermissionError.*may write there"),
    ):
        manager.save(state)
    with pytest.raises(jzero.CheckpointError, match=r"could not be written .*PermissionError"):
        jzero.save_checkpoint(directory / "c", state)
    with pytest.raises(jzero.CheckpointError, match="could not be written"):
        jzero.export_params(state, directory / "c")


# Several writes fail; asyncio tells of those that nobody waits for any more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_costs_no_earlier_checkpoint(state, tmp_path):
    manager = jzero.CheckpointManager(tmp_path / "run")
    manager.save(numbered(state, 1))
    manager.wait()
    with disk_of(50_000):
        for step in (2, 3):
            manager.save(numbered(state, step))
            with pytest.raises(jzero.CheckpointError, match=rf"/{step} could not be written.*earlier ones are as they"):
                manager.wait()
            assert manager.all_steps() == [1]
        with pytest.raises(jzero.CheckpointError, match="could not be written"):
            jzero.export_params(state, tmp_path / "out")
    assert_is_step(manager.restore(shapes(state)), state, 1)
    manager.save(numbered(state, 4))
    manager.close()
    assert manager.all_steps() == [1, 4]


def test_a_later_format_and_notes_that_are_gone(state, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", state)
    path = tmp_path / "c" / "jzero" / "metadata"
    notes = {name: x for name, x in json.loads(path.read_text()).items() if name != "digest"}
    path.write_text(json.dumps(sign({**notes, "format": 3, "jzero": "9.9"})))
    with pytest.raises(ValueError, match=r"jzero 9\.9 in format 3"):
        jzero.restore_checkpoint(tmp_path / "c", shapes(state))
    shutil.rmtree(tmp_path / "c" / "jzero")
    with pytest.raises(jzero.CheckpointError, match="c/jzero/metadata cannot be read"):
        jzero.restore_checkpoint(tmp_path / "c", shapes(state))


def noted(directory, **changes):
    """Changes the notes of a checkpoint, with a right digest."""
    path = directory / "jzero" / "metadata"
    notes = {name: x for name, x in json.loads(path.read_text()).items() if name != "digest"}
    path.write_text(json.dumps(sign({**notes, **changes})))


SCALE = {"scale": 1.0, "good_steps": 0, "hysteresis": 2, "exhausted": False, "overflowed": [False]}
NOTES = {
    "format": ("2", None, True, 0, [1], 1.5),
    "jzero": (None, 3),
    "config": (None, [], {}, {"stage": 4}, {"stage": "3"}),
    "mesh": (None, [], {"data": "8"}, {"data": 0}),
    "num_processes": (None, "1", 0, True),
    "checksums": (None, [], 3, {"params/w": "x"}, {"params/w": -1}),
    "digests": (None, [], {"extra": None}),
    "keys": (3, None, "params", [3], {"a": 1}),
    "paths": (3, None, "params", [3]),
    "precision": (
        *(None, [], {"num_updates": "3"}, {"num_updates": -1}, {"num_updates": 10**12}, {"loss_scale": 3}),
        *({"loss_scale": {}}, *({"loss_scale": {**SCALE, name: None}} for name in SCALE)),
        {"loss_scale": {**SCALE, "scale": float("inf")}},
    ),
}


@pytest.mark.parametrize("field", NOTES)
def test_notes_of_another_shape_are_damage(field, state, tmp_path):
    jzero.save_checkpoint(tmp_path / "c", state)
    for value in NOTES[field]:
        noted(tmp_path / "c", **{field: value})
        with pytest.raises(jzero.CheckpointError, match=rf"`{field}\b.* in .*c/jzero/metadata must"):
            jzero.restore_checkpoint(tmp_path / "c", shapes(state))
        with pytest.raises(jzero.CheckpointError, match=rf"`{field}\b.* in .*c/jzero/metadata must"):
            jzero.inspect_checkpoint(tmp_path / "c")


def test_a_manager_goes_from_notes_of_another_shape_to_the_step_before(state, two_steps):
    noted(two_steps / "2", precision=None)
    with jzero.CheckpointManager(two_steps) as manager, pytest.warns(UserWarning, match="`precision` in"):
        assert_is_step(manager.restore(shapes(state)), state, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves tasks behind
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_one_flipped_bit_of_any_number_is_refused_by_plain_orbax_and_zarr_too(stage, dtype, tmp_path):
    rng = np.random.default_rng(0)
    params = {x: jnp.asarray(rng.integers(-99, 99, n)).astype(dtype) for x, n in (("odd", 16381), ("even", 64))}
    plain = jzero.TrainState.create(params=params, tx=optax.identity())
    path = tmp_path / "c"
    jzero.save_checkpoint(path, sharded(plain, stage))
    part = np.asarray(params["odd"])[3000:3012].tobytes()
    for file in (path / "default").rglob("d/*"):
        data = bytearray(file.read_bytes())
        if part in data:
            data[data.index(part) + len(part) - 1] ^= 4
            file.write_bytes(bytes(data))
    assert list(jzero.inspect_checkpoint(path, verify=True).damaged) == ["params/odd"]
    with pytest.raises(jzero.CheckpointError, match=r"leaf 'params/odd', file .*is damaged"):
        jzero.restore_checkpoint(path, like(plain, 3, 5))
    with pytest.raises(Exception, match=r"params\.odd.*Digest mismatch"):
        ocp.PyTreeCheckpointer().restore(path / "default")
    zarr = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": f"file://{path}/default/", "path": "params.odd/"}}
    with pytest.raises(ValueError, match="Digest mismatch"):
        ts.open(zarr).result().read().result()


# Format 1, whose checksums jzero computed itself: against sums written out by hand.

GOLDEN_1 = pathlib.Path(__file__).parent / "golden" / "checkpoint_v1"


@pytest.mark.parametrize("leaf", ["params/odd", "params/half", "opt_state/0/count"])
def test_a_leaf_of_format_1_that_differs_from_its_checksum_is_damaged(leaf, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(GOLDEN_1, path)
    file = path / "jzero" / "metadata"
    notes = json.loads(file.read_text())
    del notes["digest"]
    notes["checksums"][leaf] ^= 1
    file.write_text(json.dumps(sign(notes)))
    assert list(jzero.inspect_checkpoint(path, verify=True).damaged) == [leaf]
    start = golden.like(3, jzero.make_mesh())
    with pytest.raises(jzero.CheckpointError, match=f"leaf '{leaf}' is not what was written, by its checksum"):
        jzero.restore_checkpoint(path, start)
    with pytest.raises(jzero.CheckpointError, match=leaf) if "params" in leaf else contextlib.nullcontext():
        jzero.export_checkpoint(path, tmp_path / "out")


def murmur_mix(h):
    """The finalizer of MurmurHash3 as published, in whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int8", "complex64", "int4", "bool", "float64"])
def test_sums_of_format_1(dtype):
    x = np.random.default_rng(0).integers(-8, 8, size=(17, 5, 901)).astype(jnp.dtype(dtype))
    if dtype == "int4":
        words = (x.reshape(-1).astype(int) % 16).astype(np.uint64)
    else:
        words = np.frombuffer(x.tobytes(), f"uint{min(32, 8 * x.dtype.itemsize)}").astype(np.uint64)
    expected = int(murmur_mix(words ^ (np.arange(len(words), dtype=np.uint64) * 0x9E3779B1 % 2**32)).sum()) % 2**32
    found = format_1.words_of(x)
    half = len(found) // 3
    assert (format_1.sum_of(found[:half], 0) + format_1.sum_of(found[half:], half)) % 2**32 == expected
