"""`python -m benchmarks.gpu` at its least size, on CPU devices, and what it does when parts of it fail."""

import argparse
import copy
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
from benchmarks.gpu import __main__ as pack
from benchmarks.gpu.job import add_line, figures_of
from benchmarks.gpu.report import report
from benchmarks.offload import least_traffic
from benchmarks.turns import Training, in_turns, ratio

ROOT = pathlib.Path(__file__).parents[1]
STEPS = "steps/gpt_small/8"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The figures and the report of a small run."""
    out = tmp_path_factory.mktemp("gpu") / "report.md"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--minutes", "9", "--out", str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return figures_of(out.with_suffix(".jsonl")), out.read_text()


def numbers_in(x):
    if isinstance(x, dict):
        for value in x.values():
            yield from numbers_in(value)
    elif isinstance(x, int | float) and not isinstance(x, bool):
        yield x


def test_each_part_measures_something(small):
    found, text = small
    assert list(found) == ["run", "machine", "rates", STEPS, "offload"]
    assert all(math.isfinite(x) for x in numbers_in(found))
    checks = [x["status"] for name, x in found["machine"].items() if name.startswith("check: ")]
    assert checks == ["ok"] * 7
    rates = {"bf16", "tf32", "f32", "memory", "all-gather", "reduce-scatter"}
    assert {name for name, x in found["rates"].items() if x.get("per_second", 0) > 0} == rates
    for name in ("plain 0", "strong 3", "jzero 0", "jzero 3"):
        x = found[STEPS][name]
        assert min(x[key] for key in ("step", "peak", "sent", "modelled_at_rates", "compile_seconds")) > 0
        assert x["low"] <= x["step"] <= x["high"]
    assert all(found[STEPS][f"jzero {stage}"]["reckoned"] > 0 for stage in (0, 3))
    assert found[STEPS]["jzero 3"]["of_strong"] > 0
    for name in ("optimizer", "parameters, too"):
        x = found["offload"][name]
        assert min(x[key] for key in ("step", "none", "of_none", "host", "there", "back", "raw", "peak")) > 0
    assert min(found["offload"]["raw copy"].values()) > 0
    executables = [x for part in found.values() for x in part.values() if "peak" in x and x["violations"] is not None]
    assert [x["violations"] for x in executables] == [[]] * 4
    assert "## Failed or skipped\n\nNothing.\n" in text


def test_all_engines_train_alike(small):
    programs = small[0][STEPS]
    plain = programs["plain 0"]
    for name in ("strong 3", "jzero 0", "jzero 3"):
        assert programs[name]["steps"] == plain["steps"]
        assert programs[name]["loss"] == pytest.approx(plain["loss"], rel=1e-3)


def test_report_shows_what_was_measured(small):
    found, text = small
    row = next(line for line in text.splitlines() if line.startswith("| jzero, stage 3 |"))
    cells = [cell.strip() for cell in row.split("|")]
    x = found[STEPS]["jzero 3"]
    assert float(cells[2]) == pytest.approx(1e3 * x["step"], rel=0.01)
    peak = x["peak"] / found[STEPS]["strong 3"]["peak"]
    assert f"jzero, stage 3 {x['of_strong']:.2f} of its step at {peak:.2f} of its peak" in text
    for part in ("In short", "Machine", "Rates", "gpt_small on 8 devices", "Offload", "How to read this"):
        assert f"## {part}" in text


def test_report_is_written_whatever_is_missing(small):
    found, _ = small
    for part, programs in found.items():
        for name, figures in programs.items():
            for key in (None, *figures):
                less = copy.deepcopy(found)
                if key is None:
                    del less[part][name]
                else:
                    del less[part][name][key]
                assert report(less).startswith("# jzero on")
        assert report({name: x for name, x in found.items() if name != part}).startswith("# jzero on")


def options(**values):
    return argparse.Namespace(**{"small": True, "models": [], "only": [], "minutes": 5, "default_out": False, **values})


def test_a_part_that_fails_is_recorded(tmp_path):
    lines = tmp_path / "lines.jsonl"
    pack.run_part("steps/no_such_model/8", 120, lines, str(tmp_path), options())
    ended = figures_of(lines)["steps/no_such_model/8"][""]
    assert ended["failed"] == "ended with 1"
    assert "There is no model 'no_such_model': choose of gpt_scanned" in ended["log"]


def test_a_part_ends_with_its_time(tmp_path):
    lines = tmp_path / "lines.jsonl"
    pack.run_part("machine", 0.2, lines, str(tmp_path), options())
    ended = figures_of(lines)["machine"][""]
    assert ended["failed"].startswith("ended after 0 s")
    assert ended["seconds"] < 30


def run_with(parts, tmp_path, monkeypatch, **values):
    """Runs parts that do nothing but add these lines; returns the report."""

    def run_part(part, seconds, lines, cache, options):
        for program, figures in parts[part].items():
            add_line(lines, part, program, figures)

    monkeypatch.setattr(pack, "run_part", run_part)
    out = tmp_path / "report.md"
    pack.run_parts(options(**values), out, out.with_suffix(".jsonl"), "")
    return out.read_text()


MACHINE = {"facts": {"platform": "gpu", "kind": "cpu", "count": 8}, "parts": {"names": ["rates", "offload"]}}


def test_the_other_parts_go_on(tmp_path, monkeypatch):
    rates = {"": {"failed": "ended with 1", "log": "out of memory"}}
    offload = {"optimizer": {"step": 0.25, "none": 0.125, "of_none": 2.0, "raw": 0.1}}
    text = run_with({"machine": MACHINE, "rates": rates, "offload": offload}, tmp_path, monkeypatch)
    assert "**rates failed**: ended with 1" in text
    assert "out of memory" in text
    assert "Offload, optimizer: 2.00 of the step without; it uses the link for at least 0.40 of the step." in text


def test_only_runs_what_was_asked_for(tmp_path, monkeypatch):
    offload = {"optimizer": {"step": 0.25, "none": 0.125}}
    text = run_with({"machine": MACHINE, "offload": offload}, tmp_path, monkeypatch, only=["off"])
    assert "| optimizer | 250 | 125 |" in text


def test_no_report_of_a_cpu_by_accident(tmp_path, monkeypatch):
    machine = {**MACHINE, "facts": {"platform": "cpu", "kind": "cpu", "count": 8}}
    with pytest.raises(SystemExit, match="No GPU here, but 8 x cpu: give --out FILE"):
        run_with({"machine": machine}, tmp_path, monkeypatch, default_out=True)


def test_runs_take_turns():
    order = []
    times = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2, before=lambda: order.append("-"))
    assert order == ["-", "a", "-", "b"] * 2
    assert [len(x) for x in times.values()] == [2, 2]
    assert ratio([1.0, 2.0, 9.0], [2.0, 4.0, 3.0]) == 0.5


def test_training_goes_on_from_its_state():
    training = Training(lambda state, batch: (state + batch, {"loss": state}), 1, 2, steps=3)
    training()
    training()
    assert (training.state, training.count, training.metrics) == (13, 6, {"loss": 11})


def test_offload_moves_at_least_the_arrays_on_the_host():
    params = {"w": jnp.ones((512, 512)), "v": jnp.ones((512,))}
    plain = jzero.TrainState.create(params=params, tx=optax.adamw(1e-3))
    offload = jzero.Offload(optimizer="host", params="host")
    config = jzero.ZeroConfig(stage=3, precision="bf16", persistence_threshold=0, offload=offload)
    state = jzero.shard_train_state(plain, config=config)

    def on_host(tree):
        arrays = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == "pinned_host"]
        return sum(x.addressable_shards[0].data.nbytes for x in arrays)

    weights, rest = on_host(state.params), on_host(state.opt_state)
    assert weights == 512 * 512 * 2 / 8
    assert least_traffic(jzero.plan_of(state)) == (rest + 2 * weights, rest + weights)
