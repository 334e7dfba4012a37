"""The signal that a machine is about to be taken away (SIGTERM), noticed between two steps."""

from __future__ import annotations

import signal
import threading
import warnings
from typing import Any

import jax
from jax.experimental import multihost_utils

__all__ = ["PreemptionNotice"]


class PreemptionNotice:
    """Catches the first SIGTERM, so that a checkpoint can be saved before the process ends; a second one ends it.

    In several processes the signal may come to some of them, and at different steps. JAX's own service, which
    `jax.distributed.initialize` starts, then catches it and settles on a step for all.
    """

    def __init__(self) -> None:
        self._received = False
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        """Starts to catch the signal, where that is possible: in the main thread of a single process."""
        if self._installed or jax.process_count() > 1:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGTERM, self._receive)
        self._installed = True

    def remove(self) -> None:
        """Gives the signal back to whom it went before."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        self._installed = False

    def _receive(self, number: int, frame: Any) -> None:
        if self._received:
            self.remove()
            signal.raise_signal(signal.SIGTERM)
            return
        self._received = True
        if callable(self._previous):
            self._previous(number, frame)

    def reached(self, step: int) -> bool:
        """Whether the processes have to save at this step and end. Each must ask, at every step."""
        if jax.process_count() == 1:
            return self._received
        try:
            return bool(multihost_utils.reached_preemption_sync_point(step))
        except RuntimeError as error:
            if not self._installed:
                self._installed = True  # said once
                warnings.warn(f"SIGTERM will not be noticed: JAX's preemption service is off ({error}).", stacklevel=3)
            return False
