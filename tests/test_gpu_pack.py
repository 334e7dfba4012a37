"""`python -m benchmarks.gpu` at its least size, on CPU devices (slow), and what it does when parts of it fail."""

import math

import pytest

from benchmarks.gpu.job import figures_of
from tests.example_runs import run_python

STEPS = "steps/gpt_small/8/3"


def numbers_in(x):
    if isinstance(x, dict):
        for value in x.values():
            yield from numbers_in(value)
    elif isinstance(x, int | float) and not isinstance(x, bool):
        yield x


@pytest.mark.slow
def test_each_part_of_a_small_run_measures_something_and_all_engines_train_alike(tmp_path):
    out = tmp_path / "report.md"
    run_python("-m", "benchmarks.gpu", "--small", "--minutes", "9", "--out", str(out), timeout=900)
    found, text = figures_of(out.with_suffix(".jsonl")), out.read_text()
    assert list(found) == ["run", "machine", "rates", STEPS, "offload"]
    assert all(math.isfinite(x) for x in numbers_in(found))
    checks = [x["status"] for name, x in found["machine"].items() if name.startswith("check: ")]
    assert checks == ["ok"] * 7
    rates = {"bf16", "tf32", "f32", "memory", "all-gather", "reduce-scatter"}
    assert {name for name, x in found["rates"].items() if x.get("per_second", 0) > 0} == rates
    for name in ("plain 0", "strong 3", "jzero 3"):
        x = found[STEPS][name]
        assert min(x[key] for key in ("step", "peak", "sent", "modelled_at_rates", "compile_seconds")) > 0
        assert x["low"] <= x["step"] <= x["high"]
    assert min(found[STEPS]["jzero 3"][key] for key in ("reckoned", "of_strong", "of_plain")) > 0
    for name in ("optimizer", "parameters, too"):
        x = found["offload"][name]
        assert min(x[key] for key in ("step", "none", "of_none", "host", "there", "back", "raw", "peak")) > 0
    assert min(found["offload"]["raw copy"].values()) > 0
    executables = [x for part in found.values() for x in part.values() if "peak" in x and x["violations"] is not None]
    assert [x["violations"] for x in executables] == [[]] * 3
    assert "## Failed or skipped\n\nNothing.\n" in text
    plain = found[STEPS]["plain 0"]
    for name in ("strong 3", "jzero 3"):
        assert found[STEPS][name]["steps"] == plain["steps"]
        assert found[STEPS][name]["loss"] == pytest.approx(plain["loss"], rel=1e-3)
