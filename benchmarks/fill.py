"""What `fill_memory` makes of the memory of GSPMD: `python -m benchmarks.fill --topology h200:8`.

For each family of `benchmarks.families`, four steps at stage 3, compiled for machines that need not be there: the step
by hand (`strong`), jzero's with `remat="cheap"`, jzero's filled up to the peak by hand (`full`), and filled up to
half-way between the cheap step's peak and that (`half`). Where that takes more than the step by hand there is nothing
to fill.

Each line of the result file is one program; lines that are there already are not compiled again. `--table FILE` prints
one.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import jax

import jzero
from benchmarks.by_compilation import MIB
from benchmarks.engines import Engine
from benchmarks.families import FAMILIES, batch_of, compiled, figures, jzero_step
from benchmarks.gpt import AXIS
from benchmarks.lines import add_line, lines_of
from jzero.machines.topologies import topology_devices

STEPS = ("strong", "cheap", "half", "full")


def filled(name: str, limit: float, topology: str) -> dict[str, Any]:
    """Returns the figures of a step that is filled up to a limit, and what it keeps."""
    family = FAMILIES[name]()
    mesh = jzero.make_mesh(devices=topology_devices(topology), **{AXIS: -1})
    built = jzero_step(family, 3, mesh)
    step = jzero.fill_memory(built.step, built.like, batch_of(family, mesh), hbm_bytes=limit, topology=topology)
    summary = step.plan(built.like, batch_of(family, mesh)).kept
    counts = None if summary is None else [len(summary.params), summary.of_params, summary.blocks, summary.of_blocks]
    return {"limit": limit, "kept": counts, **figures(family, Engine(step, built.make, built.like), mesh, topology)}


def line_of(name: str, step: str, topology: str, lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns one line of the result file."""
    if step in ("strong", "cheap"):
        return compiled(name, step, 3, topology)
    hand, default = (lines[f"{topology}/{name}/{x}"]["peak"] for x in ("strong", "cheap"))
    if default >= hand:
        return {"limit": hand, "kept": None}
    return filled(name, hand if step == "full" else (default + hand) / 2, topology)


def table(lines: list[dict[str, Any]]) -> str:
    """Returns Markdown: a family per row; steps as parts of the step by hand, and the gain half-way."""
    by_key = {x["key"]: x for x in lines}
    rows = ["| | by hand: MiB, ms | cheap | half-way | gain there | with its memory | kept |", "|---" * 7 + "|"]
    for topology, name in dict.fromkeys(tuple(x["key"].split("/")[:2]) for x in lines):
        hand, default, half, full = (by_key.get(f"{topology}/{name}/{x}", {}) for x in STEPS)
        cell = lambda x, hand=hand: (
            f"{x['peak'] / MIB:.0f}, {1e3 * x['seconds']:.2f} ({x['seconds'] / hand['seconds']:.2f})"
            if "peak" in x
            else ""
        )
        gain = ""
        if "peak" in half and "peak" in full:
            most = default["seconds"] - full["seconds"]
            gain = f"{(default['seconds'] - half['seconds']) / most:.0%}" if most > 0 else ""
        fraction = "{} of {} parameters, {} of {} blocks".format(*full["kept"]) if full.get("kept") else ""
        cells = [name, cell(hand), cell(default), cell(half), gain, cell(full), fraction]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Compiles what is not in the result file yet, or prints a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--family", nargs="*", default=[], help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--step", nargs="*", choices=STEPS, default=STEPS)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fill.jsonl"))
    parser.add_argument("--table", type=pathlib.Path, help="print this file, compile nothing")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.table:
        print(table(lines_of(options.table)))
        return
    for name in options.family or FAMILIES:
        for step in options.step:
            key, lines = f"{options.topology}/{name}/{step}", {x["key"]: x for x in lines_of(options.out)}
            if key in lines:
                continue
            line = {"key": key, **line_of(name, step, options.topology, lines)}
            add_line(options.out, line)


if __name__ == "__main__":
    main()
