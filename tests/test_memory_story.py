"""One account of a step's memory: the same states whoever is asked, and a verdict against the card's memory."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import shlex
import sys
import types

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import decoder
import jzero
import jzero.hf
from jzero.analysis.memory_table import MemoryTable
from jzero.cli.account import account
from jzero.cli.commands import app
from jzero.cli.decoder import make_loss, make_state
from jzero.cli.request import PlanRequest
from jzero.cli.sizes import NAMED, TOLERANCE, count, model_sizes, parse_count
from jzero.cli.source import load_source
from jzero.core.plan.planned_bytes import BytesPerDevice
from jzero.core.plan.table import format_bytes
from tests import cli_models, shared
from tests.cli_runs import fit_tries_little  # noqa: F401  # a fixture
from tests.pages import PAGES
from tests.tiers import default_for

ROOT = pathlib.Path(__file__).parents[1]
GIB = 2**30
STATES = BytesPerDevice(3 * GIB, GIB, 8 * GIB)


@pytest.mark.parametrize(
    ("ledger", "fits", "verdict"),
    [
        (
            MemoryTable(STATES, limit=11.5 * GIB),
            None,
            "parameters and optimizer state leave 512.00 MiB for gradients and the step",
        ),
        (MemoryTable(STATES, limit=9 * GIB), False, "does not fit: parameters and optimizer state take 2.00 GiB more"),
        (
            MemoryTable(STATES, 5 * GIB, limit=9 * GIB, lacks="no host has so much"),
            False,
            "does not fit: no host has so much",
        ),
        (MemoryTable(STATES, 18 * GIB, limit=10 * GIB), False, "does not fit: the step takes 8.00 GiB more"),
        (MemoryTable(STATES, 18 * GIB), None, None),
    ],
)
def test_a_ledgers_verdict(ledger, fits, verdict):
    assert ledger.fits == fits
    last = str(ledger).splitlines()[-1]
    assert last.endswith(verdict) if verdict else last.endswith("jzero analyze")


TINY = "--vocab 61 --d-model 36 --layers 2 --heads 6 --kv-heads 2 --d-hidden 56 --persistence-threshold 0"
LAYER = 36 * (36 + 2 * 12 + 36) + 3 * 36 * 56 + 2 * 36
TINY_PARAMS = 2 * 61 * 36 + 2 * LAYER + 36


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Returns a function that runs a command and returns its JSON, or with `text` what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(line, *, text=False):
        result = CliRunner().invoke(app, shlex.split(line) + ([] if text else ["--json"]))
        assert result.exit_code == 0, result.output
        return result.stdout if text else json.loads(result.stdout)

    return call


def run_line(line):
    return CliRunner().invoke(app, shlex.split(line))


def message_of(line):
    result = run_line(line)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return " ".join(result.stderr.split())


@pytest.mark.smoke
@pytest.mark.usefixtures("fit_tries_little")
def test_all_four_agree_on_the_states_to_the_byte(ask, tmp_path):
    """And take parts of rows and of the loss; what compiles or chooses draws it, too."""
    asked = f"--params {TINY_PARAMS} {TINY} --seq 24 --batch 4 --stage 3 --context 2 --loss-chunks 3"
    asked += " --lora-rank 3 --precision bf16 --quantize int8"
    drawn = ("fit.png", "analyze.png") if importlib.util.find_spec("matplotlib") else ()
    fit_plot, analyze_plot = [f"--plot {name}" for name in drawn] or ("", "")
    sizes, leaves = ask(f"estimate {asked} --devices 8"), ask(f"plan {asked} --devices 8")
    chosen = ask(f"fit {asked} --topology h100:8 --no-confirm {fit_plot}")
    compiled = ask(f"analyze {asked} --verify {analyze_plot}")
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    found = [sizes, leaves, chosen, compiled]
    assert len({x["states_bytes"] for x in found}) == 1
    assert len({json.dumps(x["states"]) for x in found}) == 1
    assert len({x["num_params"] for x in found}) == 1
    assert {x["stage"] for x in found} == {3}
    assert chosen["chosen"]["states_bytes"] == sizes["states_bytes"] == leaves["bytes_per_device"]["total"]
    assert (sizes["estimated_peak"], leaves["compiled_peak"], chosen["compiled_peak"]) == (None, None, None)
    assert chosen["estimated_peak"] == chosen["states_bytes"] + chosen["step_bytes"]
    assert compiled["compiled_peak"] == compiled["memory"]["peak"]
    assert (sizes["fits"], chosen["fits"], compiled["fits"]) == (None, True, None)
    assert chosen["chosen"]["mesh"] == {"data": 4, "context": 2}
    assert {row["axis"] for row in compiled["collectives"]} >= {"context", "data+context"}


@pytest.mark.usefixtures("fit_tries_little")
def test_deepspeeds_formula_is_that_of_the_layout(ask, tmp_path):
    """Where its documentation has one, with optimizer state on the host as without."""
    (tmp_path / "whole.py").write_text("from tests.cli_models import factory\n")
    for stage, on_device, on_host in ((1, "4 + 12/N", "4"), (2, "4 + 16/N", "2"), (3, "18/N", "2/N")):
        request = PlanRequest(model="whole:factory", devices=8, stage=stage)
        table = ask(f"estimate --deepspeed whole:factory --stage {stage} --num-gpus-per-node 8")["rows"]
        table = [x for x in table if x["zero_init"] is not False and not x["cpu_offload_params"]]
        rows = {x["cpu_offload"]: x["gpu_bytes"] for x in table}
        for terms, offload in ((on_device, {}), (on_host, {"optimizer": "host"})):
            config = dataclasses.replace(request.config, offload=jzero.Offload(**offload))
            found = account(request, load_source(request), MemoryTable(BytesPerDevice(1, 1, 1)), config=config)
            assert found.deepspeed_bytes == rows[bool(offload)]
            assert f"{format_bytes(rows[bool(offload)])} ({terms} bytes per parameter, " in str(found)
        config = dataclasses.replace(request.config, offload=jzero.Offload(optimizer="host", ratio=0.5))
        found = account(request, load_source(request), MemoryTable(BytesPerDevice(1, 1, 1)), config=config)
        assert "DeepSpeed" not in str(found)
    text = ask(
        "fit whole:factory --topology h100:8 --stage 3 --hbm-bytes 2e6 --persistence-threshold 0 --no-confirm",
        text=True,
    )
    assert "\non host  exact" in text
    assert "(2/N bytes per parameter, and the largest layer whole)" in text


def test_the_guides_figures_of_8b(ask):
    """The last row of its table, and the two figures below it."""
    asked = "estimate --params 8e9 --devices 8 --stage"
    found = [ask(f"{asked} {rest}") for rest in ("3 --precision bf16", "3", "0 --precision bf16")]
    whole = ask("plan --params 8e9 --devices 8 --precision bf16")["bytes_replicated"]["total"]
    layer = ask("estimate --deepspeed --params 8e9 --num-gpus-per-node 8")["largest_layer_params"]
    formula = found[0]["deepspeed_bytes"] - 4 * layer
    ours, fp32, stage_0, whole, formula, layer = (
        f"{x / GIB:.2f}" for x in (*(x["states_bytes"] for x in found), whole, formula, 4 * layer)
    )
    guide = " ".join(PAGES["guides/memory.md"].read_text().split())
    assert f"| 8.03 billion, GiB | {ours} | {fp32} | {formula}, and {layer} for the largest layer |" in guide
    assert f"14 bytes per parameter, {whole} GiB. Training at stage 0 in bf16 takes 16 bytes, {stage_0} GiB" in guide


@pytest.mark.parametrize(
    ("topology", "options", "states"),
    [("h100:8", "", "10.98"), ("8xH100", "--lora-rank 8", "1.60"), ("h100:8", "--lora-rank 8 --quantize int8", "0.83")],
)
def test_estimate_of_7b(ask, topology, options, states):
    text = ask(f"estimate --params 7B --topology {topology} --precision bf16 {options}", text=True)
    first, second, ledger = text.splitlines()[:3]
    assert first.startswith("7B: 32 layers, d_model 4096, 32 heads, d_hidden 11008, vocabulary 32000: 6,7")
    assert first.endswith("100% of the others stored as int8") == ("int8" in options)
    assert second == "8 x h100, bf16, batch 8 x 4096, stage 3"
    assert re.match(rf"states  exact +{states} GiB  parameters", ledger)
    assert "GB" not in text.replace("GiB", "")


def test_known_names_have_the_published_parameters():
    assert {name: count(model_sizes(name, {})) for name in NAMED} == {
        "1B": 1_235_814_400,
        "3B": 3_212_749_824,
        "7B": 6_738_415_616,
        "8B": 8_030_261_248,
        "13B": 13_015_864_320,
        "70B": 70_553_706_496,
        "405B": 405_853_388_800,
    }


def test_other_numbers_come_as_near_as_the_guide_says():
    """Those that the guides name, and others."""
    guides = {path.name: path.read_text() for path in (ROOT / "docs" / "guides").glob("*.md")}
    says = r"From (\w+) parameters on, the\s+model is within (\d+) % of the number, below that within (\d+) %, or"
    start, near, less_near = re.search(says, guides["command_line.md"]).groups()
    assert int(less_near) == 100 * TOLERANCE  # or it is an error
    named = {text for guide in guides.values() for text in re.findall(r"--params ([\w.]+)", guide)}
    assert "2851e6" in named
    numbers = {parse_count(text) for text in named} - {parse_count(text) for text in NAMED}
    numbers |= {round(x) for x in np.geomspace(parse_count(start), 10**12, 5)}
    for number in numbers:
        sizes = model_sizes(str(number), {})
        assert count(sizes) == pytest.approx(number, rel=int(near) / 100)
        assert sizes.d_model == sizes.num_heads * 128


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--params 7B --d-model 1024", r"6,738,415,616 parameters.*1,281,950,720.*`--params 1.282B --d-model 1024`"),
        ("--params 1M", r"1,000,000 parameters.*8,454,528.*`--vocab 1000"),
        ("--params seven", r"such as 7B, 350M or 2851e6: got 'seven'"),
        ("--params 1e30", r"`--params` must be a number of parameters up to 1000T, .*: got '1e30'"),
        ("--params 7B --layers 999999999999", r"`--layers` must be an integer from 1 to 65536: got 999999999999"),
        ("--params 7B --vocab 1000000000", r"`--vocab` must be an integer from 1 to 16777216"),
        ("--params 7B --topology v5e:4x4*999999999999", r"`--topology` must have at most 1,048,576 devices"),
        (f"--params 7B --topology h100:{'9' * 5000}", r"`--topology` must have at most 1,048,576 devices"),
        ("--params 7B --heads 33", r"`--d-model 4096` must be a multiple of `--heads 33`, as 4092 and 4125 are"),
        ("--params 7B --kv-heads 5", r"`--heads 32` must be a multiple of `--kv-heads 5`, as 30 and 35 are"),
        ("--params 7B --heads 4096", r"heads of 1, which must be even"),
        ("--params 7B --devices 8 --batch 12", r"`--batch 12` .* over 8 devices: 8 or 16 sequences can, or 4 devices"),
        ("--params 7B --devices 8 --batch 3", r"8 sequences can, or 1 device; `--context 8`"),
        ("--params 7B --quantize int8", r"pass `--lora-rank`, too"),
        ("--params 7B --model somewhere", r"got --model and --params"),
        ("--model nowhere", r"no nowhere/config\.json"),
        ("--params 7B --topology h100:8 --devices 8", r"pass only one of them"),
        ("--params 7B --topology 9xH100", r"'9xH100'"),
    ],
)
def test_wrong_input_gets_both_figures_and_what_would_do(line, says):
    assert re.search(says, message_of(f"estimate {line}")), message_of(f"estimate {line}")


COUNTS = json.loads((pathlib.Path(__file__).parent / "data" / "parameter_counts.json").read_text())


@pytest.mark.parametrize("family", default_for(("qwen3", "gemma3_text", "mixtral", "gpt_oss"), COUNTS))
def test_what_is_reckoned_with_has_the_leaves_of_the_decoder_that_trains(tmp_path, family):
    """And their base the parameters that `transformers` counts."""
    (tmp_path / "config.json").write_text(json.dumps(COUNTS[family]["config"]))
    sizes = jzero.hf.read_config(tmp_path)
    trains = decoder.Decoder(sizes, decoder.Lora(rank=2, alpha=4))
    wanted = jax.eval_shape(trains.init, jax.random.key(0), np.zeros((1, 3), np.int32))["params"]
    found = jax.eval_shape(make_state(sizes, rank=2, base_dtype="float32"), jax.random.key(0)).params
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, wanted)
    assert count(sizes) == COUNTS[family]["parameters"]
    tokens = jax.ShapeDtypeStruct((2, 5), np.int32)
    assert jax.eval_shape(make_loss(sizes), found, tokens).shape == ()
    leaves = jax.tree_util.tree_leaves_with_path(found)
    assert sum(x.size for path, x in leaves if "lora" not in path[-1].key) == count(sizes)


def test_a_folder_says_its_sizes_itself(ask, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(COUNTS["qwen2"]["config"]))
    assert "does not take `--layers`" in message_of("estimate --model . --layers 3 --devices 2")
    # What `load_params` cannot compute, but has the same sizes.
    other = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "hidden_act": "relu", "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(COUNTS["qwen2"]["config"] | other))
    found = ask("plan --model . --devices 3")
    assert (found["num_params"], found["sizes"]["model_type"]) == (COUNTS["qwen2"]["parameters"], "qwen2")


@pytest.mark.slow
@pytest.mark.usefixtures("fit_tries_little")
def test_a_users_model_says_what_it_trains(ask, tmp_path):
    (tmp_path / "part.py").write_text(
        "from tests.cli_models import *\ndef model():\n    return *factory(), 'up'\ndef all():\n    return factory()\n"
    )
    some, every = ask("estimate part:model --devices 8"), ask("plan part:all --devices 8")
    half = cli_models.PARAMS // 2
    assert every["states"]["grads"] == 4 * 2 * half // 8
    assert some["states"]["grads"] == 4 * half // 8
    assert ask("fit part:model --topology h100:8 --stage 3 --no-confirm")["states"] == some["states"]
    assert ask("analyze part:model --verify")["states"] == some["states"]
    assert "does not take `--batch`, `--lora-rank`" in message_of("plan part:model --batch 8 --lora-rank 2")


def test_the_version(ask):
    assert ask("--version", text=True) == f"jzero {jzero.__version__}\n"


@pytest.mark.usefixtures("fit_tries_little")
def test_the_verdict_is_one_for_all_and_an_exit_status():
    """Whole gradients of stage 1 would not fit beside the states, and need not exist at once."""
    asked = "--params 15B --topology h100:8 --precision bf16 --stage 1"
    sizes, chosen = run_line(f"estimate {asked}"), run_line(f"fit {asked} --no-confirm")
    assert (sizes.exit_code, chosen.exit_code) == (0, 0)
    assert "leave 22.59 GiB for gradients and the step" in sizes.stdout
    (left,) = re.findall(r"fits: ([\d.]+) GiB left", chosen.stdout)
    assert 0 < float(left) < 22.59
    for line in ("estimate --stage 1", "plan --stage 3", "fit --stage 3 --host-bytes 1e9 --no-confirm"):
        result = run_line(f"{line} --params 405B --topology h100:8 --precision bf16")
        assert result.exit_code == 3, line
        assert "71.19 GiB  does not fit: " in result.stdout


def test_a_name_of_the_hub_is_asked_for_where_there_is_one(ask, tmp_path, monkeypatch):
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached/config.json").write_text(json.dumps(COUNTS["qwen2"]["config"]))
    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = lambda name, file, **_: {"Qwen/Qwen2-0.5B": f"{tmp_path}/cached/{file}"}[name]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert ask("estimate --model Qwen/Qwen2-0.5B --devices 2")["num_params"] == COUNTS["qwen2"]["parameters"]
    hub.hf_hub_download = shared.raising(OSError("no network"))
    assert "no Qwen/Qwen2-0.5B/config.json" in message_of("estimate --model Qwen/Qwen2-0.5B --devices 2")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "no Qwen/Qwen2-0.5B/config.json" in message_of("estimate --model Qwen/Qwen2-0.5B --devices 2")


def test_a_wrong_machine_is_said_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text("raise RuntimeError('loaded')\n")
    for command in ("estimate", "plan", "fit", "analyze"):
        assert "may mean 'v5p:2x2x4'" in message_of(f"{command} fails:model --topology v5p-32")


def test_a_plot_is_refused_at_once():
    pytest.importorskip("matplotlib")
    assert "`--plot` must name a .png, .svg or .pdf file" in message_of("fit nowhere:model --plot it.txt")
