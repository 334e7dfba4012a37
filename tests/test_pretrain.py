"""`examples/llm/pretrain.py`: rows of files of tokens, the operations of a model, the share of a peak."""

import json
import sys
from typing import Any

import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh

import decoder
import jzero
import jzero.hf
import pretrain
from jzero.machines.machine import machine
from tests import hf_models


@pytest.fixture
def folder(tmp_path):
    """A folder with sizes of a model and two files of tokens, each 7 more than the last."""
    (tmp_path / "config.json").write_text(json.dumps(hf_models.fields("mistral", head_dim=6)))
    for name, size in (("a", 900), ("b", 700)):
        (np.arange(size) * 7 % 61).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    return tmp_path


class Pairs(nn.Module):
    """What follows each token, in place of a decoder: `finetune.py`, whose test trains one, has the same loop."""

    config: jzero.hf.ModelConfig
    product: str
    context: str | None = None
    loss_chunks: int = 1
    mesh: Mesh | None = None
    attention: Any = None

    @nn.compact
    def __call__(self, tokens, positions=None, targets=None):
        size = self.config.vocab_size
        logits = nn.Dense(size)(nn.Embed(size, 16, name="embed")(tokens))
        return None if targets is None else optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def run(folder, monkeypatch, *more):
    monkeypatch.setattr(pretrain, "Decoder", Pairs)
    options = f"--config={folder} --seq=16 --batch=8 --steps=12 --lr=2e-1 --precision=fp32 --eval-every=12"
    files = f"--data {folder}/b.bin {folder}/a.bin --held-out {folder}/a.bin"
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *options.split(), *files.split(), *more])
    pretrain.main()


@pytest.mark.slow
def test_the_loss_falls_and_is_logged(folder, monkeypatch, capsys):
    """`evaluate` is that of `finetune.py`, whose test runs it."""
    read = []
    evaluate = lambda state, loader: read.append((int(state.step), loader.batches_per_epoch)) or 1.5
    monkeypatch.setattr(pretrain, "make_evaluate", lambda model: evaluate)
    run(folder, monkeypatch, "--context=2", f"--log={folder}/log.csv", f"--checkpoints={folder}/run")
    rows = (folder / "log.csv").read_text().splitlines()
    losses = np.genfromtxt(rows, delimiter=",", names=True)["loss"]
    assert len(rows) == 1 + 12 + 1, "a row of names, of each step, of the evaluation"
    assert losses[11] < losses[0] - 1
    assert float(rows[-1].split(",")[rows[0].split(",").index("held_out")]) == 1.5
    assert read == [(12, 7)]
    assert "no published peak for 'cpu' devices" in capsys.readouterr().out
    assert (folder / "run" / "12").is_dir(), "the last step, whatever the interval"


def test_rows_are_all_tokens_in_order(folder):
    file = pretrain.TokenFile(folder / "a.bin", dtype="uint16", seq=16, vocab_size=61)
    assert len(file) == 899 // 16
    inputs = np.concatenate([file[row]["tokens"][:-1] for row in range(len(file))])
    targets = np.concatenate([file[row]["tokens"][1:] for row in range(len(file))])
    np.testing.assert_array_equal(inputs, np.arange(896) * 7 % 61)
    np.testing.assert_array_equal(targets, np.arange(1, 897) * 7 % 61)
    assert inputs.dtype == np.int32


def test_tokens_of_another_width_are_refused(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"a token \d+, .*--token-dtype"):
        run(folder, monkeypatch, "--token-dtype=uint32")


def test_of_experts_those_count_that_a_token_goes_to(tmp_path):
    """Mixtral's three kernels for 2 of 5 experts, beside the router."""
    sizes = hf_models.fields("mixtral", num_hidden_layers=1, sliding_window=None)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    kernels = 2 * 36 * 36 + 2 * 36 * 12 + 36 * 5 + 3 * 36 * 56 * 2 + 61 * 36
    config = jzero.hf.read_config(tmp_path)
    assert pretrain.flops_per_token(decoder.Decoder(config), 64) == 6 * (kernels + 2 * 64 / 2 * 36)


def test_operations_are_those_of_the_products(tmp_path):
    """By hand, for 3 layers: q, o, k and v, three of the MLP; and the head. Two layers have windows of 4 tokens."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(hf_models.fields("mistral", layer_types=types)))
    kernels = 3 * (2 * 36 * 60 + 2 * 36 * 20 + 3 * 36 * 56) + 61 * 36
    scores = 2 * (4 + 4 + 64 / 2) * 60
    model = decoder.Decoder(jzero.hf.read_config(tmp_path))
    assert pretrain.flops_per_token(model, 64) == 6 * (kernels + scores)


def test_the_share_is_of_the_published_peak(folder, monkeypatch, capsys):
    monkeypatch.setattr(pretrain, "this_machine", lambda devices: machine("h100:8"))
    model = decoder.Decoder(jzero.hf.read_config(folder))
    args = pretrain.parse_args([f"--config={folder}", "--data", "a.bin", "--seq=16"])
    tell = pretrain.peak_share(model, args)
    half = 0.5 * 8 * 989.4e12 / pretrain.flops_per_token(model, 16)
    tell(10, {"loss": 1.0, "perf/tokens_per_second": half})
    tell(11, {"loss": 1.0})
    assert capsys.readouterr().out == f"step 10: {half:,.0f} tokens/s, 50.0% of the peak, 7.92 Pflop/s\n"
