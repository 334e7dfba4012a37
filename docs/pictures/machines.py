"""Pictures of machines that are not there: estimates, and committed results of benchmarks."""

import json
import pathlib
import re
from typing import Any

from typer.testing import CliRunner

import jzero
from jzero.cli.commands import app
from jzero.cli.request import PlanRequest
from jzero.cli.source import load_source
from jzero.machines.limits import usable_bytes
from jzero.machines.machine import machine
from pictures.svg import STATES, Canvas, Plot, bars

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
LINES = ("work", "params", "opt", "grads", "gathered", "activations")


def _command(words: str) -> Any:
    """Returns what a command of jzero prints as JSON."""
    return json.loads(CliRunner().invoke(app, [*words.split(), "--json"]).stdout)


def draw_fit() -> str:
    """Returns what the first command of the guide tried: a bar for each layout, beside what a device has."""
    guide = (ROOT / "docs" / "guides" / "memory.md").read_text()
    found = _command(re.search(r"^jzero (fit .*)$", guide, re.MULTILINE)[1])
    rows = []
    for x in found["tried"]:
        name = f"stage {x['stage']}"
        if x["stage"] == 3 and not x["reshard_after_forward"]:
            name += ", kept"
        elif str(x["remat"]).startswith("Keep"):
            name += ", filled"
        peak = x["estimated_peak"] / GIB
        states = min(x["states_bytes"] / GIB, peak)
        parts = {"opt": states, "work": peak - states}
        rows.append(
            (name, parts, f"{peak:.1f}\t{1000 * x['estimated_seconds']:.0f} ms")
        )
    limit = (found["limit"] / GIB, f"{found['limit'] / GIB:.1f} GiB usable")
    label = "GiB of a step of 7B on eight H100: " + "; ".join(
        f"{name} {end}" for name, _, end in rows
    ).replace("\t", ", ")
    return bars(
        label,
        rows,
        {"opt": "states", "work": "beside them"},
        left=118,
        limit=limit,
        room=130,
    )


def draw_devices() -> str:
    """Returns the peak of a step of 7B by number of devices and stage, beside the memory of two cards."""
    counts = [1, 2, 4, 8, 16, 32]
    canvas = Canvas("")
    kinds = {"work": "stage 0", "grads": "stages 1 and 2", "params": "stage 3"}
    top = canvas.legend(kinds) + 28
    plot = Plot(canvas, (0, len(counts) - 1), (0, 120), top, 230)
    plot.axes(
        {k: f"{n}" for k, n in enumerate(counts)},
        {y: f"{y}" for y in range(0, 121, 20)},
        "devices, one sequence of 4096 tokens on each",
        "GiB on each device at the peak",
    )
    ends = []
    for stage, kind in zip((0, 1, 3), kinds, strict=True):
        config = jzero.ZeroConfig(stage=stage, precision="bf16")
        points = []
        for k, n in enumerate(counts):
            request = PlanRequest(
                params="7B", topology=f"h100:{n}", precision="bf16"
            )
            model = load_source(request).model
            memory = jzero.estimate_step_memory(
                jzero.make_train_step(model.loss_fn),
                model.state,
                model.batch,
                topology=request.topology,
                config=config,
            )
            points.append((k, memory.peak / GIB))
        canvas.line([plot.at(*point) for point in points], f"line {kind}-line")
        ends.append(f"{points[-1][1]:.0f} at {kinds[kind]}")
    for kind in ("l40s", "h100"):
        usable = usable_bytes(machine(f"{kind}:1")) / GIB
        place = plot.at(0, usable)
        canvas.line([place, (plot.right, place[1])], "limit")
        canvas.text(
            plot.right,
            place[1] - 5,
            f"{kind.upper()}: {usable:.0f} usable",
            "small",
            "end",
        )
    canvas.label = f"Peak of a step of 7B by number of devices; on {counts[-1]}, GiB: {', '.join(ends)}"
    return canvas.svg(top + 230 + 46)


