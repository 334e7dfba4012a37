"""Records on disk: the bytes of a store in memory, whatever fails meanwhile, in the memory of a few buffers."""

import contextlib
import errno
import fcntl
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from jzero.disk import files
from jzero.disk.files import PAGE, DiskError, UnnamedFile, check_folder, free_bytes, page_aligned
from jzero.disk.pipeline import Pipeline
from jzero.disk.rates import BLOCK, PlainFiles, measure_rates
from jzero.disk.stores import DiskStore, RamStore

pytestmark = pytest.mark.timeout(60)

ROOT = pathlib.Path(__file__).parents[1]
SIZES = tuple(PAGE * pages for pages in (3, 1, 17, 256, 1, 64, 5, 1031, 2, 100, 7))
FEW = SIZES[:4]
WAIT = 20  # seconds, in place of for ever


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


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


def adam_like(step):
    """A visitor whose result depends on all bytes of a record, on its number and on the step."""

    def visit(record, buffer):
        words = buffer.view(np.uint32)
        words *= np.uint32(2654435761)
        words += np.arange(words.size, dtype=np.uint32) + np.uint32(97 * step + record + 1)

    return visit


def later(visit):
    """The same in two parts: a visitor that lets a writer change the bytes."""
    return lambda record, buffer: lambda same: visit(record, same)


def train(pipeline, *steps, wrap=lambda visit: visit):
    for step in steps:
        pipeline.run(wrap(adam_like(step)))
        pipeline.store.commit()


def contents(store):
    """The bytes of all records, read one by one."""
    found = []
    for record, size in enumerate(store.sizes):
        buffer = page_aligned(size)
        store.read(record, buffer)
        found.append(buffer.tobytes())
    return found


def expected(sizes, steps):
    """The bytes after some steps, by a pipeline of one thread in memory."""
    pipeline = Pipeline(RamStore(sizes), threads=1)
    train(pipeline, *steps)
    return contents(pipeline.store)


def is_pipeline_thread(thread):
    return thread.name.startswith("jzero disk")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test ends its threads and closes its files; those of other tests in this process do not count."""
    gc.collect()
    OTHERS.update(files._OPEN)
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + WAIT
    while (left := pipeline_threads(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert not open_files()


OTHERS = weakref.WeakSet()


def open_files():
    return [file for file in files._OPEN if file not in OTHERS]


def pipeline_threads(before):
    return [thread.name for thread in threading.enumerate() if is_pipeline_thread(thread) and thread not in before]


def start_python(text, *args):
    """Starts a script that has this module's names."""
    script = f"from tests.test_disk_files import *\n{text}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", script, *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes)


def run_python(text, *args):
    """Runs a script that has this module's names, and checks that it succeeds; returns its output."""
    process = start_python(text, *args)
    try:
        output, errors = process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    return output


# The same bytes as in memory.


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", [SIZES, (PAGE,), (PAGE * 513,), (PAGE, PAGE), (PAGE,) * 40, ()], ids=len)
def test_disk_equals_memory(folder, sizes, threads):
    pipeline = Pipeline(DiskStore(folder, sizes), threads)
    train(pipeline, 0, 1, 2, wrap=later if threads == 2 else lambda visit: visit)
    assert contents(pipeline.store) == expected(sizes, range(3))
    assert pipeline.store.generation == 3
    assert os.listdir(folder) == []


@pytest.mark.parametrize("seed", range(6))
def test_disk_equals_memory_at_random(folder, seed):
    rng = np.random.default_rng(seed)
    sizes = [PAGE * int(pages) for pages in rng.integers(1, 40, size=rng.integers(1, 30))]
    disk, memory = (Pipeline(store, int(rng.integers(1, 4))) for store in (DiskStore(folder, sizes), RamStore(sizes)))
    for step in range(4):
        half = rng.permutation(len(sizes))
        for part in (half[::2].tolist(), half[1::2].tolist()):  # in two runs, in any order
            early = bool(rng.integers(2))
            for pipeline in (disk, memory):
                if early:
                    pipeline.start_reading(part)
                pipeline.run(adam_like(step), part)
        for pipeline in (disk, memory):
            pipeline.store.commit()
        assert contents(disk.store) == contents(memory.store) == expected(sizes, range(step + 1))


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


