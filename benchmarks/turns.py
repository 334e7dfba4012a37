"""Measures several runs in turns, so that all meet the same machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

K = TypeVar("K")


class Training:
    """Trains a state: each call runs some steps, one after another, and waits for the last."""

    def __init__(self, step: Any, state: Any, batch: Any, steps: int = 1) -> None:
        self.step, self.state, self.batch, self.steps = step, state, batch, steps
        self.count, self.metrics = 0, None

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.state, self.metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.metrics))
        self.count += self.steps


def in_turns(
    runs: Mapping[K, Callable[[], Any]],
    repeats: int,
    *,
    until: float = math.inf,
) -> dict[K, list[float]]:
    """Returns the seconds of each call of each run.

    No turn but the first begins after `until` of `time.monotonic`.
    """
    times: dict[K, list[float]] = {name: [] for name in runs}
    for i in range(repeats):
        if i and time.monotonic() > until:
            break
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return times


def ratio(times: list[float], others: list[float]) -> float:
    """Returns the median of the ratios of runs that took the same turn."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))