def draw_fine_tuning() -> str:
    """Returns the states of a Llama of 7B on one of eight devices, by how it is fine-tuned, in GiB."""
    ways = {
        "all": "",
        "LoRA": "--lora-rank 8",
        "int8 LoRA": "--lora-rank 8 --quantize int8",
    }
    rows = []
    for way, options in ways.items():
        words = f"estimate --params 7B --devices 8 --precision bf16 {options}"
        sizes = _command(words)["states"]
        parts = {
            "params": sizes["params"] / GIB,
            "grads": sizes["grads"] / GIB,
            "opt": sizes["opt_state"] / GIB,
        }
        rows.append((way, parts, f"{sum(parts.values()):.1f}"))
    label = "GiB of states on each of eight devices, 7B: " + ", ".join(
        f"{name} {end}" for name, _, end in rows
    )
    return bars(label, rows, STATES, left=92)


# --- Results of benchmarks -----------------------------------------------------------------------------------------


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def draw_network() -> str:
    """Returns the modelled step on two hosts by the rate of a network port, for each way to send less."""
    drawn = {
        "flat": "one axis",
        "two_hops": "two hops",
        "secondary": "secondary",
        "hsdp": "replicas",
        "secondary, int8 gather": "int8 gathers",
        "secondary, int8 gather, int4 reduce": "and int4 sums",
    }
    colors = dict(zip(drawn, LINES, strict=True))
    rates = [50, 25, 12.5, 6.25]
    canvas = Canvas(
        "Modelled step on two hosts of eight H200, by the rate of a network port"
    )
    top = canvas.legend({colors[kind]: name for kind, name in drawn.items()}) + 22
    plot = Plot(canvas, (0, 3), (0, 60), top, 220)
    plot.axes(
        {k: f"{rate:g}" for k, rate in enumerate(rates)},
        {y: f"{y}" for y in range(0, 61, 10)},
        "GB/s of one network port",
        "ms of a modelled step",
    )
    for x in _lines("2026-11-25_slow_links.jsonl"):
        if (
            x["kind"] in drawn
            and x["topology"] == "h200:16"
            and x["micro_batches"] == 1
        ):
            points = [
                plot.at(k, x["ms"][f"{rate:g}"]) for k, rate in enumerate(rates)
            ]
            canvas.line(points, f"line {colors[x['kind']]}-line")
    return canvas.svg(top + 220 + 46)


def draw_pcie() -> str:
    """Returns the modelled step on one host of PCIe cards, for each way to send less."""
    machine = "l40s:8@16"
    rows = [
        (
            x["kind"].replace("flat", "stage 3"),
            {"params": x["ms"][machine]},
            f"{x['ms'][machine]:.0f} ms",
        )
        for x in _lines("2026-11-25_slow_links.jsonl")
        if x["topology"] == "l40s:8"
    ]
    label = "Modelled step on eight L40S at 16 GB/s: " + "; ".join(
        f"{name} {end}" for name, _, end in rows
    )
    return bars(label, rows, {}, left=200, room=74)


def _compared(figure: str, unit: float, form: str) -> str:
    engines = {"gspmd": "GSPMD", "map_variables": "map_variables", "jzero": "jzero"}
    colors = {"gspmd": "work", "map_variables": "opt", "jzero": "params"}
    found = {x["key"]: x for x in _lines("2026-11-22_by_compilation.jsonl")}
    rows = []
    for size in ("124M", "1.4B", "7B"):
        of = found[f"h200:8/{size}/scanned+remat/gspmd/3"]
        for engine in engines:
            x = found[f"h200:8/{size}/scanned+remat/{engine}/3"]
            name = size if engine == "gspmd" else ""
            rows.append(
                (
                    name,
                    {colors[engine]: x[figure] / of[figure]},
                    form.format(x[figure] / unit),
                )
            )
    label = "Parts of GSPMD's: " + "; ".join(end for _, _, end in rows)
    return bars(
        label,
        rows,
        {colors[x]: name for x, name in engines.items()},
        left=58,
        room=96,
    )


def draw_peaks() -> str:
    """Returns compiled peaks of recomputed GPTs at stage 3 on eight H200, as parts of GSPMD's."""
    return _compared("peak", GIB, "{:.2f} GiB")


def draw_steps() -> str:
    """Returns modelled steps of the same."""
    return _compared("seconds", 1e-3, "{:.1f} ms")
