"""Numbered checkpoints: which are written and kept, going back, SIGTERM."""

import contextlib
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath

import jzero
from jzero.checkpoint import lock, orbax_io
from jzero.checkpoint.writer import REMOVED
from tests import shared
from tests.checkpoint_states import numbered, sharded


@pytest.fixture(scope="module")
def state():
    return sharded(jzero.TrainState.create(params={"w": jnp.arange(13.0)}, tx=optax.sgd(0.1, momentum=0.9)), 1, 2)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_to_keep": 1, "keep_every_steps": 3}, [3, 6, 7]),
        ({"save_interval_steps": 3, "max_to_keep": 2}, [3, 6]),
        ({"max_to_keep": 2, "best_metric": "loss"}, [2, 4, 7]),
        ({"max_to_keep": 1, "best_metric": "loss", "best_mode": "max"}, [1, 7]),
    ],
)
def test_what_is_saved_and_kept(options, kept, state, tmp_path):
    losses = dict(zip(range(1, 8), [9.0, 2.0, 5.0, 1.0, 4.0, 6.0, 3.0], strict=True))
    with jzero.CheckpointManager(tmp_path, **options) as manager:
        for number, loss in losses.items():
            manager.save(numbered(state, number), metrics={"loss": loss})
    with jzero.CheckpointManager(tmp_path, **options) as reader:
        assert reader.all_steps() == kept
        assert reader.latest_step() == kept[-1]
        if "best_metric" in options:
            best = min if options.get("best_mode") != "max" else max
            assert reader.best_step() == best(kept, key=losses.get)
        assert int(reader.restore(state).step) == kept[-1]
        assert int(reader.restore(state, step=kept[0]).step) == kept[0]


def test_steps_that_are_no_longer_kept_take_no_space_while_the_manager_saves(state, tmp_path):
    with jzero.CheckpointManager(tmp_path, max_to_keep=1) as manager:
        for number in range(1, 6):
            manager.save(numbered(state, number))
        manager.wait()
        manager._writer._join_sweeper()
        assert [x.name for x in (tmp_path / REMOVED).iterdir()] == ["4"]
    assert sorted(x.name for x in tmp_path.iterdir() if x.name.isdecimal()) == ["5"]


def test_saving_again_and_out_of_turn(state, tmp_path):
    with jzero.CheckpointManager(tmp_path, save_interval_steps=10) as manager:
        assert manager.save(numbered(state, 3))
        assert not manager.save(numbered(state, 3), force=True)
        assert not manager.save(numbered(state, 4))
        assert manager.save(numbered(state, 4), force=True)
        assert manager.save(state, step=np.int64(10)), "a step that the loop counts"
        with pytest.raises(jzero.CheckpointError, match="holds step 10, so step 7"):
            manager.save(state, step=7)
    with jzero.CheckpointManager(tmp_path, save_interval_steps=10) as manager:
        assert not manager.save(numbered(state, 11)), "there is one to go on from"
        assert manager.save(numbered(state, 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_to_keep": 0}, "`max_to_keep` must be None or an integer >= 1: got 0"),
        ({"save_interval_steps": None}, "`save_interval_steps` must be an integer >= 1"),
        ({"keep_every_steps": 2.5}, "`keep_every_steps` must be"),
        ({"best_mode": "most"}, "`best_mode` must be 'max' or 'min': got 'most'"),
    ],
)
def test_impossible_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        jzero.CheckpointManager(tmp_path, **options)


@pytest.mark.parametrize(
    "step", [-1, 1.9, 3.0, "3", True, np.bool_(True), np.float32(2), np.array([3]), jnp.int32(-1)], ids=repr
)
def test_steps_that_are_none(step, state, tmp_path):
    with jzero.CheckpointManager(tmp_path) as manager:
        for use in (lambda: manager.save(state, step=step), lambda: manager.restore_extra(step)):
            with pytest.raises(ValueError, match="`step` must be"):
                use()
        assert manager.all_steps() == []


