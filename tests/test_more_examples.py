"""The examples of one file: each learns something real, and shows what ZeRO partitions."""

import difflib
import re

import numpy as np
import pytest

from tests.example_runs import EXAMPLES, ROOT, run_example, run_here


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
