"""A thread for calls that Ctrl-C must not stop halfway.

[Note: Ctrl-C while a checkpoint is written]
Python raises KeyboardInterrupt in the main thread, at any line. Orbax, stopped at any line, leaves threads that write
into a folder which the next attempt uses, too, and a list of steps that is not what is on disk. So all writing runs in
a thread of its own, one call after another: a call that has begun runs to its end. Only the caller who waits for it is
interrupted, and whoever calls next finds everything in order.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Uninterrupted:
    """Runs calls one after another in a thread of its own, see [Note: Ctrl-C while a checkpoint is written].

    Args:
      forget: Called first in a forked process, since what was begun is the parent's and its threads are not there.
    """

    def __init__(self, forget: Callable[[], None] = lambda: None) -> None:
        self._forget = forget
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jzero_checkpoint")

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of a call. An interrupt ends the wait, not the call."""
        if self._process != os.getpid():
            self._start()
            self._forget()
        try:
            called = self._pool.submit(call, *args, **kwargs)
        except RuntimeError:  # the interpreter ends, and starts no more threads
            return call(*args, **kwargs)
        return called.result()