def test_going_back_sets_later_steps_aside(state, tmp_path):
    with jzero.CheckpointManager(tmp_path) as manager:
        for number in (2, 4, 6):
            manager.save(numbered(state, number), extra={"branch": "first"})
        manager.restore(state, step=2)
        with pytest.warns(UserWarning, match=r"step 2: the later steps \[4, 6\]"):
            assert manager.save(numbered(state, 4), extra={"branch": "second"})
        assert manager.save(numbered(state, 5))
    with jzero.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [2, 4, 5]
        assert int(manager.restore(state).step) == 5
        assert not manager.save(numbered(state, 5)), "is there"
        assert manager.restore_extra(4) == {"branch": "second"}
        assert manager.save(numbered(state, 6))
    assert sorted(path.name for path in (tmp_path / "superseded").iterdir()) == ["4", "6"]
    other = jzero.CheckpointManager(tmp_path)
    with pytest.raises(jzero.CheckpointError, match="holds step 6, so step 1 would not be"):
        other.save(numbered(state, 1))


def test_looking_at_an_earlier_step_changes_nothing(state, tmp_path):
    with jzero.CheckpointManager(tmp_path, best_metric="loss") as manager:
        for number, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
            manager.save(numbered(state, number), metrics={"loss": loss})
        assert int(manager.restore(state, step=manager.best_step()).step) == 2
        assert manager.save(numbered(state, 4), metrics={"loss": 4.0})  # the run that goes on is the one that was at 3
        assert manager.all_steps() == [1, 2, 3, 4]
    assert not (tmp_path / "superseded").exists()


