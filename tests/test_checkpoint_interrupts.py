"""Errors that pass and Ctrl-C: neither is damage, and neither leaves anything behind."""

import builtins
import contextlib
import errno
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jzero
from jzero.checkpoint import contents
from tests import shared


def make_state(seed=0):
    params = {"odd": jax.numpy.arange(23.0 * 5).reshape(23, 5) + seed, "even": jax.numpy.full((64,), 1.0 + seed)}
    return shared.sharded(params, optax.sgd(0.1), mesh=2, persistence_threshold=10)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "jzero.lock")


@pytest.fixture
def run(tmp_path):
    """A directory with steps 1 and 2."""
    with jzero.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(make_state(step), step=step)
    return tmp_path / "run"


def fail(monkeypatch, call, part, error, times):
    """Makes a function raise the first times that it is called with a path that has a part; returns what was hit."""
    hit = []

    def failing(real):
        def attempt(file, *args, **kwargs):
            if len(hit) < times and part in str(file):
                hit.append(str(file))
                raise error
            return real(file, *args, **kwargs)

        return attempt

    for module, name in {"open": [(builtins, "open"), (io, "open")], "stat": [(os, "stat")]}[call]:
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
    return hit


PASSING = {
    "stale": OSError(errno.ESTALE, "Stale file handle"),
    "broken": OSError(errno.EIO, "Input/output error"),
    "late": TimeoutError("timed out"),
    "forbidden": PermissionError(errno.EACCES, "Permission denied"),
}


CASES = [("late", "open", 1), ("forbidden", "open", 1), ("stale", "open", 1000), ("broken", "stat", 1)]


@pytest.mark.parametrize(("error", "call", "times"), CASES)
def test_an_error_that_passes_is_no_damage(error, call, times, run, monkeypatch):
    manager = jzero.CheckpointManager(run)
    with monkeypatch.context() as patch:
        hit = fail(patch, call, f"{run}/2", PASSING[error], times)
        if times == 1 and call == "open":
            restored = manager.restore(make_state())
            np.testing.assert_array_equal(jzero.get_full_param(restored, "even"), np.full(64, 3.0))
        else:  # a directory that cannot be listed is not read twice
            with pytest.raises(jzero.CheckpointError, match=r"file system fails \(.*\)\.\n"):
                manager.restore(make_state())
    assert hit
    assert names_in(run) == ["1", "2"]
    with manager:
        assert not manager.save(make_state(), step=2), "which is there"


READ = contents.open_tree


