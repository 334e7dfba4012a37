"""Records on disk: the bytes of a store in memory, however files are opened and whoever reads or writes meanwhile."""

import errno
import fcntl
import gc
import os
import threading
import time
import weakref

import pytest

from jzero.core.disk.files import PAGE, DiskError, page_aligned
from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.rates import PlainFiles
from jzero.core.disk.stores import DiskStore, RamStore
from tests import shared
from tests.disk_pipelines import (  # noqa: F401  # fixtures
    FEW,
    SIZES,
    WAIT,
    contents,
    expected,
    folder,
    nothing_is_left,
    train,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["direct", "cached", "named"])
def way(request, monkeypatch):
    """What the file system can do: all, no O_DIRECT, or no file without a name either."""
    if request.param != "direct":
        refuse_direct(monkeypatch)
    if request.param == "named":
        refuse_unnamed(monkeypatch)
    return request.param


def refuse_direct(monkeypatch):
    real = fcntl.fcntl

    def control(fd, what, *args):
        if what == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, what, *args)

    monkeypatch.setattr(fcntl, "fcntl", control)


def refuse_unnamed(monkeypatch):
    real = os.open

    def opened(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)


def test_every_way_to_open_files_gives_the_same_bytes(folder, way):
    store = DiskStore(folder, SIZES)
    assert (len(store.fallbacks), store._files[0].is_direct) == {
        "direct": (0, True),
        "cached": (1, False),
        "named": (2, False),
    }[way]
    assert [text.split()[1] for text in store.fallbacks] == ["O_TMPFILE", "O_DIRECT"][-len(store.fallbacks) or 2 :]
    train(Pipeline(store), 0, 1)
    assert contents(store) == expected(SIZES, range(2))
    assert os.listdir(folder) == []


def test_short_reads_and_writes_are_continued(folder, monkeypatch):
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:PAGE]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: write(fd, [buffers[0][: 2 * PAGE]], at))
    store = DiskStore(folder, FEW)
    train(Pipeline(store), 0, 1)
    assert contents(store) == expected(FEW, range(2))


def test_a_pass_that_reads_nothing(folder):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    stats = pipeline.run(lambda record, buffer: buffer.fill(record + 1), reads=False)
    assert contents(pipeline.store) == [bytes(size) for size in SIZES], "nothing is new before the commit"
    pipeline.store.commit()
    assert contents(pipeline.store) == [bytes([record + 1]) * size for record, size in enumerate(SIZES)]
    assert (stats.read_bytes, stats.written_bytes) == (0, sum(SIZES))


def test_buffers_are_a_records_own_until_it_is_finished(folder):
    """A device may still read a buffer that was visited, also where nothing is written."""
    in_use, overlaps = set(), []

    def visit(record, buffer):
        address = buffer.ctypes.data
        overlaps.extend(in_use & {address})
        in_use.add(address)

        def finish(same):
            assert same.ctypes.data == address
            time.sleep(0.005)
            in_use.remove(address)

        return finish

    pipeline = Pipeline(DiskStore(folder, SIZES))
    for writes in (True, False):
        pipeline.run(visit, writes=writes)
        assert not in_use
    assert not overlaps


def test_what_was_read_ahead_of_another_pass_is_not_used(folder):
    pipeline = Pipeline(DiskStore(folder, FEW))
    train(pipeline, 0)
    pipeline.start_reading()
    buffer = page_aligned(max(FEW))
    buffer[:] = 7
    for record, size in enumerate(FEW):  # as a restore does
        pipeline.store.write(record, buffer[:size])
    pipeline.store.commit()
    seen = {}
    take = lambda record, buffer: seen.update({record: set(buffer.tolist())})
    pipeline.run(take, writes=False)
    assert seen == {record: {7} for record in range(len(FEW))}
    pipeline.start_reading([0, 1])
    pipeline.run(take, [3, 2], writes=False)
    assert list(seen) == [0, 1, 2, 3]
    pipeline.start_reading()
    pipeline.cancel()
    pipeline.cancel()


def test_a_forgotten_pipeline_gives_threads_and_space_back(folder):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    pipeline.start_reading()
    store = weakref.ref(pipeline.store)
    del pipeline
    wait_until(lambda: gc.collect() is not None and store() is None)


@pytest.mark.parametrize("make", [DiskStore, lambda _, sizes: RamStore(sizes)], ids=["disk", "ram"])
def test_a_pinned_generation_stays_while_one_step_commits(folder, make):
    pipeline = Pipeline(make(folder, FEW))
    train(pipeline, 0)
    pin = pipeline.store.pin()
    train(pipeline, 1)
    second = threading.Thread(target=train, args=(pipeline, 2), daemon=True)
    second.start()
    time.sleep(0.1)
    assert pipeline.store.generation == 2
    assert pin.generation == 1
    assert contents(pin, FEW) == expected(FEW, [0])
    pin.release()
    pin.release()
    second.join(WAIT)
    assert not second.is_alive()
    assert contents(pipeline.store) == expected(FEW, range(3))


def test_a_read_only_pass_waits_for_no_pin():
    pipeline = Pipeline(RamStore(FEW))
    train(pipeline, 0)
    with pipeline.store.pin():
        train(pipeline, 1)
        pipeline.run(lambda record, buffer: None, writes=False)


def test_rates_count_overlapping_calls_once(folder, monkeypatch):
    real, calls = os.preadv, []

    def slow(*args):
        started = time.perf_counter()
        time.sleep(0.05)
        count = real(*args)
        calls.append((started, time.perf_counter()))
        return count

    monkeypatch.setattr(os, "preadv", slow)
    pipeline = Pipeline(DiskStore(folder, (PAGE,) * 6), threads=2)
    stats = pipeline.run(lambda record, buffer: None)
    monkeypatch.setattr(os, "preadv", shared.raising(OSError(errno.EIO, "a read that fails")))
    with pytest.raises(DiskError, match="a read that fails"):
        pipeline.store.read(0, page_aligned(PAGE))
    found = pipeline.store.stats
    assert (found.read_bytes, found.written_bytes) == (6 * PAGE, 6 * PAGE) == (stats.read_bytes, stats.written_bytes)
    covered, end = 0.0, 0.0
    for started, ended in sorted(calls):
        covered, end = covered + max(0.0, ended - max(started, end)), max(end, ended)
    assert found.read_seconds == pytest.approx(covered, rel=0.2)
    assert found.read_seconds < 0.8 * sum(ended - started for started, ended in calls), "two at a time"
    assert found.write_seconds > 0


@pytest.mark.parametrize(("read", "write"), [(True, False), (False, True), (True, True)])
def test_plain_files_move_all_bytes_at_odd_sizes(folder, monkeypatch, read, write):
    size, block, moved = 7 * PAGE, 2 * PAGE, {"preadv": [], "pwritev": []}
    plain = PlainFiles(folder, size, threads=2, block=block)
    for name, ranges in moved.items():
        real = getattr(os, name)
        spy = lambda fd, x, at, real=real, ranges=ranges: ranges.append((at, len(x[0]))) or real(fd, x, at)
        monkeypatch.setattr(os, name, spy)
    assert plain.seconds(read=read, write=write) > 0
    all_of_it = [(0, block), (block, block), (2 * block, block), (3 * block, PAGE)]
    assert sorted(moved["preadv"]) == all_of_it * read
    assert sorted(moved["pwritev"]) == all_of_it * write
    plain.close()
