"""Errors that pass and Ctrl-C: neither is damage, and neither leaves anything behind."""

import builtins
import errno
import io
import os
import warnings

import jax
import numpy as np
import optax
import pytest

import jzero
from jzero.checkpoint import orbax_io


def make_state(seed=0):
    params = {"odd": jax.numpy.arange(23.0 * 5).reshape(23, 5) + seed, "even": jax.numpy.full((64,), 1.0 + seed)}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=3, persistence_threshold=10)
    return jzero.shard_train_state(state, config=config, mesh=jzero.make_mesh(devices=jax.devices()[:2]))


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


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("call", ["open", "stat"])
@pytest.mark.parametrize("error", PASSING)
def test_an_error_that_passes_is_no_damage(error, call, times, run, monkeypatch):
    manager = jzero.CheckpointManager(run)
    with monkeypatch.context() as patch:
        hit = fail(patch, call, f"{run}/2", PASSING[error], times)
        if times == 1 and call == "open":
            restored = manager.restore(make_state())
            np.testing.assert_array_equal(jzero.get_full_param(restored, "even"), np.full(64, 3.0))
        else:  # a directory that cannot be listed is not read twice
            with pytest.raises(jzero.CheckpointError, match=r"since the file system fails \(.*\)\.\nThat is no sign"):
                manager.restore(make_state())
    assert hit
    assert names_in(run) == ["1", "2"]
    with manager:
        assert not manager.save(make_state(), step=2), "which is there"


READ = orbax_io._PatientHandler.deserialize


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
    """Orbax raises a plain exception instead of a KeyboardInterrupt; a loop that was interrupted leaves other errors."""
    told = []

    async def deserialize(self, infos, args=None):
        if raised is None and told:
            return await READ(self, infos, args)
        told.append(1)
        raise error from cause

    monkeypatch.setattr(orbax_io._PatientHandler, "deserialize", deserialize)
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
        with pytest.warns(UserWarning, match=r"Step 1 was restored, since what is newer is damaged"):
            manager.restore(make_state())