def test_what_was_never_written_is_zero(folder):
    assert contents(DiskStore(folder, FEW)) == contents(RamStore(FEW)) == [bytes(size) for size in FEW]


# Passes.


@pytest.mark.parametrize("make", [DiskStore, lambda _, sizes: RamStore(sizes)], ids=["disk", "ram"])
def test_a_pass_that_writes_nothing(folder, make):
    pipeline = Pipeline(make(folder, SIZES))
    train(pipeline, 0)
    before, seen = contents(pipeline.store), {}
    stats = pipeline.run(lambda record, buffer: seen.update({record: buffer.tobytes()}), writes=False)
    assert list(seen) == list(range(len(SIZES)))
    assert list(seen.values()) == before == contents(pipeline.store)
    assert (stats.read_bytes, stats.written_bytes) == (sum(SIZES), 0)
    assert 0 < stats.waited_seconds <= stats.seconds


def test_a_pass_that_reads_nothing(folder):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    stats = pipeline.run(lambda record, buffer: buffer.fill(record + 1), reads=False)
    assert contents(pipeline.store) == [bytes(size) for size in SIZES], "nothing is new before the commit"
    pipeline.store.commit()
    assert contents(pipeline.store) == [bytes([record + 1]) * size for record, size in enumerate(SIZES)]
    assert (stats.read_bytes, stats.written_bytes) == (0, sum(SIZES))


def test_some_records_in_their_order(folder):
    pipeline, seen = Pipeline(DiskStore(folder, SIZES)), []
    pipeline.run(lambda record, buffer: seen.append((record, buffer.size)), [7, 3, 9], writes=False)
    assert seen == [(7, SIZES[7]), (3, SIZES[3]), (9, SIZES[9])]


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


def test_reading_begins_before_the_pass(folder):
    pipeline = Pipeline(DiskStore(folder, (PAGE,) * 9))
    train(pipeline, 0)
    before = pipeline.store.stats.read_bytes
    pipeline.start_reading()
    pipeline.start_reading()
    wait_until(lambda: pipeline.store.stats.read_bytes == before + 5 * PAGE)  # as much as there are buffers
    train(pipeline, 1)
    assert pipeline.store.stats.read_bytes == before + 9 * PAGE
    assert contents(pipeline.store) == expected((PAGE,) * 9, range(2))


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


def wait_until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.002)


# Memory.


def test_no_more_than_the_buffers_is_used(folder):
    pipeline = Pipeline(DiskStore(folder, SIZES), threads=3)
    assert [buffer.nbytes for buffer in pipeline.buffers] == [max(SIZES)] * 7
    assert all(buffer.ctypes.data % PAGE == 0 for buffer in pipeline.buffers)
    own, seen = {buffer.ctypes.data for buffer in pipeline.buffers}, set()
    for _ in range(3):
        pipeline.run(lambda record, buffer: seen.add(buffer.ctypes.data))
    assert seen <= own


MEMORY = """
def resident():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) * 1024

record = 4 * 2**20
def work(num_records):
    pipeline = Pipeline(DiskStore(sys.argv[1], [record] * num_records))
    train(pipeline, 0, wrap=later)
    return sum(buffer.nbytes for buffer in pipeline.buffers)

work(1)
before = resident()
buffers = work(num_records := 5 * (5 * record + 64 * 2**20) // record)
assert buffers == 5 * record
grown = resident() - before
assert grown <= buffers + 64 * 2**20, grown
assert num_records * record >= 5 * grown
"""


@pytest.mark.slow
def test_memory_grows_by_the_buffers_for_a_state_five_times_as_large(folder):
    run_python(MEMORY, folder)


# Failures. Afterwards the state is as before, and the step can be repeated.


