"""The training example runs as a user runs it: as a script, in a process of its own."""

import functools
import json
import pathlib
import re
import shutil

import pytest

from tests.example_runs import run_example, run_here
from tests.tiers import slow

TINY = (
    "--d-model=16 --layers=2 --heads=2 --seq-len=16 --batch-size=16 --steps=20 --lr=1e-2"
    " --eval-batches=1 --persistence-threshold=100"
).split()


def validation_losses(output: str) -> tuple[float, float]:
    """Returns the trained and the untrained loss from the last line."""
    last_line = output.strip().splitlines()[-1]
    match = re.fullmatch(r"validation loss (\d+\.\d{3}) nats per byte \(untrained (\d+\.\d{3})\)", last_line)
    assert match, output
    return float(match[1]), float(match[2])


def device_bytes(output: str) -> dict[str, list[int]]:
    """Returns params, grads, optimizer and total of each row of the table."""
    rows = re.findall(r"│ (replicated|stage \d) +│ +([\d,]+) │ +([\d,]+) │ +([\d,]+) │ +([\d,]+) │", output)
    return {label: [int(value.replace(",", "")) for value in values] for label, *values in rows}


def logged_steps(path: pathlib.Path) -> list[int | str]:
    """Returns the step of each line, or that it is an evaluation."""
    lines = map(json.loads, path.read_text().splitlines())
    return [line["step"] if "loss" in line else "validation" for line in lines]


@pytest.mark.parametrize(("framework", "layers", "steps"), [("nnx", "--no-scan", 4), slow("linen", "--scan", 20)])
def test_example_learns_and_shows_what_zero_saves(framework, layers, steps, tmp_path, monkeypatch, capsys):
    saving = (f"--checkpoints={tmp_path / 'checkpoints'}", f"--save-every={steps // 2}")
    log = tmp_path / "log.jsonl"
    options = (
        f"--framework={framework}",
        layers,
        f"--log={log}",
        *saving,
        *TINY,
        f"--steps={steps}",
        f"--layers={min(2, steps // 4)}",
    )
    run = functools.partial(run_here, "train_gpt.py", f"--out={tmp_path}", monkeypatch=monkeypatch, capsys=capsys)
    output = run(*options)

    trained, untrained = validation_losses(output)
    assert untrained == pytest.approx(5.545, abs=0.2)  # ln 256: every byte is as likely
    assert trained < untrained - (0.3 if steps == 20 else 0.1)
    assert output.startswith("creating the state at stage 3\nZeRO stage 3"), "the plan comes first"
    assert_memory_falls_with_the_stage(device_bytes(output))
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert f"step {steps}/{steps}  loss " in output, "progress"
    assert logged_steps(log) == [*range(1, steps + 1), "validation"]
    if framework == "linen":
        shutil.rmtree(tmp_path / "checkpoints" / "20")  # as if it had been stopped after step 10
        again = run(*options, "--stage=1")
        assert "resuming from step 10" in again
        assert validation_losses(again)[0] == pytest.approx(trained, abs=0.0015), "as if it had not"
        assert logged_steps(log)[21:] == [*range(11, 21), "validation"]


@pytest.mark.slow
def test_example_with_the_optimizer_state_on_the_host(tmp_path):
    seen = (f"--tensorboard={tmp_path / 'run'}", f"--profile={tmp_path / 'run'}")
    output = run_example("train_gpt.py", *TINY, "--precision=bf16", "--offload", *seen, f"--out={tmp_path}")
    assert len(list((tmp_path / "run").glob("events.*"))) == len(list((tmp_path / "run").rglob("*.xplane.pb"))) == 1
    trained, untrained = validation_losses(output)
    assert trained < untrained - 0.3
    rows = device_bytes(output)
    for stage in range(4):
        assert rows[f"stage {stage}"][2] < 100, "of the optimizer state the number of steps is left"
    replicated, stage_3 = rows["replicated"], rows["stage 3"]
    assert stage_3[0] < 0.6 * replicated[0] / 4, "16 bits, cut"
    assert re.search(r"stage 3.*│ +[\d,]{5,} │\n", output), "the rest is on the host"


def assert_memory_falls_with_the_stage(rows: dict[str, list[int]]) -> None:
    assert list(rows) == ["replicated", "stage 0", "stage 1", "stage 2", "stage 3"]
    params, grads, opt_state, _ = zip(*rows.values(), strict=True)
    assert params[0] == params[1] == params[2] == params[3] > 4 * params[4]
    assert grads[0] == grads[1] == grads[2] > 4 * grads[3] >= 4 * grads[4]
    assert opt_state[0] == opt_state[1] > 4 * opt_state[2]
    assert opt_state[2] == opt_state[3] == opt_state[4]


@pytest.mark.slow
def test_the_first_command_of_the_readme_learns(tmp_path):
    """With its defaults, but fewer steps."""
    trained, _ = validation_losses(run_example("train_gpt.py", "--steps=20", f"--out={tmp_path}"))
    assert trained < 4