@pytest.mark.parametrize("where", ["save", "wait_until_finished"])
def test_after_a_save_that_failed_any_program_may_save(where, state, tmp_path, monkeypatch):
    def save(step):
        manager.save(numbered(state, step))
        manager.wait()

    manager = jzero.CheckpointManager(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(ocp.CheckpointManager, where, shared.raising(OSError("disk on fire")))
        with pytest.raises(jzero.CheckpointError, match=r"/1 could not be written.*disk on fire"):
            save(1)
    file, holder = lock._lock(tmp_path / lock.LOCK_FILE)  # as another program takes it
    assert holder is None
    file.close()
    save(2)
    manager.close()
    assert manager.all_steps()[-1] == 2


@pytest.mark.parametrize("process", [0, 1])
def test_a_disk_is_shared_if_others_see_what_the_first_process_writes(process, tmp_path, monkeypatch):
    """Alone, so that nobody writes for the second one."""
    monkeypatch.setattr(lock, "LAG_S", 0.0)
    monkeypatch.setattr(lock, "exchange", lambda value: [value()])
    monkeypatch.setattr(lock, "succeed_together", lambda act: act())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    sees = (
        contextlib.nullcontext() if process == 0 else pytest.raises(jzero.CheckpointError, match="Process 1 does not")
    )
    with sees:
        lock.check_shared(epath.Path(tmp_path / "run"))
    assert not list(tmp_path.glob("run/*"))


def test_sigterm_after_a_save_that_failed(state, tmp_path, monkeypatch):
    async def fail(*_):
        raise OSError("disk on fire")

    with jzero.CheckpointManager(tmp_path) as manager:
        manager.save(numbered(state, 1))
        manager.wait()
        with monkeypatch.context() as broken:
            broken.setattr(orbax_io, "_write", fail)
            manager.save(numbered(state, 2))
            with pytest.raises(jzero.CheckpointError, match=r"/2 .*\(OSError: disk on fire\)"):
                manager.save(numbered(state, 3))
            assert manager.all_steps() == [1], "this one was not begun"
            manager.save(numbered(state, 4))
            while manager._writer._orbax.is_saving_in_progress():
                time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.warns(UserWarning, match="/4 could not be written"), pytest.raises(SystemExit):
            manager.save(numbered(state, 5))
    assert jzero.CheckpointManager(tmp_path).all_steps() == [1, 5]


def test_sigterm_after_falling_back_from_a_damaged_step(state, tmp_path):
    with jzero.CheckpointManager(tmp_path, best_metric="loss") as manager:
        for number in (4, 6):
            manager.save(numbered(state, number), metrics={"loss": 1.0})
    (tmp_path / "6" / "default" / "manifest.ocdbt").write_bytes(b"x")
    with jzero.CheckpointManager(tmp_path, save_interval_steps=100, best_metric="loss") as manager:
        with pytest.warns(UserWarning, match="Step 4 was restored"):
            manager.restore(state)
        assert not manager.save(numbered(state, 5))
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.warns(UserWarning, match=r"later steps \[6\] were moved"), pytest.raises(SystemExit):
            manager.save(numbered(state, 6))  # without the metric, which is not at hand at each step
    assert jzero.inspect_checkpoint(tmp_path / "6", verify=True).damaged == {}


def test_metrics_that_are_equal_no_numbers_or_not_there(state, tmp_path):
    with jzero.CheckpointManager(tmp_path) as manager:
        manager.save(numbered(state, 1))
    options = {"max_to_keep": 2, "best_metric": "loss"}
    with jzero.CheckpointManager(tmp_path, **options) as manager:
        for number, loss in zip(range(2, 8), (2.0, np.nan, 2.0, 3.0, 2.0, np.nan), strict=True):
            manager.save(numbered(state, number), metrics={"loss": loss})
        manager.wait()
        assert manager.all_steps() == [1, 4, 6, 7], "one without metrics, the later two of the best, the latest"
        assert manager.best_step() == 6, "the latest of the best"
    assert jzero.CheckpointManager(tmp_path, best_metric="accuracy").best_step() is None


def test_a_metric_with_another_name(state, tmp_path):
    for name, numbers in (("loss", (1, 2, 3)), ("eval/loss", (4, 5, 6, 7))):
        with jzero.CheckpointManager(tmp_path, max_to_keep=2, best_metric=name) as manager:
            for number in numbers:
                manager.save(numbered(state, number), metrics={name: number, "other": 0.0})
    assert manager.all_steps() == [1, 2, 3, 4, 5, 7], "all without it, the best two, the latest"


def test_mistakes_write_nothing(state, tmp_path):
    with jzero.CheckpointManager(tmp_path / "run", best_metric="loss") as manager:
        assert manager.all_steps() == []
        with pytest.raises(jzero.CheckpointError, match=r"There is no checkpoint in .* to restore"):
            manager.restore(state)
        with pytest.raises(ValueError, match=r"'loss'.*got \['acc'\]"):
            manager.save(state, metrics={"acc": 1.0})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("exit_code", [0, 143, None])
def test_sigterm_saves_and_ends(exit_code, state, tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    with jzero.CheckpointManager(tmp_path, save_interval_steps=100, preemption_exit_code=exit_code) as manager:
        assert manager.save(numbered(state, 100))
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.preempted
        if exit_code is None:
            assert manager.save(numbered(state, 101))
            assert manager.preempted
            assert not manager.save(numbered(state, 102)), "once"
        else:
            with pytest.raises(SystemExit) as ended:
                manager.save(numbered(state, 101))
            assert ended.value.code == exit_code
            assert f"SIGTERM: step 101 is saved in {tmp_path}; the program ends." in caplog.text
            assert jzero.CheckpointManager(tmp_path).latest_step() == 101, "complete before the end"
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_handlers_of_sigterm_are_called(state, tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        with jzero.CheckpointManager(tmp_path, preemption_exit_code=None) as manager:
            manager.save(state)
            os.kill(os.getpid(), signal.SIGTERM)
            manager.save(state)
            assert manager.preempted
            assert called == [1]
            os.kill(os.getpid(), signal.SIGTERM)
            assert called == [1, 1], "the second one goes past the manager"
    finally:
        signal.signal(signal.SIGTERM, before)
