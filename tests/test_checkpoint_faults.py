"""What may go wrong with checkpoints: kills, damage, full disks, missing permission, two writers."""

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

import jzero
from jzero.checkpoint import checksum, writer
from jzero.checkpoint.contents import sign
from tests import fault_run
from tests.checkpoint_states import numbered, sharded
from tests.monitor_runs import disk_of
from tests.tiers import default_for


def make_state(size=61):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("odd", (size, 509)), ("even", 64))}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1, momentum=0.9))
    return jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=10))


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
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """The short form of `python -m tests.fault_run --kills 50`, with state on disk."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    rows = fault_run.run(str(tmp_path / "run"), 4, 7, "--scratch", str(scratch))
    assert len(rows) == 5
    assert all(row["went_on_from"] >= row["was_complete"] for row in rows)
    assert rows[-1]["went_on_from"] > 0
    assert not list(scratch.iterdir()), "nothing is left on the disk"


@pytest.mark.parametrize("damage", default_for(["flipped"], DAMAGE))
def test_any_damaged_file_is_noticed_or_does_not_matter(damage, state, two_steps):
    like = shapes(state)
    noticed = []
    for path in files(two_steps / "2"):
        kept = path.read_bytes()
        DAMAGE[damage](path)
        manager = jzero.CheckpointManager(two_steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = manager.restore(like)
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
    assert_is_step(jzero.CheckpointManager(two_steps).restore(like), state, 2)


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
    path.write_text(json.dumps(sign({**notes, "format": 2, "jzero": "9.9"})))
    with pytest.raises(ValueError, match=r"jzero 9\.9 in format 2"):
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


# Checksums of arrays, against sums written out by hand.


def murmur_mix(h):
    """The finalizer of MurmurHash3 as published, in whole numbers."""
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


CASES = [("float32", 8, 3), ("bfloat16", 3, 3), ("uint16", 8, 0), ("int8", 5, 1), ("complex64", 5, 1), ("int4", 8, 3)]


@pytest.mark.parametrize(("dtype", "num", "stage"), CASES)
def test_checksums_do_not_depend_on_the_layout(dtype, num, stage, monkeypatch):
    """On the host and on the devices, against a sum written out by hand, with numpy, over the natural array."""
    numbers = np.random.default_rng(0).integers(-8 if "u" not in dtype[:1] else 0, 8, size=(17, 5, 9))
    params = {"x": jnp.asarray(numbers).astype(dtype), "y": jnp.asarray(numbers[:16]).astype(dtype)}
    state = sharded(jzero.TrainState.create(params=params, tx=optax.identity()), stage, num)
    leaves = jax.tree.leaves(state.params)
    stored = [(leaf.param.shape, leaf.param.cut) for leaf in jzero.plan_of(state).leaves]
    shapes = [shape if cut is None else cut.unpadded_shape for shape, cut in stored]
    on_host = checksum.checksums(leaves, shapes)
    monkeypatch.setattr(checksum, "is_on_cpu", lambda x: False)
    on_devices = checksum.checksums(leaves, shapes)
    for value, other, x in zip(on_host, on_devices, params.values(), strict=True):
        raw = np.asarray(x)
        if dtype == "int4":
            words = [int(v) % 16 for v in raw.reshape(-1).astype(int)]
        else:
            words = np.frombuffer(raw.tobytes(), f"uint{min(32, 8 * raw.dtype.itemsize)}").tolist()
        assert value == other == sum(murmur_mix(w ^ (i * 0x9E3779B1 % 2**32)) for i, w in enumerate(words)) % 2**32
        assert checksum.host_sum_of_part(raw, (0, 0, 0), raw.shape) == value


@pytest.mark.parametrize(
    ("dtype", "shape", "dim", "num"),
    [
        ("float32", (13001,), 0, 3),
        ("complex64", (70, 300), 0, 4),
        ("int8", (3, 9001), 1, 2),
        ("bfloat16", (20000, 7), 1, 2),
        ("bool", (2, 3, 20000), 2, 3),
    ],
)
def test_long_parts_are_summed_as_lines_of_consecutive_elements(dtype, shape, dim, num):
    """The shares of padded parts on devices and on the host, and of halves, against the sum over all words."""
    x = np.asarray(jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape)).astype(dtype))
    words = np.frombuffer(x.tobytes(), f"uint{min(32, 8 * x.dtype.itemsize)}").astype(np.uint64)
    places = np.arange(len(words), dtype=np.uint64) * 0x9E3779B1 % 2**32
    expected = int(murmur_mix(words ^ places).sum()) % 2**32
    size = -(-shape[dim] // num)
    total = on_host = 0
    for start in range(0, shape[dim], size):
        part = np.take(x, range(start, min(start + size, shape[dim])), dim)
        part = np.pad(part, [(0, size - n if d == dim else 0) for d, n in enumerate(part.shape)], constant_values=1)
        place = [start if d == dim else 0 for d in range(len(shape))]
        total += int(jax.jit(checksum.sum_of_part, static_argnums=2)(part, place, shape))
        on_host += checksum.host_sum_of_part(part, place, shape)
    assert total % 2**32 == on_host % 2**32 == expected
    flat, first = x.reshape(-1), x.size // 3
    halves = [checksum.host_sum_of_part(y, (at,), flat.shape) for at, y in ((0, flat[:first]), (first, flat[first:]))]
    assert sum(halves) % 2**32 == expected


def test_parts_of_two_cut_dimensions_are_summed():
    x = np.random.default_rng(0).standard_normal((5, 7, 3)).astype(np.float32)
    places = [(0, 0), (0, 4), (3, 0), (3, 4)]
    parts = [np.pad(x[a : a + 3, b : b + 4], [(0, a // 3), (0, b // 4), (0, 0)], constant_values=1) for a, b in places]
    sums = [checksum.host_sum_of_part(part, (*place, 0), x.shape) for part, place in zip(parts, places, strict=True)]
    assert sum(sums) % 2**32 == checksum.host_sum_of_part(x, (0, 0, 0), x.shape)
    assert checksum.host_sum_of_part(parts[0], (6, 0, 0), x.shape) == 0  # all of it padding
