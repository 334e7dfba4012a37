"""Passes over records on disk, and what makes calls of the system fail."""

import gc
import os
import pathlib
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from jzero.disk import files
from jzero.disk.files import PAGE, page_aligned
from jzero.disk.pipeline import Pipeline
from jzero.disk.stores import RamStore

ROOT = pathlib.Path(__file__).parents[1]
SIZES = tuple(PAGE * pages for pages in (3, 1, 17, 256, 1, 64, 5, 1031, 2, 100, 7))
FEW = SIZES[:4]
WAIT = 60  # seconds, in place of for ever
MODULES = ("disk_pipelines", "test_disk_files", "test_disk_faults")


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


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


def run_python(text, *args):
    """Runs a script that has the names of these modules, and checks that it succeeds."""
    names = "".join(f"from tests.{module} import *\n" for module in MODULES)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command, environment = [sys.executable, "-c", f"{names}{text}", *map(str, args)], os.environ | {"PYTHONPATH": path}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT, check=False)
    assert ran.returncode == 0, ran.stderr


def wait_until(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.002)
