"""Memory, communication and its overlap by compilation: `python -m benchmarks.by_compilation --topology h200:8`.

No accelerator is needed: the compilers of `jzero[gpu]` and `jzero[tpu]` tell peak memory, collectives and the schedule;
exposed communication is the model of `jzero/analysis/schedule.py` over that schedule. Each line of the result file is
one program; lines that are there already are not compiled again, so that a run can be taken up. `--table` prints them
as tables beside ZeRO's bound. `--tensor 4` puts tensor parallelism over 4 devices beside ZeRO; "sent" is then what ZeRO
sends.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from benchmarks.engines import ENGINES, make_engine
from benchmarks.gpt import AXIS, GPT, MODEL, SIZES, init_of, placed
from benchmarks.lines import add_line, lines_of
from jzero.machines.machine import parse_machine
from jzero.machines.topologies import topology_devices

MIB = 2**20
STAGES = {
    "replicated": (0,),
    "jzero as written": (3,),
    "map_variables": (3,),
    "jzero, XLA ahead": (3,),
    "jzero tuned": (3,),
}


class Case(NamedTuple):
    """One program: which model, how, by whom."""

    topology: str
    size: str
    scan: bool
    remat: bool
    engine: str
    stage: int
    tensor: int = 1

    @property
    def key(self) -> str:
        """How a result file names it."""
        how = f"{'scanned' if self.scan else 'unrolled'}{'+remat' if self.remat else ''}"
        how += f"+tensor{self.tensor}" if self.tensor > 1 else ""
        return "/".join((self.topology, self.size, how, self.engine, str(self.stage)))


def cases(options: argparse.Namespace) -> list[Case]:
    """Returns the programs to compile, small ones first."""
    models = list(itertools.product(["124M"], [True, False], [True, False]))
    models += [("1.4B", True, True), ("7B", True, True)]
    if options.tensor > 1:
        models = [(size, True, True) for size in ("1.4B", "7B")]
    programs = [
        Case(options.topology, size, scan, remat, engine, stage, options.tensor)
        for size, scan, remat in models
        for engine in ENGINES
        if not (remat and engine == "jzero as written")  # the model says itself what to recompute
        if engine != ("jzero tuned" if scan else "jzero, XLA ahead")
        if options.tensor == 1 or engine in ("jzero", "gspmd")
        for stage in STAGES.get(engine, (3, 2, 1))
    ]
    selected = [
        c for c in programs if all(w in c.key for w in options.only) and not any(w in c.key for w in options.skip)
    ]
    return sorted(selected, key=lambda c: (c.stage != 3, list(SIZES).index(c.size)))


def compiled(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one program."""
    axes = {AXIS: -1, MODEL: case.tensor} if case.tensor > 1 else {AXIS: -1}
    mesh = jzero.make_mesh(devices=topology_devices(case.topology), **axes)
    model = GPT(SIZES[case.size], scan=case.scan, remat=case.remat, mesh=mesh if case.tensor > 1 else None)
    engine = make_engine(case.engine, model, case.stage, mesh)
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    batch = jax.ShapeDtypeStruct((mesh.shape[AXIS] * options.rows, options.seq_len + 1), jnp.int32, sharding=rows)
    started = time.perf_counter()
    try:
        report = jzero.analyze(engine.step, engine.like, batch, topology=case.topology, mesh=mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"key": case.key, "refused": str(error).splitlines()[0], "jax": jax.__version__}
    params = jax.tree.leaves(placed(jax.eval_shape(init_of(model), jax.random.key(0)), model.mesh))
    size = sum(x.size for x in params)
    large = [c for c in report.collectives if c.elements > size // 1000]
    beside = {}
    if case.tensor > 1:
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in params)
        beside = {"held": held, "sent_beside": sum(c.sent_bytes for c in report.collectives if AXIS not in c.axis)}
    return {
        "key": case.key,
        "parameters": size,
        "arguments": report.memory.arguments,
        "peak": report.memory.peak,
        "elements": report.communication_elements,
        "sent_bytes": sum(c.sent_bytes for c in report.collectives),
        **beside,
        "kinds": sorted({f"{c.kind} {c.dtype}{' in loop' if c.in_loop else ''}" for c in large}),
        "exposed": report.exposed_communication,
        "seconds": None if report.timeline is None else report.timeline.seconds,
        "violations": list(report.violations),
        "compile_seconds": round(time.perf_counter() - started, 1),
        "jax": jax.__version__,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Returns the results as Markdown: one table per topology and model."""
    text = []
    groups = itertools.groupby(sorted(lines, key=lambda x: x["key"]), key=lambda x: x["key"].split("/")[:3])
    for (topology, size, how), group in groups:
        text.append(f"\n**{topology}, GPT {size}, {how}**\n")
        text.append("| | peak, MiB | of GSPMD | sent, MiB | of ZeRO's bound | exposed | step, ms | compiled in, s |")
        text.append("|---|---|---|---|---|---|---|---|")
        rows = {tuple(x["key"].split("/")[3:]): x for x in group}
        for (engine, stage), x in sorted(rows.items(), key=lambda row: (row[0][1], row[0][0])):
            name = engine if engine == "replicated" else f"{engine}, stage {stage}"
            peer = rows.get(("gspmd", stage), {})
            text.append(f"| {name} | {' | '.join(cells(x, peer, int(stage), topology))} |")
    return "\n".join(text)


def cells(x: dict[str, Any], peer: dict[str, Any], stage: int, topology: str) -> list[str]:
    """Returns one row of a table; `peer` is GSPMD's line."""
    if "refused" in x:
        return ["refused: too large", *[""] * 6]
    ratio = f"{x['peak'] / peer['peak']:.2f}" if "peak" in peer else ""
    of_zero = x["sent_bytes"] - x.get("sent_beside", 0)
    sent = of_zero / bound(x, stage, topology)
    exposed = "" if x["exposed"] is None else f"{100 * x['exposed']:.1f} %"
    step = "" if x["seconds"] is None else f"{1e3 * x['seconds']:.1f}"
    return [
        f"{x['peak'] / MIB:.0f}",
        ratio,
        f"{of_zero / MIB:.0f}",
        f"{sent:.3f}",
        exposed,
        step,
        f"{x['compile_seconds']:.0f}",
    ]


def plot(lines: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws peaks at stage 3, and what of communication is exposed, for each model."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    engines = ("jzero", "jzero as written", "jzero, XLA ahead", "jzero tuned", "gspmd", "map_variables")
    figures = {tuple(x["key"].split("/")): x for x in lines if "peak" in x}
    order = lambda model: (model[0], list(SIZES).index(model[1]), model[2])
    models = sorted({k[:3] for k in figures if (*k[:3], "gspmd", "3") in figures}, key=order)
    figure, axes = plt.subplots(1, 2, figsize=(12, 1 + 0.8 * len(models)), sharey=True)
    for i, engine in enumerate(engines):
        rows = [(m, figures.get((*model, engine, "3"))) for m, model in enumerate(models)]
        places = [m + 0.13 * (i - 2.5) for m, x in rows if x]
        peaks = [x["peak"] / figures[(*models[m], "gspmd", "3")]["peak"] for m, x in rows if x]
        axes[0].barh(places, peaks, 0.12, label=engine)
        axes[1].barh(places, [100 * (x["exposed"] or 0) for _, x in rows if x], 0.12)
    axes[0].set_yticks(range(len(models)), [" ".join(model) for model in models])
    axes[0].invert_yaxis()
    axes[0].axvline(1, color="gray", linewidth=0.8)
    axes[0].set_xlabel("peak memory per device at stage 3, of GSPMD's")
    axes[1].set_xlabel("communication that no computation covers, %")
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=len(engines), frameon=False)
    figure.savefig(path)


def bound(x: dict[str, Any], stage: int, topology: str) -> float:
    """Bytes that one device sends per step in ZeRO's arithmetic, in bf16 rings: 2Ψ, at stage 3 3Ψ.

    Beside tensor parallelism Ψ is what each device holds of the parameters, and what that sends does not count.
    """
    count = math.prod(parse_machine(topology)[1])
    tensor = re.search(r"\+tensor(\d+)", x["key"])
    count //= int(tensor[1]) if tensor else 1
    return (3 if stage == 3 else 2) * x.get("held", x["parameters"]) * 2 * (count - 1) / count


def main() -> None:
    """Compiles what is not in the result file yet, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("by_compilation.jsonl"))
    parser.add_argument("--only", nargs="*", default=[], help="parts of keys such as 124M, scanned+remat, jzero/3")
    parser.add_argument("--skip", nargs="*", default=[], help="parts of keys to leave out")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share a layer: tensor parallelism")
    parser.add_argument("--rows", type=int, default=4, help="sequences per device, or group of --tensor devices")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--table", action="store_true", help="print the results, compile nothing")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the results to this SVG file, compile nothing")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = lines_of(options.results)
    if options.plot:
        plot(results, options.plot)
    if options.table:
        print(table(results))
    if options.table or options.plot:
        return
    for case in cases(options):
        if case.key in {x["key"] for x in results}:
            continue
        line = compiled(case, options)
        add_line(options.results, line)


if __name__ == "__main__":
    main()
