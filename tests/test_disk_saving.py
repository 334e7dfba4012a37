"""Saving state on disk beside training: what waits, and failures, interrupts and damage that lose nothing."""

import gc
import os
import threading

import jax
import pytest

import jzero
from jzero.checkpoint import disk_restoring, disk_saving
from jzero.checkpoint.uninterrupted import Uninterrupted
from jzero.core.disk import files as disk_files
from jzero.core.disk.files import DiskError
from jzero.core.state.record_states import records_of
from tests import shared
from tests.checkpoint_states import assert_same_bits
from tests.disk_checkpoint_states import (  # noqa: F401  # fixtures
    OTHERS,
    expected,
    files_of_other_tests,
    like,
    on_disk,
    plain,
    saved,
    scratch,
    step,
    train,
    whole,
)


def num_open_files():
    gc.collect()
    return len([file for file in disk_files._OPEN if file not in OTHERS])


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


@pytest.fixture
def held(monkeypatch):
    """Holds back the reads of saves in the background until it is set."""
    may_read, reads = threading.Event(), []
    real = disk_saving.Snapshot.read

    def read(self, number, buffer):
        reads.append(number)
        assert may_read.wait(300)
        real(self, number, buffer)

    monkeypatch.setattr(disk_saving.Snapshot, "read", read)
    may_read.reads = reads
    return may_read


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


FAILURES = [  # of the store and of the checkpoint
    ("jzero.checkpoint.disk_saving.Snapshot.read", DiskError, "Reading failed"),
    ("jzero.checkpoint.orbax_io._create", OSError, "No space left on device"),
]


def test_saves_that_fail_leave_training_and_earlier_checkpoints(on_disk, like, tmp_path, monkeypatch, step):
    state = on_disk()
    manager = jzero.CheckpointManager(tmp_path / "run")
    manager.save(state)
    manager.wait()
    first, state = whole(state), train(step, state, 1)
    for place, kind, text in FAILURES:
        with monkeypatch.context() as patch:
            patch.setattr(place, shared.raising(kind(text)))
            manager.save(state)
            state = train(step, state, 3)  # none of them waits for ever
            with pytest.raises(jzero.CheckpointError, match="could not be written"):
                manager.wait()
            with pytest.raises(jzero.CheckpointError, match="could not be written"):
                jzero.save_checkpoint(tmp_path / "c", state)
            state = train(step, state, 1)
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
        state = train(step, state, 2)
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
        train(step, state, 2)
        assert caught.value
    assert not (tmp_path / "c").exists()
    manager.close()
    assert manager.all_steps() == ([1] if call == "_save" else [])
    if call == "_save":
        assert_same_bits(whole(manager.restore(like())), at_save)


def flip_a_bit(files, record, byte=100):
    store = files.pipeline.store
    fd = os.open(f"/proc/self/fd/{store._files[store.slot]._fd}", os.O_RDWR)
    at = store.offsets[record] + byte
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
    os.close(fd)


def test_a_flipped_bit_in_the_store_is_not_saved(on_disk, tmp_path):
    state = on_disk()
    flip_a_bit(records_of(state), 5)
    for attempt in (lambda: jzero.save_checkpoint(tmp_path / "c", state), lambda: saved(tmp_path / "run", state)):
        with pytest.raises(DiskError, match="Record 5 in "):
            attempt()
    assert not (tmp_path / "c").exists()
    assert not list((tmp_path / "run").glob("*"))


def test_a_disk_that_is_too_small_for_the_state(on_disk, like, tmp_path, monkeypatch):
    jzero.save_checkpoint(tmp_path / "c", on_disk())
    monkeypatch.setattr("jzero.core.disk.stores.free_bytes", lambda folder: 4096)
    with pytest.raises(DiskError, match="is too small for the optimizer state"):
        jzero.restore_checkpoint(tmp_path / "c", like())


def test_a_restore_that_fails_gives_its_space_back(on_disk, like, tmp_path, monkeypatch):
    jzero.save_checkpoint(tmp_path / "c", on_disk())
    during, before = [], num_open_files()

    def fail(contents, records, leaves, old):
        during.append(num_open_files())
        raise DiskError("the disk fails")

    monkeypatch.setattr(disk_restoring, "_run", fail)
    with pytest.raises(DiskError, match="the disk fails") as caught:
        jzero.restore_checkpoint(tmp_path / "c", like())
    assert during[0] > before == num_open_files(), f"although the error is still there: {caught}"
