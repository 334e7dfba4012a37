"""Errors, kills and interrupts of passes over records on disk: nothing is lost, and the step can be repeated."""

import contextlib
import errno
import gc
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from jzero.core.disk import files
from jzero.core.disk.files import PAGE, DiskError, UnnamedFile, check_folder, free_bytes, page_aligned
from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.stores import DiskStore, RamStore
from tests import shared
from tests.disk_pipelines import (  # noqa: F401  # fixtures
    FEW,
    SIZES,
    WAIT,
    adam_like,
    contents,
    expected,
    folder,
    nothing_is_left,
    open_files,
    train,
)
from tests.example_runs import run_python

pytestmark = pytest.mark.timeout(300)


def failing(monkeypatch, call, store, *, slot, after, number=errno.EIO):
    """Makes a call fail for the file of one slot, from the given number of calls on."""
    real, left = getattr(os, call), [after]

    def fails(fd, buffers, offset):
        if fd == store._files[slot]._fd:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, call, fails)


def later(visit):
    """A visitor in two parts, of which a writer runs the second."""
    return lambda record, buffer: lambda same: visit(record, same)


# Failures. Afterwards the state is as before, and the step can be repeated.


@pytest.mark.parametrize("late", [False, True])
def test_after_an_error_of_the_visitor_the_step_is_repeated(folder, late):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    train(pipeline, 0)

    def visit(record, buffer):
        adam_like(1)(record, buffer)
        if record == 5:
            raise ZeroDivisionError("a visitor's")

    with pytest.raises(ZeroDivisionError, match="a visitor's"):
        pipeline.run(later(visit) if late else visit)
    assert contents(pipeline.store) == expected(SIZES, [0])
    train(pipeline, 1)
    assert contents(pipeline.store) == expected(SIZES, range(2))


def test_the_first_of_several_errors_is_raised(folder):
    pipeline, failed = Pipeline(DiskStore(folder, FEW)), threading.Event()

    def finish_first(buffer):
        failed.set()
        raise KeyError("first")

    def finish_others(buffer):
        assert failed.wait(WAIT)
        time.sleep(0.05)
        raise KeyError("second")

    with pytest.raises(KeyError, match="first"):
        pipeline.run(lambda record, buffer: finish_others if record == 0 else finish_first)


def test_an_error_holds_no_space(folder, monkeypatch):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch, contextlib.suppress(DiskError):
            failing(patch, "pwritev", pipeline.store, slot=1, after=0)
            pipeline.run(adam_like(0))
        del pipeline, patch
        assert not open_files()
    finally:
        gc.enable()


def test_an_error_while_reading_ahead_waits_for_the_pass(folder, monkeypatch):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    train(pipeline, 0)
    with monkeypatch.context() as patch:
        failing(patch, "preadv", pipeline.store, slot=1, after=1)
        pipeline.start_reading()
        time.sleep(0.05)
    with pytest.raises(DiskError, match=rf"Reading .*{pipeline.store.sizes[1]:,} bytes"):
        pipeline.run(adam_like(1))
    train(pipeline, 1)
    assert contents(pipeline.store) == expected(SIZES, range(2))


def test_a_cut_file(folder):
    store = DiskStore(folder, SIZES)
    train(Pipeline(store), 0)
    os.ftruncate(store._files[store.slot]._fd, PAGE * 10)
    with pytest.raises(DiskError, match=r"cut: .* [\d,]+ bytes at [\d,]+ ended"):
        train(Pipeline(store), 1)
    assert store.generation == 1


