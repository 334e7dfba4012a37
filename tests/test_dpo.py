"""Preference tuning, `examples/llm/dpo.py`: against two models on one device, and a run that learns."""

import json

import jax
import numpy as np
import pytest

import decoder
import dpo
import finetune
import jzero
import jzero.hf
import training
from tests import hf_models, shared
from tests.byte_tokenizer import NUM_TOKENS, ByteTokenizer
from tests.tiers import slow

SEQ = 24


def write(tmp_path, **changes):
    model, data = tmp_path / "model", tmp_path / "pairs.jsonl"
    hf_models.write_folder(model, "qwen2", vocab_size=NUM_TOKENS, num_hidden_layers=1, **changes)
    lines = [{"prompt": f"{n % 5}?", "chosen": "yes " * (1 + n % 2), "rejected": "no"} for n in range(24)]
    data.write_text("\n".join(map(json.dumps, lines)))
    options = f"--model={model} --data={data} --held-out={data} --seq={SEQ} --batch=8 --lora-rank=4"
    return [*options.split(), "--precision=fp32", "--persistence-threshold=100"]


def published_loss(model, trained, base, batch, beta):
    """The formula of the paper, of two separate models."""

    def log_prob(model, params, tokens, learned):  # of one answer
        logits = model.apply({"params": params}, tokens[None, :-1])[0]
        return (jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]] * learned[1:]).sum()

    def log_probs(model, params):  # [B, 2]
        of_answers = jax.vmap(lambda *answer: log_prob(model, params, *answer))
        return jax.vmap(of_answers)(batch["tokens"], batch["learned"])

    gains = log_probs(model, trained) - log_probs(model.clone(lora=None), base)
    return -jax.nn.log_sigmoid(beta * (gains[:, 0] - gains[:, 1])).mean()


@pytest.mark.parametrize("context", [2, slow(1)])
def test_the_loss_is_that_of_two_models_on_one_device(context, tmp_path):
    """Adapters alone get gradients; the base is the reference of its own policy."""
    args = finetune.parse_args([*write(tmp_path), f"--context={context}"])
    model = decoder.Decoder(jzero.hf.read_config(args.model), finetune.make_lora(args))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 3, shapes)
    bare = lambda tree: {k: bare(x) if isinstance(x, dict) else x for k, x in tree.items() if not k.startswith("lora_")}
    pairs = dpo.read_pairs(args.data, ByteTokenizer(), SEQ + 1)
    batch = {name: np.stack([pairs[i][name] for i in range(8)]) for name in ("tokens", "learned")}
    want, grads = jax.jit(jax.value_and_grad(lambda p: published_loss(model, p, bare(params), batch, 0.3)))(params)

    mesh = jzero.make_mesh(devices=jax.devices()[:4], **training.mesh_axes(args))
    state = jzero.TrainState.create(params=params, tx=shared.sgd(1.0))
    state = jzero.shard_train_state(state, config=training.zero_config(args), mesh=mesh, trainable=finetune.ADAPTERS)
    loss_fn = dpo.preference_loss(training.of_parts(model, args), 0.3)
    step = jzero.make_train_step(loss_fn, has_aux=True, accumulate_steps=2)
    new, metrics = step(state, {**batch, "weights": np.ones(8, np.float32)})
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    got = shared.whole(new.params)
    paths, before = zip(*jax.tree_util.tree_leaves_with_path(params), strict=True)
    for path, p, a, g in zip(paths, before, jax.tree.leaves(got), jax.tree.leaves(grads), strict=True):
        moved = g if path[-1].key.startswith("lora_") else np.zeros_like(g)
        np.testing.assert_allclose(p - a, moved, atol=2e-5)


def test_it_learns_which_answer_is_preferred(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    more = ["--steps=12", "--eval-every=12", "--lr=3e-2", "--quantize=int8", "--beta=0.5", f"--log={log}"]
    dpo.main([*write(tmp_path), *more, f"--out={tmp_path / 'tuned'}"], ByteTokenizer())
    output = capsys.readouterr().out
    assert "24 pairs; 0 longer than 25 tokens" in output
    lines = list(map(json.loads, log.read_text().splitlines()))
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6), "adapters begin as nothing"
    (found,) = [line for line in lines if "held_out" in line]
    assert found["held_out"] < 0.3
    assert found["accuracy"] == 1
    assert (tmp_path / "tuned/adapter_config.json").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "chosen": "b"}', "pairs.jsonl:1: A line must have a `prompt`"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "' + "c" * 40 + '"}',
            "have no pair of up to 25 tokens: raise --seq",
        ),
        ("[]", "pairs.jsonl:1: A line must be an object"),
    ],
)
def test_lines_that_are_no_pairs_are_named(line, says, tmp_path):
    options = write(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(ValueError, match=says):
        dpo.main(options, ByteTokenizer())
    with pytest.raises(SystemExit, match="pass a --lora-rank above 0"):
        dpo.main([*options, "--lora-rank=0"], ByteTokenizer())
