"""`jzero.fit` against its own compiled candidates: `python -m tests.accuracy.fit_check`.

Each of three models gets seven budgets of memory. `choice` is what `fit` returns by default; `reckoned` is that of
`confirm=False`. `best` is the fastest that fits if `fit` compiles until five fit instead of three, and all that it
reckons to take up to 1.25 of the budget. Memory that is left is not filled here. Steps are those of the compiled
schedules, in ms; peaks are the compiler's, in GiB.

No accelerator is needed, only the compiler of the topology. Each line of the result file is one compiled program; those
that are there are not compiled again, by `fit` neither.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax

import jzero
from benchmarks.common import GIB, complete, lines_of, parser_of
from benchmarks.engines import TX, loss_of
from benchmarks.family_models import LLAMA_125M, Family, gpt, llama, moe
from jzero.analysis import confirm
from jzero.analysis.candidates import Candidate
from jzero.analysis.fit_report import Fit
from jzero.analysis.search import Search
from jzero.estimate.step_memory import StepMemory
from jzero.machines.machine import machine


class Model(NamedTuple):
    """A model, and the budgets in GiB per device that it gets."""

    make: Callable[[], Family]
    budgets: tuple[float, ...]


MODELS = {
    "gpt_1.4b": Model(functools.partial(gpt, layers=24, width=2048, scanned=True), (6, 8, 10, 14, 20, 32, 64)),
    "llama_125m": Model(functools.partial(llama, LLAMA_125M, scanned=False, remat=False), (1, 1.5, 2, 3, 4, 6, 10)),
    "moe": Model(moe, (1.5, 2, 2.5, 3, 4, 6.5, 12)),
}
THOROUGH = {"RIVALS": 5, "SURE_SHARE": 0.8}
"""Settings of `jzero.analysis.confirm` to compile more."""


def key_of(model: str, topology: str, x: Candidate) -> str:
    """Returns the name of a candidate in the result file."""
    config = x.config
    parts = (topology, model, config.stage, config.persistence_threshold, x.accumulate_steps, x.remat)
    passes = () if config.reshard_after_forward else ("parameters kept",)
    return "/".join(map(str, (*parts, config.offload.optimizer, *passes)))


class Figures:
    """What is known of the candidates of a model: compiled figures in a file, reckoned ones as long as this runs."""

    def __init__(self, path: pathlib.Path, model: str, topology: str) -> None:
        self.path, self.model, self.topology = path, model, topology
        self.lines = {x["key"]: x for x in lines_of(path)}
        self.reckoned: dict[Any, StepMemory] = {}
        self.ratios: dict[str, tuple[float, float]] = {}
        self.compile, self.reckon = confirm.compiled, Search.memory

    def compiled(self, search: Search, x: Candidate) -> Candidate:
        """Compiles a candidate, unless it is in the file."""
        key = key_of(self.model, self.topology, x)
        if key not in self.lines:
            candidate = self.compile(search, x)
            line = {"peak": candidate.compiled_peak, "seconds": candidate.compiled_seconds, "jax": jax.__version__}
            complete(self.path, [key], lambda key: line)
            self.lines[key] = {"key": key, **line}
        return self.with_figures(x)

    def with_figures(self, x: Candidate) -> Candidate:
        """Returns a candidate with what the file has of it."""
        key = key_of(self.model, self.topology, x)
        if key not in self.lines:
            return x
        peak, seconds = self.lines[key]["peak"], self.lines[key]["seconds"]
        if peak is not None and x.memory.seconds is not None:
            self.ratios[key] = x.memory.peak / peak, x.memory.seconds / seconds
        return dataclasses.replace(x, compiled_peak=peak, compiled_seconds=seconds, refused=peak is None)

    @property
    def remembered(self) -> Callable[..., StepMemory]:
        """`Search.memory`, which traces nothing twice."""

        def memory(search: Search, step: Any, placed: Any) -> StepMemory:
            plan = jzero.plan_of(placed)
            key = (plan.config, tuple(plan.mesh.shape.items()), step.micro.steps, step.remat)
            if key not in self.reckoned:
                self.reckoned[key] = self.reckon(search, step, placed)
            return self.reckoned[key]

        return memory

    def fit(self, gibibytes: float, *, confirms: bool = True, thorough: bool = False) -> Fit:
        """Returns what `fit` finds for a budget."""
        family = MODELS[self.model].make()
        shapes = jax.eval_shape(lambda key: jzero.TrainState.create(params=family.init(key), tx=TX), jax.random.key(0))
        batch = family.batch(family.rows * machine(self.topology).num_devices)
        with (
            mock.patch.object(confirm, "compiled", self.compiled),
            mock.patch.object(importlib.import_module("jzero.analysis.fit"), "_filled", return_value=None),
            mock.patch.object(Search, "memory", self.remembered),
            mock.patch.multiple(confirm, **(THOROUGH if thorough else {"RIVALS": confirm.RIVALS})),
        ):
            return jzero.fit(
                shapes, loss_of(family), batch, topology=self.topology, hbm_bytes=gibibytes * GIB, confirm=confirms,
                config=jzero.ZeroConfig(stage=0, precision="bf16"),
            )  # fmt: skip


def accuracy(ratios: Collection[tuple[float, float]]) -> str:
    """Returns how far reckoned figures are from compiled ones."""
    peaks, times = (sorted(x) for x in zip(*ratios, strict=True))
    spans = (f"{name} {x[0]:.2f} to {x[-1]:.2f}" for name, x in (("peak", peaks), ("step", times)))
    return f"\nReckoned over compiled, {len(ratios)} programs: {', '.join(spans)}"


def described(x: Candidate) -> str:
    """Returns the cells of a candidate: how it trains, its peak and its step."""
    how = f"stage {x.config.stage}, {x.remat}, {x.accumulate_steps}"
    how += ", state on the host" * (x.config.offload.optimizer == "host")
    how += ", parameters kept" * (not x.config.reshard_after_forward)
    cost = x.compiled_cost()
    return f"{how} | {x.peak / GIB:.2f} | {'' if cost is None else f'{1e3 * cost:.2f}'}"


def rows(figures: Figures) -> Iterator[tuple[str, bool]]:
    """Yields a line of the table for each budget, and whether the choice is the best."""
    for gibibytes in MODELS[figures.model].budgets:
        chosen = figures.fit(gibibytes).chosen
        everything = [figures.with_figures(x) for x in figures.fit(gibibytes, thorough=True).tried]
        fitting = [x for x in everything if x.is_compiled and x.fits(int(gibibytes * GIB))]
        reckoned = figures.fit(gibibytes, confirms=False).chosen
        if chosen is None:
            yield f"| {gibibytes} | nothing fits |", not fitting
            continue
        best = min(fitting, key=lambda x: x.compiled_cost() or 0.0)
        cost, least = chosen.compiled_cost(), best.compiled_cost()
        assert cost is not None
        assert least is not None
        assert reckoned is not None
        cells = [f"{gibibytes}", described(chosen), f"{1e3 * least:.2f} of {len(fitting)}", f"{cost / least:.3f}"]
        yield f"| {' | '.join([*cells, described(figures.with_figures(reckoned))])} |", cost <= least


def main() -> None:
    """Prints the tables; exits with 1 if a choice is not the best."""
    parser = parser_of(__doc__)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fit_check.jsonl"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    right, text = [], []
    for model in options.model:
        text += [f"\n**{model}, {options.topology}**, jax {jax.__version__}\n"]
        text += ["| GiB | choice | peak | step | best | ratio | reckoned | peak | step |", "|---" * 9 + "|"]
        figures = Figures(options.out, model, options.topology)
        for line, is_best in rows(figures):
            text.append(line)
            right.append(is_best)
        text.append(accuracy(figures.ratios.values()))
    print("\n".join(text))
    print(f"\n{sum(right)} of {len(right)} choices are the best")
    raise SystemExit(not all(right))


if __name__ == "__main__":
    main()
