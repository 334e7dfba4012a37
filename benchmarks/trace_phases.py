"""What tracing a step takes, pass by pass, beside plain `jax.jit`: `python -m benchmarks.trace_phases`.

CPU milliseconds without what a pass calls of the others, jax's caches emptied, the best of four. Stage 3 on 8 devices;
the plain step is that of `benchmarks.families --trace`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.sharding import Mesh

import jzero
from benchmarks.engines import Engine
from benchmarks.families import TRACED, Family, batch_of, jzero_step, plain_step
from benchmarks.gpt import AXIS
from jzero.core.engine import differentiate, gradients, norms, trace
from jzero.core.state import next_state

PASSES = {
    "loss as it is": (trace, "trace_loss"),
    "its rows checked": (trace.TracedLoss, "with_row_facts"),
    "differentiated": (differentiate, "differentiate"),
    "passes before the walk": (gradients._LocalStep, "joint"),
    "walk": (gradients._LocalStep, "_walk"),
    "norm": (norms, "grad_norm"),
    "rest of the local step": (gradients, "_run"),
    "update": (next_state, "next_state"),
}
REPEATS = 4


@contextlib.contextmanager
def timed_passes(spent: dict[str, float]) -> Iterator[None]:
    """Adds up the CPU seconds of each pass."""
    inner: list[float] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            inner.append(0.0)
            started = time.process_time()
            try:
                return function(*args, **keywords)
            finally:
                seconds = time.process_time() - started
                spent[name] += seconds - inner.pop()
                if inner:
                    inner[-1] += seconds

        return call

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in PASSES.items():
            function = getattr(owner, attribute)
            modules = [x for key, x in list(sys.modules.items()) if key.startswith("jzero")]
            for place in {owner, *(x for x in modules if vars(x).get(attribute) is function)}:
                stack.enter_context(mock.patch.object(place, attribute, timed(name, function)))
        yield


def best_run(make: Callable[[], tuple[Engine, Any]]) -> tuple[float, float, dict[str, float]]:
    """Returns the CPU seconds of tracing, of lowering, and of each pass."""
    runs = []
    for _ in range(REPEATS):
        engine, batch = make()
        jax.clear_caches()
        gc.collect()
        spent: dict[str, float] = collections.Counter()
        with timed_passes(spent):
            started = time.process_time()
            traced = engine.step.trace(engine.like, batch)
            between = time.process_time()
            traced.lower()
        runs.append((between - started, time.process_time() - between, spent))
    return min(runs, key=lambda run: run[0] + run[1])


def plain_pair(family: Family) -> tuple[Engine, Any]:
    """Returns the plain step and its batch."""
    return plain_step(family), family.batch(family.rows)


def jzero_pair(family: Family, mesh: Mesh) -> tuple[Engine, Any]:
    """Returns the step of jzero and its batch."""
    return jzero_step(family, 3, mesh), batch_of(family, mesh)


def main() -> None:
    """Prints a table with a column for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(TRACED)}; all by default")
    names = parser.parse_args().models or list(TRACED)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jzero.make_mesh(**{AXIS: -1})
    columns: dict[str, dict[str, float]] = {}
    for name in names:
        family = TRACED[name]()
        plain = best_run(functools.partial(plain_pair, family))
        ours = best_run(functools.partial(jzero_pair, family, mesh))
        columns[name] = {
            "plain: trace": plain[0],
            "plain: lower": plain[1],
            **ours[2],
            "state and checks": ours[0] - sum(ours[2].values()),
            "jzero: trace": ours[0],
            "jzero: lower": ours[1],
            "ratio": (ours[0] + ours[1]) / (plain[0] + plain[1]),
        }
    rows = ["plain: trace", "plain: lower", *PASSES, "state and checks", "jzero: trace", "jzero: lower", "ratio"]
    print(f"jax {jax.__version__}\n\n| | {' | '.join(names)} |\n{'|---' * (1 + len(names))}|")
    for row in rows:
        cells = [f"{x:.2f}" if row == "ratio" else f"{1e3 * x:.0f}" for x in (y[row] for y in columns.values())]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
