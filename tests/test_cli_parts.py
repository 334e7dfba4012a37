"""Parts of rows, of the loss and of experts on the command line: as in the examples, named where they would help."""

import argparse
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

import balance
import decoder
import jzero
import training
from jzero.cli import decoder as reckoned
from jzero.cli.commands import app
from jzero.cli.request import PlanRequest
from jzero.cli.sizes import model_sizes
from jzero.cli.source import load_source
from jzero.core.state.init import state_shapes
from tests import models, shared
from tests.cli_runs import fit_tries_little  # noqa: F401  # a fixture
from tests.tiers import default_for, slow

SIZES = {"vocab_size": 61, "d_model": 36, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "d_hidden": 56}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
    "router_aux_loss_coef": 0.02,
}


def call(line, *, status=0):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == status, result.output
    return result.stdout if status != 2 else " ".join(result.stderr.split())


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_the_loss_in_parts_of_rows_is_that_of_whole_rows(stage, monkeypatch):
    sizes = model_sizes("23.58K", SIZES)
    shapes = jax.eval_shape(reckoned.make_state(sizes, rank=0, base_dtype=jnp.float32), jax.random.key(0)).params
    params = models.draw_like(shapes)
    state = jzero.TrainState.create(params=params, tx=shared.sgd(1.0))
    tokens = np.random.default_rng(1).integers(0, 61, (4, 31)).astype(np.int32)
    want = jax.jit(reckoned.make_loss(sizes))(params, tokens)
    monkeypatch.setattr(reckoned, "MOST_SCORES", 700)
    config = jzero.ZeroConfig(stage=stage, context_axis="context", persistence_threshold=0)
    mesh = jzero.make_mesh(devices=jax.devices()[:6], data=2, context=3)
    evaluate = jzero.make_eval_step(reckoned.make_loss(sizes, context="context", loss_chunks=5))
    found = evaluate(jzero.shard_train_state(state, config=config, mesh=mesh), tokens)
    np.testing.assert_allclose(found, want, rtol=2e-6)


EXAMPLES = [
    {"params": "8B", "topology": "h200:64", "seq": 131_072, "batch": 8, "context": 8, "loss_chunks": 16},
    {"folder": "mixtral", "topology": "h200:16", "batch": 16, "experts": 4},
    {"params": "7B", "topology": "h100:8", "batch": 8},
    {"folder": "mixtral", "topology": "h200:16", "batch": 16},
]


@pytest.mark.parametrize("asked", default_for(EXAMPLES[:2], EXAMPLES))
def test_a_step_is_reckoned_to_take_what_the_examples_step_takes(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtral").mkdir()
    (tmp_path / "mixtral/config.json").write_text(json.dumps(MIXTRAL))
    request = PlanRequest(**asked, precision="bf16")
    source, (rows, seq) = load_source(request), request.sequences()
    make_step = functools.partial(jzero.make_train_step, remat="as_written")
    estimate = functools.partial(jzero.estimate_step_memory, topology=request.topology, mesh=request.mesh)
    ours = estimate(make_step(source.model.loss_fn), source.model.state, source.model.batch, config=request.config)

    options = {name: getattr(request, name) for name in ("context", "loss_chunks", "experts")}
    sizes = {"seq": seq, "attention": "plain"}  # which the commands reckon with
    args = argparse.Namespace(**options, **sizes, precision="bf16", persistence_threshold=100_000)
    model = decoder.Decoder(source.sizes)

    def make_state(key):
        params = training.set_apart(model.init(key, jnp.zeros((1, 1), jnp.int32))["params"], request.mesh)
        return jzero.TrainState.create(params=params, tx=optax.adamw(3e-4))

    parts = training.of_parts(model, args, request.mesh)
    loss_fn = (training.next_token_loss if source.sizes.experts is None else balance.balanced_loss)(parts)
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }
    state = state_shapes(make_state, request.mesh)
    theirs = estimate(make_step(loss_fn), state, batch, config=training.zero_config(args))
    assert ours.states.total == pytest.approx(theirs.states.total, rel=1e-5)  # norms are in fp32 there
    assert ours.peak == pytest.approx(theirs.peak, rel=0.01)
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.03)
    assert ours.sent_by_axes == pytest.approx(theirs.sent_by_axes, rel=0.01)
    assert ours.sent_by_axes.keys() >= {name for name in ("context", "experts") if options[name] > 1}


@pytest.mark.parametrize("command", ["plan", slow("analyze --verify")])
def test_experts_are_cut_over_their_axis(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    tiny |= {"intermediate_size": 56, "vocab_size": 61, "num_local_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | tiny))
    line = f"{command} --model . --seq 12 --batch 8 --experts 2 --persistence-threshold 0"
    assert ("dim 1 over experts" in call(line)) == (command == "plan")
    states = [
        json.loads(call(f"{command} --model . --seq 12 --batch 8 --json {x}"))["states"] for x in ("", "--experts 2")
    ]
    assert states[0]["params"] != states[1]["params"], "all else is cut over fewer devices"
    assert "`--experts 4` must divide the experts of the model: it has 6" in call(line.replace("s 2", "s 4"), status=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--devices 64 --batch 8", r"or 8 devices; `--context 8` shares them between devices"),
        ("--devices 8 --context 3", r"`--context 3` needs a multiple of 3 devices: got 8; 6 would do"),
        ("--devices 8 --context 2 --batch 6", r"over 4 groups of 2 devices: 4 or 8 sequences can, or 2 groups of 2"),
        (
            "--devices 8 --context 2 --loss-chunks 3",
            r"`--seq 4096` must be a multiple of 6, for `--loss-chunks`: 4092 is",
        ),
        ("--devices 8 --context 4 --seq 4100", r"`--seq 4100` must be a multiple of 8, for `--context`: 4096 is"),
        ("--devices 8 --experts 2", r"`--experts 2` must divide the experts of the model: it has 0"),
    ],
)
def test_what_cannot_be_divided_gets_what_would_do(options, says):
    assert re.search(says, call(f"estimate --params 7B {options}", status=2))


def test_a_users_model_says_its_parts_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.py").write_text("from tests.cli_models import factory\n")
    said = call("plan whole:factory --context 2 --loss-chunks 4", status=2)
    assert "does not take `--context`, `--loss-chunks`" in said


@pytest.mark.usefixtures("fit_tries_little")
def test_fit_names_the_parts_with_which_a_long_context_fits():
    text = call("fit --params 1B --topology h100:8 --seq 262144 --stage 3 --precision bf16 --no-confirm", status=3)
    assert text.count("does not fit: the step takes") == 1
    tried = re.findall(r"^`--context (\d+) --loss-chunks (\d+)` (fits|does not fit): .* takes (\S+) GiB", text, re.M)
    assert [(int(context), int(chunks) * int(context)) for context, chunks, *_ in tried] == [
        (2**i, 256) for i in range(len(tried))
    ]
    *_, (context, chunks, verdict, takes) = tried
    assert verdict == "fits"
    parts = f"--context {context} --loss-chunks {chunks}"
    again = call(f"fit --params 1B --topology h100:8 --seq 262144 --stage 3 --precision bf16 --no-confirm {parts}")
    assert "fits: " in again
    (found,) = re.findall(r"^3 .* data=\d+,context=\d+ +\d+ +\d+,\d+ +\S+ GiB +(\S+) GiB", again, re.M)[:1] or [takes]
    assert float(found) <= 71.19
