"""The examples run as scripts, in this process or one of their own: they learn, and show what ZeRO saves."""

import difflib
import functools
import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from tests.example_runs import EXAMPLES, ROOT, run_example, run_here
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


# The examples of one file: each learns something real, and shows what ZeRO partitions.


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example in this process."""
    return lambda script, *args: run_here(script, *args, monkeypatch=monkeypatch, capsys=capsys)


def numbers(pattern: str, output: str) -> list[float]:
    """Returns the groups of the only line that a pattern matches."""
    (found,) = re.findall(rf"^{pattern}$", output, re.MULTILINE)
    return [float(x.replace(",", "")) for x in found]


TINY_GPT = "--d-model=32 --layers=1 --heads=2 --seq-len=16 --batch-size=16 --rank=3".split()
LOOPS = ("make_train_step", "jax.grad")
BYTES = r"state on each device: ([\d,]+) bytes \(([\d,]+) without ZeRO.*\)"


@pytest.mark.slow
def test_digits_are_told_apart():
    tiny = ("--width=8", "--epochs=4", "--lr=1e-2")
    output = run_example("digits_batchnorm.py", *tiny)
    _, accuracy = numbers(r"epoch 4: loss (.*), test accuracy (.*)", output)
    assert 0.93 < accuracy < 1
    held, whole = numbers(BYTES, output)
    # Of the two convolutions (8 and 16 channels), the two normalizations with two parameters each and two dense layers:
    trained = 9 * 8 + 9 * 8 * 16 + 2 * (8 + 16) + (64 * 32 + 32) + (32 * 10 + 10)
    assert whole == 4 * (3 * trained + 2 * (8 + 16) + 2)  # parameters, two moments; running statistics, two counters
    assert held < whole / 5


@pytest.mark.slow
def test_lora_trains_adapters_alone(run, tmp_path):
    steps = "--pretrain-steps=20 --pretrain-lr=1e-2 --steps=20 --lr=2e-2".split()
    output = run("lora.py", *TINY_GPT, *steps, f"--merged={tmp_path / 'tuned.safetensors'}")

    untrained, pretrained = numbers(r"pretrained: validation loss (.*) -> (.*)", output)
    assert untrained == pytest.approx(np.log(256), abs=0.2)
    assert pretrained < untrained - 1
    before, after, merged = numbers(r"fine-tuned: validation loss (.*) -> (.*), merged (.*)", output)
    assert after < before - 0.1
    assert merged == pytest.approx(after, abs=2e-4)
    assert len(re.findall(r"^frozen/.*none: not trained$", output, re.MULTILINE)) > 10
    assert re.search(r"^frozen/blocks/0/mlp_in/kernel .* cut on dim . +none: not trained$", output, re.MULTILINE)

    model, whole, optimizer = numbers(r"on each device: model (.*) bytes \((.*) whole\), optimizer (.*) bytes", output)
    adapters = 3 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)  # the rank, and both sides of the four layers
    assert optimizer == pytest.approx(4 * 2 * adapters / 8, rel=0.1), "two moments of the adapters alone, cut"
    assert model < whole / 3


@pytest.mark.slow
def test_plain_jax_learns_in_both_loops(run):
    tiny = "--width=64 --layers=2 --context=8 --batch-size=64 --steps=10 --lr=2e-2 --precision=fp32".split()
    output = run("plain_jax.py", *tiny)
    found = {name: numbers(rf"{name}: loss (.*) nats per byte \(at first (.*)\)", output) for name in LOOPS}
    assert found["make_train_step"] == pytest.approx(found["jax.grad"], abs=2e-3)
    trained, untrained = found["jax.grad"]
    assert untrained == pytest.approx(np.log(256), abs=0.3)
    assert trained < untrained - 1
    held, whole = numbers(BYTES, output)
    params = 256 * 32 + 8 * 32 * 64 + 2 * 64 * 64 + 64 * 256
    assert whole == 4 * (3 * params + 2)
    assert held == 4 * (3 * params / 8 + 2), "everything is cut but two counters"
    assert re.search(r"^layers .* cut on dim 1 +float32 cut on dim 1 +dim 0$", output, re.MULTILINE)


@pytest.mark.slow
def test_drop_in_is_five_lines_and_changes_no_result(run):
    before, after = ((EXAMPLES / "drop_in" / name).read_text() for name in ("before.py", "after.py"))
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    changed = [line for line in diff if line[:1] in "+-" and line[1:].strip()]
    assert len(changed) == 5, changed
    assert sum("jzero" in line for line in changed) == 4
    assert "jzero" not in before.lower()

    tiny = "--width=64 --steps=20 --batch-size=32".split()
    outputs = [run(f"drop_in/{name}", *tiny) for name in ("before.py", "after.py")]
    losses = [re.findall(r"^step (\d+): loss (\d\.\d{6})$", output, re.MULTILINE) for output in outputs]
    assert [int(step) for step, _ in losses[0]] == [10, 20]
    ordinary, zero = ([float(loss) for _, loss in found] for found in losses)
    assert zero == pytest.approx(ordinary, rel=1e-5)
    assert ordinary[-1] < ordinary[0]
    assert "ZeRO stage 3" in outputs[1]


def test_a_batch_that_does_not_fit_is_refused(run):
    with pytest.raises(SystemExit, match=r"--batch-size .* 8 .*got 60"):
        run("plain_jax.py", "--batch-size=60")


def test_every_example_is_listed_and_has_help(run, capsys):
    text = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"python (examples/[\w/]+\.py)", text)
    scripts = [p for p in EXAMPLES.rglob("*.py") if "\nparser" in p.read_text() or "def parse_args" in p.read_text()]
    assert {ROOT / path for path in listed} == set(scripts)
    for path in re.findall(r"`((?:examples/)?[\w/]+\.(?:py|sh|yaml|md))`", text):
        assert (EXAMPLES / path).exists() or (ROOT / path).exists(), path
    for path in scripts:
        with pytest.raises(SystemExit) as ended:
            run(str(path.relative_to(EXAMPLES)), "--help")
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out
