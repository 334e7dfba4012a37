"""Pictures of machines that are not there: estimates, and committed results of benchmarks."""

import functools
import importlib
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from typer.testing import CliRunner

import jzero
from jzero.analysis.limits import usable_bytes
from jzero.analysis.machines import machine
from jzero.cli.commands import app
from pictures.svg import STATES, Canvas, Plot, bars

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
BF16 = jzero.ZeroConfig(stage=3, precision="bf16")
LINES = ("work", "params", "opt", "grads", "gathered", "activations")


@functools.cache
def _llama() -> tuple[Any, Any]:
    """Returns the shapes of a Llama of 7B, and its loss."""
    sys.path.append(str(ROOT / "examples"))
    models = importlib.import_module("decoder_models")
    make_state, loss_fn, _ = models.llama_7b()
    return jax.eval_shape(make_state, jax.random.key(0)), loss_fn


def _batch(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, 4097), jnp.int32)


def draw_fit() -> str:
    """Returns what `fit` tried for 7B on eight H100: a bar for each, beside what a device has."""
    state, loss_fn = _llama()
    found = jzero.fit(
        state, loss_fn, _batch(8), topology="h100:8", config=BF16, confirm=False
    )
    rows = []
    for x in found.tried:
        name = f"stage {x.config.stage}"
        if x.config.stage == 3 and not x.config.reshard_after_forward:
            name += ", kept"
        elif isinstance(x.remat, jzero.Keep):
            name += ", filled"
        states = min(x.memory.states.total, x.memory.peak) / GIB
        parts = {"opt": states, "work": x.memory.peak / GIB - states}
        rows.append(
            (
                name,
                parts,
                f"{x.memory.peak / GIB:.1f}\t{1000 * x.memory.seconds:.0f} ms",
            )
        )
    limit = (found.limit / GIB, f"{found.limit / GIB:.1f} GiB usable")
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
    state, loss_fn = _llama()
    step = jzero.make_train_step(loss_fn)
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
            memory = jzero.estimate_step_memory(
                step, state, _batch(n), topology=f"h100:{n}", config=config
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
        words = f"estimate --params 7B --devices 8 --precision bf16 --json {options}".split()
        sizes = json.loads(CliRunner().invoke(app, words).stdout)["states"]
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
