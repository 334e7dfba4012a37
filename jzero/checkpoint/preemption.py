"""Handles SIGTERM, the signal before a machine is preempted, between two steps."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType

import jax
from jax.experimental import multihost_utils

from jzero.core.base.guard import warn


class PreemptionNotice:
    """Catches the first SIGTERM, so that a checkpoint can be saved before the process ends; a second one ends it.

    With several processes, only some may get the signal, at different steps. JAX's own service, which
    `jax.distributed.initialize` starts, then catches it and chooses a step for all. Orbax's
    `PreemptionCheckpointingPolicy` asks only that service, so a single process would not notice the signal.
    """

    def __init__(self) -> None:
        self.received = False
        self._warned = False

    def listen(self) -> None:
        """Starts to catch the signal, if this is the main thread of a single process."""
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            _SIGNAL.add(self)

    def stop(self) -> None:
        """Stops listening; the last listener restores the previous handler."""
        _SIGNAL.discard(self)

    def reached(self, step: int) -> bool:
        """Whether the processes must save at this step and end. Each process must call it, at every step."""
        if jax.process_count() == 1:
            return self.received
        try:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                warn(f"SIGTERM will not be noticed: JAX's preemption service is off ({error}).")
            return False


class _Signal:
    """The only handler of SIGTERM, for all listeners."""

    def __init__(self) -> None:
        self._listening: weakref.WeakSet[PreemptionNotice] = weakref.WeakSet()
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def add(self, notice: PreemptionNotice) -> None:
        if signal.getsignal(signal.SIGTERM) != self._receive:
            self._before = signal.signal(signal.SIGTERM, self._receive)
        self._listening.add(notice)

    def discard(self, notice: PreemptionNotice) -> None:
        self._listening.discard(notice)
        if not self._listening:
            self._give_back()

    def _give_back(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def forget(self) -> None:
        """Gives the signal back in a forked process, whose parent saves the checkpoints."""
        self._listening.clear()
        self._give_back()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        to_tell = [notice for notice in self._listening if not notice.received]
        if not to_tell:  # every listener has been notified, or is gone
            self._give_back()
            signal.raise_signal(signal.SIGTERM)
            return
        for notice in to_tell:
            notice.received = True
        if callable(self._before):
            self._before(number, frame)


_SIGNAL = _Signal()

os.register_at_fork(after_in_child=_SIGNAL.forget)
