"""What each matrix on one device brings to Muon, by compilation.

    python -m benchmarks.matrix_optimizers [--families llama_1b ...] [--optimizers muon ...] [--engines jzero strong]
        [--stages 3 1 0] [--label now] --out FILE
    python -m benchmarks.matrix_optimizers --table FILE

Two models of `benchmarks.families`: a scanned Llama of 1.24B parameters and an unrolled one of 125M, in bf16 with fp32
masters. "muon" is `optax.contrib.muon` for the matrices of layers, with dimension numbers, and Adam for the rest;
"muon+e" takes the embedding and the head, too. Engine `strong` is what a user who knows GSPMD writes, see
`benchmarks.families`. Each line of the result file is one program; lines that are there already are not compiled
again. `--label` names the version of jzero, so that one file holds several: the table shows a column of each.

No accelerator is needed: the compiler of `jzero[gpu]` tells peak memory, collectives and the schedule; milliseconds are
the model of `jzero/analysis/schedule.py` over that schedule.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import pathlib
import time
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

import jzero
from benchmarks.by_compilation import MIB
from benchmarks.families import AXIS, FAMILIES, batch_of, jzero_step, strong_step
from benchmarks.lines import add_line, lines_of
from jzero.machines.topologies import topology_devices

OPTIMIZERS = ("adamw", "muon", "muon+e")
ENGINES = {"jzero": jzero_step, "strong": strong_step}
ENDS = ("embed", "head")
"""The parameters of both ends of a model, which Muon's author leaves to Adam."""


def dimension_numbers(params: Any, ends: bool) -> Any:
    """Returns which dimensions of each leaf are a matrix; `None` of a leaf that Adam updates."""

    def of(path: Any, x: Any) -> MuonDimensionNumbers | None:
        names = [str(getattr(key, "key", "")) for key in path]
        if x.ndim - ("stack" in names) != 2 or (names[-1] in ENDS and not ends):
            return None
        return MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


def make_optimizer(name: str) -> optax.GradientTransformation:
    """Returns an optimizer of `OPTIMIZERS`."""
    if name == "adamw":
        return optax.adamw(1e-3)
    numbers = lambda params: dimension_numbers(params, name == "muon+e")
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)


def compiled(name: str, optimizer: str, engine: str, stage: int, topology: str) -> dict[str, Any]:
    """Returns the figures of one program."""
    family = FAMILIES[name]()
    mesh = jzero.make_mesh(devices=topology_devices(topology), **{AXIS: -1})
    started = time.process_time()
    built = ENGINES[engine](family, stage, mesh, tx=make_optimizer(optimizer))
    report = jzero.analyze(built.step, built.like, batch_of(family, mesh), topology=topology, mesh=mesh)
    sent = collections.Counter[str]()
    for row in report.collectives:
        sent[row.kind] += row.sent_bytes
    assert report.timeline is not None
    return {
        "ms": round(1e3 * report.timeline.seconds, 2),
        "exposed_ms": round(1e3 * report.timeline.exposed, 2),
        "peak": report.memory.peak,
        "sent_bytes": sent,
        "violations": report.violations,
        "notes": report.notes,
        "jax": jax.__version__,
        "optax": optax.__version__,
        "cpu_seconds": round(time.process_time() - started),
    }


FIGURES = {
    "ms": lambda x: f"{x['ms']:.1f}",
    "MiB": lambda x: f"{x['peak'] / MIB:.0f}",
    "sent GB": lambda x: f"{sum(x['sent_bytes'].values()) / 1e9:.2f}",
}


def table(lines: list[dict[str, Any]]) -> str:
    """Returns Markdown: one table per model, with a column per version of jzero, and GSPMD, for each figure."""
    by_key = {tuple(x["key"].split("/")[1:]): x for x in lines}
    engines = list(dict.fromkeys(engine for _, _, engine, _ in by_key))
    names = ["GSPMD" if engine == "strong" else engine for engine in engines]
    heads = [f"{figure}: {name}" if i == 0 else name for figure in FIGURES for i, name in enumerate(names)]
    text = []
    for model in dict.fromkeys(model for model, _, _, _ in by_key):
        text += [f"\n**{model}**\n", f"| stage, optimizer | {' | '.join(heads)} | of it all-to-all | ms of AdamW's |"]
        text.append("|---" * (len(heads) + 3) + "|")
        for stage, optimizer in itertools.product("310", OPTIMIZERS):
            row = [by_key.get((model, optimizer, engine, stage)) for engine in engines]
            newest, adamw = row[-1], by_key.get((model, "adamw", engines[-1], stage))
            cells = ["" if x is None else show(x) for show in FIGURES.values() for x in row]
            if newest is not None and adamw is not None:
                exchanged = newest["sent_bytes"].get("all-to-all", 0) / 1e9
                cells += [f"{exchanged:.2f}", f"{newest['ms'] / adamw['ms']:.2f}"]
                text.append(f"| {stage}, {optimizer} | {' | '.join(cells)} |")
    departures = [f"{x['key']} departs from the plan: {x['violations']}" for x in lines if x["violations"]]
    return "\n".join([*text, "", *departures])


def main() -> None:
    """Compiles what is not in the result file yet, or prints a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=["llama_1b", "llama_125m"])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--stages", nargs="+", type=int, default=[3, 1, 0])
    parser.add_argument("--label", default="now", help="the version of jzero")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("matrix_optimizers.jsonl"))
    parser.add_argument("--table", type=pathlib.Path, help="print this file, compile nothing")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.table:
        print(table(lines_of(options.table)))
        return
    choices = (options.stages, options.families, options.optimizers, options.engines)
    for stage, name, optimizer, engine in itertools.product(*choices):
        label = options.label if engine == "jzero" else engine
        key = "/".join((options.topology, name, optimizer, label, str(stage)))
        if (engine == "strong" and not stage) or key in {x["key"] for x in lines_of(options.out)}:
            continue
        line = {"key": key, **compiled(name, optimizer, engine, stage, options.topology)}
        add_line(options.out, line)


if __name__ == "__main__":
    main()