@pytest.mark.parametrize("wrap", [lambda visit: visit, later], ids=["visited", "finished"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(("call", "slot", "says"), [("preadv", 1, "Reading"), ("pwritev", 0, "Writing")])
def test_after_a_failing_call_the_step_is_repeated(folder, monkeypatch, call, slot, says, number, wrap):
    pipeline = Pipeline(DiskStore(folder, SIZES))
    train(pipeline, 0)
    for after in (0, 4, len(SIZES) - 1):
        with monkeypatch.context() as patch:
            failing(patch, call, pipeline.store, slot=slot, after=after, number=number)
            message = rf"{says} [\d,]+ bytes at [\d,]+ .*{os.strerror(number)} \(errno {number}\)\. .*repeat the step"
            with pytest.raises(DiskError, match=message) as caught:
                train(pipeline, 1, wrap=wrap)
        assert folder in str(caught.value)
        assert pipeline.store.generation == 1
        assert contents(pipeline.store) == expected(SIZES, [0])
    train(pipeline, 1)
    assert contents(pipeline.store) == expected(SIZES, range(2))


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


def test_an_error_of_a_writer_ends_the_visits(folder, monkeypatch):
    pipeline, visits = Pipeline(DiskStore(folder, SIZES)), []
    failing(monkeypatch, "pwritev", pipeline.store, slot=1, after=0)
    with pytest.raises(DiskError, match="Writing"):
        pipeline.run(lambda record, buffer: visits.append(record) or time.sleep(0.03))
    assert len(visits) < len(SIZES)


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
    with pytest.raises(DiskError, match="Reading"):
        pipeline.run(adam_like(1))
    train(pipeline, 1)
    assert contents(pipeline.store) == expected(SIZES, range(2))


def test_a_cut_file(folder):
    store = DiskStore(folder, SIZES)
    train(Pipeline(store), 0)
    os.ftruncate(store._files[store.slot]._fd, PAGE * 10)
    with pytest.raises(DiskError, match=r"was cut: reading [\d,]+ bytes at [\d,]+ ended after [\d,]+\. Restore"):
        train(Pipeline(store), 1)
    assert store.generation == 1


def flip(store, record, *, bit):
    """Changes one bit of a record behind the store's back."""
    buffer = page_aligned(store.sizes[record])
    file = store._files[store.slot]
    file.read(buffer, store.offsets[record])
    buffer[bit // 8] ^= 1 << bit % 8
    file.write(buffer, store.offsets[record])


@pytest.mark.parametrize("record", [0, 3, len(SIZES) - 1])
def test_a_flipped_bit_is_found_in_any_slot(folder, record):
    for checksum in (True, False):
        pipeline = Pipeline(DiskStore(folder, SIZES, checksum=checksum))
        for step in range(2):
            train(pipeline, step)
            flip(pipeline.store, record, bit=8 * SIZES[record] - 1 - step)
            found = pytest.raises(DiskError, match=rf"^Record {record} in .*checksum.*restore a checkpoint")
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


# Space.


def test_too_little_space_is_found_before_anything_is_computed(folder, monkeypatch):
    there = free_bytes(folder)
    size = (there // 2 // PAGE + 1) * PAGE
    with pytest.raises(DiskError, match=rf"two slots of {size:,} bytes take {2 * size:,}, and [\d,]+ are free"):
        DiskStore(folder, [size])

    def fallocate(fd, offset, num_bytes):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)  # a quota, of which statvfs knows nothing
    with pytest.raises(DiskError, match=rf"another {sum(FEW):,} bytes: .*quota.*, and [\d,]+ are free") as caught:
        DiskStore(folder, FEW)
    assert not open_files(), "although the error is still there"
    assert folder in str(caught.value)


def test_space_is_taken_at_once_and_given_back_at_the_end(folder):
    size = much_space(folder)
    for give_back in (lambda store: store.close(), lambda store: None):
        before = free_bytes(folder)
        store = DiskStore(folder, [size])
        if before - free_bytes(folder) < size:
            pytest.skip("this file system does not tell what is taken, or others are busy on it")
        give_back(store)
        del store
        wait_until(lambda before=before: before - free_bytes(folder) < size)


def much_space(folder):
    """So many bytes that what others take and free meanwhile does not matter, but not all."""
    return min(2**31, free_bytes(folder) // 8 // PAGE * PAGE)


KILLED = """
import itertools
store = DiskStore(sys.argv[1], [2**22] * 8)
space = UnnamedFile(sys.argv[1], int(sys.argv[2]))
pipeline = Pipeline(store)
train(pipeline, 0)
print("ready", flush=True)
for step in itertools.count():
    train(pipeline, step)
"""


def test_after_kill_9_nothing_is_left(folder):
    size = much_space(folder)
    before = free_bytes(folder)
    process = start_python(KILLED, folder, size)
    try:
        assert process.stdout.readline() == "ready\n"
        taken = before - free_bytes(folder)
        names = os.listdir(folder)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT)
        process.stdout.close()
        process.stderr.close()
    assert names == os.listdir(folder) == []
    if taken < size:
        pytest.skip("this file system does not tell what is taken, or others are busy on it")
    wait_until(lambda: before - free_bytes(folder) < size // 2)


# Ctrl-C.


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)
folder, wrap, delay = sys.argv[1], {"now": lambda visit: visit, "later": later}[sys.argv[2]], float(sys.argv[3])
pipeline = Pipeline(DiskStore(folder, SIZES))
train(pipeline, 0)
begun, over = threading.Event(), threading.Event()

def interrupt():
    begun.wait()
    for seconds in (delay, 0.003):  # the second while the threads still have work in hand
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    over.set()

def slow(record, buffer):
    begun.set()
    adam_like(1)(record, buffer)
    time.sleep(0.01)

threading.Thread(target=interrupt, daemon=True).start()
interrupted = 0
while not over.is_set():
    try:
        while not over.is_set():
            pipeline.run(wrap(slow))
    except KeyboardInterrupt:
        interrupted += 1
assert interrupted >= 1
assert pipeline.store.generation == 1
train(pipeline, 1)
assert contents(pipeline.store) == expected(SIZES, range(2))
print("equal")
"""


@pytest.mark.parametrize("how", ["now", "later"])
@pytest.mark.parametrize("delay", [0.0, 0.03])
def test_after_ctrl_c_the_step_is_repeated(folder, how, delay):
    assert run_python(INTERRUPTED, folder, how, delay) == "equal\n"


def run_until_interrupted(pipeline, interrupt):
    interrupt.start()
    while True:
        pipeline.run(later(adam_like(1)))


def test_ctrl_c_at_any_line(folder):
    """Whatever line of the calling thread it hits, the same pipeline goes on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipeline = Pipeline(DiskStore(folder, FEW))
        train(pipeline, 0)
        for delay in np.random.default_rng(0).uniform(0, 8e-3, size=60):
            interrupt = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                run_until_interrupted(pipeline, interrupt)
            interrupt.join()
            assert contents(pipeline.store) == expected(FEW, [0])
        train(pipeline, 1)
        assert contents(pipeline.store) == expected(FEW, range(2))
    finally:
        signal.signal(signal.SIGINT, before)


# Forks.


FORKED = """
import contextlib
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
    run_python(FORKED, folder)


# Pins.


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
    assert pinned(pin, FEW) == expected(FEW, [0])
    pin.release()
    pin.release()
    second.join(WAIT)
    assert not second.is_alive()
    assert contents(pipeline.store) == expected(FEW, range(3))


def pinned(pin, sizes):
    found = []
    for record, size in enumerate(sizes):
        buffer = page_aligned(size)
        pin.read(record, buffer)
        found.append(buffer.tobytes())
    return found


def test_several_pins_and_forgotten_ones():
    pipeline = Pipeline(RamStore(FEW))
    with pipeline.store.pin() as first, pipeline.store.pin():
        train(pipeline, 0)
        assert pinned(first, FEW) == [bytes(size) for size in FEW]
        third = pipeline.store.pin()  # of the generation after: step 1 must wait for the first two only
    train(pipeline, 1)
    second = threading.Thread(target=train, args=(pipeline, 2), daemon=True)
    second.start()
    time.sleep(0.05)
    assert second.is_alive()
    del third
    gc.collect()
    second.join(WAIT)
    assert not second.is_alive()


def test_a_read_only_pass_waits_for_no_pin():
    pipeline = Pipeline(RamStore(FEW))
    train(pipeline, 0)
    with pipeline.store.pin():
        train(pipeline, 1)
        pipeline.run(lambda record, buffer: None, writes=False)


# Folders and figures.


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"`Offload\.path` must be a folder .* got '.*/missing', but it does not exist"
    ):
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


def test_rates_are_those_of_the_disk(folder, monkeypatch):
    for name, seconds in (("preadv", 0.01), ("pwritev", 0.02)):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, seconds=seconds: (time.sleep(seconds), real(*args))[1])
    rates, fallbacks = measure_rates(folder, 4 * BLOCK)
    assert rates.num_bytes == 2 * BLOCK  # one block for each thread
    assert 0 < rates.read < 2 * BLOCK / 0.01
    assert 0 < rates.write < 2 * BLOCK / 0.02
    assert 0 < rates.duplex < 2 * BLOCK / 0.02
    assert fallbacks == ()
