"""Runs functions beside the program."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

T = TypeVar("T")


def in_thread(fn: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Starts a function in a thread of its own, which ends before the program does."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    # A `with` statement may have set it, which holds for its thread alone.
    has_wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

    def run() -> None:
        try:
            with jax.enable_x64(has_wide):
                future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jzero-update").start()
    return future