@pytest.mark.parametrize(
    ("error", "cause", "raised"),
    [
        (Exception("Encountered error while reading array"), KeyboardInterrupt(), KeyboardInterrupt),
        (Exception("Encountered error while reading array"), MemoryError("8 TB"), MemoryError),
        (ValueError("UNAVAILABLE: no route to host"), None, jzero.CheckpointError),
        (ValueError("Failed to read [os_error_code='5']"), None, jzero.CheckpointError),
        (RuntimeError("Event loop stopped before Future completed."), None, None),
    ],
    ids=["interrupt", "memory", "network", "tensorstore", "passed"],
)
def test_what_libraries_make_of_interrupts_is_no_damage(error, cause, raised, run, monkeypatch):
    """Orbax raises a plain exception instead of a KeyboardInterrupt; an interrupted loop leaves other errors."""
    told = []

    def open_tree(directory):
        if raised is None and told:
            return READ(directory)
        told.append(1)
        raise error from cause

    monkeypatch.setattr(contents, "open_tree", open_tree)
    manager = jzero.CheckpointManager(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if raised is None:
            restored = manager.restore(make_state())
            np.testing.assert_array_equal(jzero.get_full_param(restored, "even"), np.full(64, 3.0))
        else:
            with pytest.raises(raised):
                manager.restore(make_state())


def test_damage_that_is_found_after_an_interrupt_is_damage(run):
    (run / "2" / "default" / "manifest.ocdbt").write_bytes(b"x")
    manager = jzero.CheckpointManager(run)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.warns(UserWarning, match="Step 1 was restored"):
            manager.restore(make_state())


def interrupt(monkeypatch, target, name):
    """Sends SIGINT to the main thread in the middle of a method of Orbax's, which then takes a while to end."""
    real = getattr(target, name)

    def slow(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)  # in which the main thread is told
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, slow)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_after_ctrl_c_in_save_checkpoint_nothing_is_left_and_it_can_be_called_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, ocp.Checkpointer, "save")
        with pytest.raises(KeyboardInterrupt):
            jzero.save_checkpoint(tmp_path / "c", make_state(1))
    assert names_in(tmp_path) == []
    jzero.save_checkpoint(tmp_path / "c", make_state(2))
    assert names_in(tmp_path) == ["c"]
    restored = jzero.restore_checkpoint(tmp_path / "c", make_state())
    np.testing.assert_array_equal(jzero.get_full_param(restored, "even"), np.full(64, 3.0))


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("where", ["save", "wait_until_finished"])
def test_ctrl_c_in_a_manager_leaves_as_many_checkpoints_as_asked_for(where, tmp_path, monkeypatch):
    manager = jzero.CheckpointManager(tmp_path, max_to_keep=2)
    for step in range(5):
        with monkeypatch.context() as patch:
            if step % 2:
                interrupt(patch, ocp.CheckpointManager, where)
            with pytest.raises(KeyboardInterrupt) if step % 2 else contextlib.nullcontext():
                manager.save(make_state(step), step=step)
                manager.wait()
    kept = [3, 4] if where == "save" else [2, 4]  # step 3 waits for the one before, and is not begun
    assert manager.all_steps() == kept
    manager.close()
    assert names_in(tmp_path) == [*map(str, kept), "removed"]
    assert not list((tmp_path / "removed").iterdir())
    restored = jzero.CheckpointManager(tmp_path).restore(make_state(), step=kept[0])
    np.testing.assert_array_equal(jzero.get_full_param(restored, "even"), np.full(64, 1.0 + kept[0]))


def test_steps_that_were_deleted_by_hand_are_not_there(run):
    with jzero.CheckpointManager(run) as manager:
        manager.save(make_state(3), step=3)
        assert not manager.save(make_state(3), step=3), "is there, or will be"
        for step in (2, 3):
            manager.wait()
            shutil.rmtree(run / str(step))
        assert manager.all_steps() == [1]
        assert manager.save(make_state(7), step=2)
        manager.wait()
        shutil.rmtree(run / "2")
        assert manager.save(make_state(8), step=2), "though nobody asked for the steps in between"
        assert manager.save(make_state(9), step=3)
    assert names_in(run)[:3] == ["1", "2", "3"]
    restored = jzero.CheckpointManager(run).restore(make_state(), step=2)
    np.testing.assert_array_equal(jzero.get_full_param(restored, "even"), np.full(64, 9.0))


FORKED = """
import atexit, multiprocessing, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import jzero
from tests.test_checkpoint_interrupts import make_state

mine = lambda *_: None
signal.signal(signal.SIGTERM, mine)
manager = jzero.CheckpointManager(sys.argv[1])
atexit.register(manager.close)  # runs when no thread can start any more
manager.save(make_state())
ours = signal.getsignal(signal.SIGTERM)

def work():
    assert signal.getsignal(signal.SIGTERM) is mine
    assert manager.all_steps() == [0]
    manager.close()

manager.wait()
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join(60)
assert worker.exitcode == 0, worker.exitcode  # its end has run the hooks
assert signal.getsignal(signal.SIGTERM) == ours
print(manager.all_steps())
unclosed = jzero.CheckpointManager(sys.argv[1] + "/unclosed")
unclosed.save(make_state())
raise ValueError("mine")
"""


def test_a_forked_process_has_neither_handlers_nor_hooks(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    ran = subprocess.run(
        command, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "[0]\n"), ran.stderr
    assert "\nValueError: mine\n" in ran.stderr
    assert ran.stderr.count("Error:") == 1, ran.stderr
    assert jzero.inspect_checkpoint(tmp_path / "unclosed", verify=True).damaged == {}, "complete in spite of the error"