def flip(store, record, *, bit):
    """Changes one bit of a record behind the store's back."""
    buffer = page_aligned(store.sizes[record])
    file = store._files[store.slot]
    file.read(buffer, store.offsets[record])
    buffer[bit // 8] ^= 1 << bit % 8
    file.write(buffer, store.offsets[record])


@pytest.mark.parametrize("record", [0, len(SIZES) - 1])
def test_a_flipped_bit_is_found_in_any_slot(folder, record):
    for checksum in (True, False):
        pipeline = Pipeline(DiskStore(folder, SIZES, checksum=checksum))
        for step in range(2):
            train(pipeline, step)
            flip(pipeline.store, record, bit=8 * SIZES[record] - 1 - step)
            found = pytest.raises(DiskError, match=rf"^Record {record} in .*checksum")
            with found if checksum else contextlib.nullcontext():
                pipeline.run(adam_like(9), writes=False)
            flip(pipeline.store, record, bit=8 * SIZES[record] - 1 - step)
        assert contents(pipeline.store) == expected(SIZES, range(2))


def test_a_write_that_was_lost_is_found(folder, monkeypatch):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    train(pipeline, 0, 1)
    real, lost = os.pwritev, pipeline.store.offsets[3]
    monkeypatch.setattr(os, "pwritev", lambda fd, x, at: len(x[0]) if at == lost else real(fd, x, at))
    train(pipeline, 2)
    with pytest.raises(DiskError, match="Record 3"):
        pipeline.run(adam_like(3))


def test_too_little_space_is_found_before_anything_is_computed(folder, monkeypatch):
    there = free_bytes(folder)
    assert there == pytest.approx(shutil.disk_usage(folder).free, rel=0.1)
    size = (there // 2 // PAGE + 1) * PAGE
    with pytest.raises(DiskError, match=rf"take {2 * size:,}, and "):
        DiskStore(folder, [size])
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))  # of which statvfs knows nothing
    monkeypatch.setattr(os, "posix_fallocate", shared.raising(quota))
    with pytest.raises(DiskError, match=rf"another {sum(FEW):,} bytes: .*quota") as caught:
        DiskStore(folder, FEW)
    assert not open_files(), "although the error is still there"
    assert folder in str(caught.value)


def run_until_interrupted(pipeline, interrupt):
    interrupt.start()
    while True:
        pipeline.run(later(adam_like(1)))


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_at_any_line(folder):
    """Whatever line of the calling thread it hits, the same pipeline goes on, and nothing is left of that pass."""
    pipeline, other = Pipeline(DiskStore(folder, FEW)), Pipeline(RamStore(FEW), threads=1)
    for step, delay in enumerate(np.random.default_rng(0).uniform(0, 8e-3, size=60)):
        interrupt = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run_until_interrupted(pipeline, interrupt)
        interrupt.join()
        for each in (pipeline, other):
            train(each, step)
        assert contents(pipeline.store) == contents(other.store)


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.timeout(30)  # a pass that is used again would wait for ever
@pytest.mark.parametrize("cancels", [True, False])
def test_ctrl_c_twice_leaves_no_read_under_way(cancels, folder, monkeypatch):
    """The second ends the wait for the first's readers; whoever uses the pipeline next still waits for them."""
    pipeline, real, go_on, ended = Pipeline(DiskStore(folder, FEW), threads=1), DiskStore.read, threading.Event(), []

    def slow(store, record, buffer, **slot):
        go_on.wait(WAIT)
        real(store, record, buffer, **slot)
        ended.append(record)

    def interrupt():
        for _ in range(2):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        go_on.set()

    monkeypatch.setattr(DiskStore, "read", slow)
    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(pipeline, thread)
    if cancels:
        pipeline.cancel()
        assert ended == [0]
    train(pipeline, 0)
    assert contents(pipeline.store) == expected(FEW, [0])
    thread.join()


FORKED = """
import contextlib, os, sys
from jzero.core.disk.files import DiskError
from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.stores import DiskStore
from tests.disk_pipelines import SIZES, contents, expected, train

pipeline = Pipeline(DiskStore(sys.argv[1], SIZES))
train(pipeline, 0)
numbers = [file._fd for file in pipeline.store._files]
pipeline.start_reading()
child = os.fork()
if not child:
    try:
        for number in numbers:
            with contextlib.suppress(OSError):
                os.fstat(number)
                os._exit(1)  # it is open
        try:
            contents(pipeline.store)
            os._exit(2)
        except DiskError as error:
            assert "forked child" in str(error)
        try:
            train(pipeline, 1)
            os._exit(3)
        except RuntimeError as error:
            assert "forked child" in str(error)
        pipeline.close()
        pipeline.store.close()
        del pipeline
    except BaseException:
        os._exit(4)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
train(pipeline, 1)
assert contents(pipeline.store) == expected(SIZES, range(2))
"""


def test_a_forked_child_cannot_disturb(folder):
    run_python("-c", FORKED, folder, timeout=WAIT)


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"`Offload\.path` .*/missing'"):
        check_folder(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="it is a file"):
        check_folder(tmp_path / "file")
    with pytest.raises(DiskError, match="No file can be made in"):
        UnnamedFile(str(tmp_path / "missing"), PAGE)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"^`--disk` must be .*permissions"):
        check_folder(tmp_path, "--disk")


def test_a_folder_in_memory_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_folder(".") == str(tmp_path)
    with pytest.warns(UserWarning, match="is memory, not a disk"):
        check_folder("/dev/shm")
    monkeypatch.setattr(files, "file_system", lambda _: "tmpfs")
    with pytest.warns(UserWarning, match=r"\(tmpfs\).*Set `Offload\.path`"):
        check_folder(tmp_path)
