"""Loops that a monitor watches, with a clock of their own."""

import contextlib
import resource
import types

import numpy as np

import jzero
from jzero.monitor import monitor as monitor_module


class Reading:
    """A scalar on a device, as far as a monitor can tell, that counts how often it is read."""

    shape, dtype = (), np.dtype(np.float32)

    def __init__(self, value, reads):
        self.value, self.reads = value, reads

    def __array__(self, dtype=None, copy=None):
        self.reads.append(self.value)
        return np.asarray(self.value, np.float32)


class Record(list):
    """A sink that remembers."""

    closed = 0

    def __call__(self, step, values):
        self.append((step, values))

    def close(self):
        self.closed += 1


class Clock:
    """The time, as the test says."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(monitor_module, "time", types.SimpleNamespace(perf_counter=lambda: self.now))


def quiet(**options):
    return jzero.Monitor(**{"progress": False, **options})


def run(monitor, *, steps, error=None):
    """A loop, which may end early."""
    with monitor:
        for _ in range(steps):
            monitor.log({"loss": 1.0})
        if error is not None:
            raise error


@contextlib.contextmanager
def disk_of(size):
    """As if files of so many bytes fitted on the disk, and no longer ones."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
