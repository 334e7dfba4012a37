"""Passes over records on disk, and what makes calls of the system fail."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from jzero.core.disk import files
from jzero.core.disk.files import PAGE, page_aligned
from jzero.core.disk.pipeline import Pipeline
from jzero.core.disk.stores import RamStore

SIZES = tuple(PAGE * pages for pages in (3, 1, 17, 256, 1, 64, 5, 1031, 2, 100, 7))
FEW = SIZES[:4]
WAIT = 60  # seconds, in place of for ever


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def adam_like(step):
    """A visitor whose result depends on all bytes of a record, on its number and on the step."""

    def visit(record, buffer):
        assert all(x.daemon for x in threading.enumerate() if x.name.startswith("jzero disk")), (
            "a program could not end"
        )
        words = buffer.view(np.uint32)
        words *= np.uint32(2654435761)
        words += np.arange(words.size, dtype=np.uint32) + np.uint32(97 * step + record + 1)

    return visit


def train(pipeline, *steps):
    for step in steps:
        pipeline.run(adam_like(step))
        pipeline.store.commit()


def contents(store, sizes=None):
    """The bytes of all records of a store, or of those that it has pinned, read one by one."""
    found = []
    for record, size in enumerate(sizes or store.sizes):
        buffer = page_aligned(size)
        store.read(record, buffer)
        found.append(buffer.tobytes())
    return found


def expected(sizes, steps):
    """The bytes after some steps, by a pipeline of one thread in memory."""
    pipeline = Pipeline(RamStore(sizes), threads=1)
    train(pipeline, *steps)
    return contents(pipeline.store)


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
    return [x.name for x in threading.enumerate() if x.name.startswith("jzero disk") and x not in before]


def wait_until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.002)
