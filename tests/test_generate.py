"""Generation: the tokens of `transformers` in every layout of the weights, ragged prompts, samples by key."""

import functools
import itertools
import json
import pathlib

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import decoder
import generate as generate_file
import generation
import jzero
import layouts
from generation import Sampling, generate, left_padded
from tests import byte_tokenizer, hf_models, shared
from tests.tiers import default_for

TOKENS = pathlib.Path(__file__).parent / "data" / "hf_tokens.json"
PROMPTS = [[5, 9, 3], [7, 2, 8, 1, 40, 33, 2], [11], [3, 4, 50, 6, 27, 8, 9, 10, 11, 12], [60, 0, 0, 60]]
WANT = json.loads(TOKENS.read_text())
NUM_TOKENS = 12
DIVIDE_BY = {"whole": 1, "tensor 2": 2, "tensor 4": 4}
OF_KERNEL = [("mistral", "splash"), ("gpt_oss", "splash")]  # which read the prompts


class Numbers:
    """A tokenizer whose texts are its tokens."""

    chat_template = eos_token_id = None

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": list(map(int, text.split()))}

    def decode(self, tokens, *, skip_special_tokens):
        return " ".join(map(str, tokens))


@functools.cache
def loaded(family, folder):
    """Returns a state with the weights of a family, and the decoder."""
    model = decoder.Decoder(hf_models.write_folder(folder, family))

    def make_state(key):
        params = model.init(key, np.zeros((1, 4), np.int32))["params"]
        return jzero.TrainState.create(params=params, tx=optax.adamw(1e-3))

    state = jzero.init_train_state(make_state, jax.random.key(0), config=shared.config(3), zeros=".*")
    return jzero.load_params(state, folder, mapping="auto", donate=True), model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(tmp_path_factory.mktemp)


def run(state, model, layout, sampling, *, key=0, prompts=PROMPTS):
    """Returns the new tokens [B, N] of prompts, with the weights in a layout."""
    batch = left_padded(prompts, jax.random.key(key), num_rows=8)
    if layout == "eval step":
        return np.asarray(eval_step(model, sampling)(state, batch))[: len(prompts)]
    sizes = {"num_rows": len(prompts), "num_places": 30, "dtype": "float32"}
    mesh = layouts.choose_mesh(model, **sizes, divide_by=DIVIDE_BY[layout])
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    params = jzero.gather_params(state, shardings=layouts.shardings(shapes, mesh))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return np.asarray(compiled(model, sampling)(params, batch))[: len(prompts)]


@functools.cache
def eval_step(model, sampling):
    return jzero.make_eval_step(lambda params, batch: jzero.PerExample(generate(model, params, batch, sampling)))


@functools.cache
def compiled(model, sampling):
    return jax.jit(functools.partial(generate, model, sampling=sampling))


@pytest.mark.parametrize(
    ("family", "layout"),
    # Each family in one layout. By default one: other tests stop and sample with llama, whole and in an eval step.
    default_for(
        [("mistral", "tensor 2"), OF_KERNEL[0]],
        [*zip(WANT, itertools.cycle(("tensor 2", *DIVIDE_BY, "eval step"))), *OF_KERNEL],
    ),
)
def test_tokens_are_those_of_transformers(family, layout, folders):
    folder = folders(family)
    if layout == "eval step":
        state, model = loaded(family, folder)
        found = run(state, model, layout, Sampling(num_tokens=NUM_TOKENS)).tolist()
    else:
        hf_models.write_folder(folder, family)
        prompts = [f"--prompt={' '.join(map(str, prompt))}" for prompt in PROMPTS]
        asked = f"--model={folder} --num-tokens={NUM_TOKENS} --dtype=float32 --divide-by={DIVIDE_BY.get(layout, 1)}"
        asked += " --attention=splash" * (layout == "splash")
        texts = generate_file.complete(generate_file.parse_args([*asked.split(), *prompts]), Numbers())
        found = [list(map(int, text.split())) for text in texts]
    assert found == WANT[family]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor 2", "eval step"])
def test_rows_end_at_their_own_stop_tokens(layout, folders):
    """Devices whose rows have ended wait for the others, or do not."""
    state, model = loaded("llama", folders("llama"))
    stop = (14, 24)
    new = run(state, model, layout, Sampling(num_tokens=NUM_TOKENS, stop=stop))
    for row, whole in zip(new, WANT["llama"], strict=True):
        end = min(number for number, token in enumerate(whole) if token in stop) + 1
        assert row.tolist() == whole[:end] + [-1] * (NUM_TOKENS - end)


@pytest.mark.slow
def test_a_key_repeats_its_sample_in_every_layout(folders):
    state, model = loaded("llama", folders("llama"))
    sampling = Sampling(num_tokens=5, temperature=1.5, top_k=30, top_p=0.95)
    prompts = PROMPTS[3:] + PROMPTS[:3]  # the longest first, so that it alone is of the same shape
    sample = functools.partial(run, state, model, sampling=sampling)
    first = sample("eval step", key=1, prompts=prompts)
    for layout in ("whole", "tensor 2"):
        np.testing.assert_array_equal(sample(layout, key=1, prompts=prompts), first)
    assert (sample("eval step", key=2, prompts=prompts) != first).any()
    alone = sample("eval step", key=1, prompts=prompts[:1])
    np.testing.assert_array_equal(alone, first[:1], "a row's key depends on its number only")
    assert first[0].tolist() != WANT["llama"][3][:5]


def test_top_k_and_top_p_choose_among_the_likeliest():
    shares = np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32)
    logits = np.log(shares)[[4, 0, 3, 1, 2]][None].repeat(400, 0)  # so that the order is not that of the tokens
    keys = jax.random.split(jax.random.key(0), 400)

    def drawn(**options):
        tokens = generation.choose_token(logits, keys, Sampling(num_tokens=1, **options))
        return np.bincount(np.asarray(tokens), minlength=5)[[1, 3, 4, 2, 0]] / 400

    np.testing.assert_allclose(drawn(temperature=1.0), shares, atol=0.08)
    np.testing.assert_allclose(drawn(temperature=1.0, top_k=2), np.array([4, 3, 0, 0, 0]) / 7, atol=0.08)
    np.testing.assert_allclose(drawn(temperature=1.0, top_p=0.75), np.array([40, 30, 15, 0, 0]) / 85, atol=0.08)
    np.testing.assert_allclose(drawn(temperature=1.0, top_p=0.0), [1, 0, 0, 0, 0], err_msg="at least one")
    np.testing.assert_allclose(drawn(temperature=1.0, top_k=9), shares, atol=0.08, err_msg="more than there are")
    np.testing.assert_allclose(drawn(temperature=0.0), [1, 0, 0, 0, 0])
    cold = shares**4 / (shares**4).sum()
    np.testing.assert_allclose(drawn(temperature=0.25), cold, atol=0.08)


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": value} for value in (-1.0, 1e-9, float("nan"))),
        {"top_p": 1.5},
        {"top_k": 0},
        {"num_tokens": 0},
    ],
)
def test_options_that_mean_nothing_are_refused(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"`{name}` must be .*: got {value}"):
        Sampling(**{"num_tokens": 1, **bad})


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match=r"prompt must have tokens .*number 1"):
        left_padded([[3], []], jax.random.key(0))


def test_answers_end_where_those_of_transformers_do(tmp_path):
    """`generation_config.json`, or else `config.json`; at the tokenizer's own end, too."""
    for name, said, found in (
        ("config.json", {"model_type": "llama"}, ()),
        ("config.json", {"eos_token_id": 7}, (7,)),
        ("config.json", {"eos_token_id": [9, 7]}, (7, 9)),
        ("generation_config.json", {"eos_token_id": [5]}, (5,)),
        ("generation_config.json", {"temperature": 0.6}, ()),
    ):
        (tmp_path / name).write_text(json.dumps(said))
        assert generate_file.stop_tokens(tmp_path, byte_tokenizer.ByteTokenizer()) == (*found, byte_tokenizer.END)


EVEN = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
EVEN |= {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("limit", "num_places", "says"),
    [
        (None, 10, "whole on each of 8 devices"),
        (10**9, 10, "whole on each of 8 devices"),
        (400_000, 10, "tensor, divided by 2, on 8 devices"),
        (250_000, 10, "tensor, divided by 4, on 8 devices"),
        (170_000, 10, "tensor, divided by 8, on 8 devices"),
        (500_000, 100, "tensor, divided by 2, on 8 devices"),
    ],
)
def test_weights_are_divided_by_as_little_as_fits(limit, num_places, says, monkeypatch, capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**hf_models.fields("llama"), **EVEN}))
    model = decoder.Decoder(jzero.hf.read_config(config))  # 131,520 parameters
    monkeypatch.setattr(layouts, "memory_limit", lambda: limit)
    sizes = {"num_rows": 8, "dtype": "float32", "divide_by": None}
    layouts.choose_mesh(model, num_places=num_places, **sizes)
    assert says in capsys.readouterr().out
    if num_places == 100:
        with pytest.raises(SystemExit, match=r"weights and .* do not fit"):
            layouts.choose_mesh(model, num_places=10**7, **sizes)
        with pytest.raises(SystemExit, match=r"--divide-by .*8 devices.*3"):
            layouts.choose_mesh(model, num_places=num_places, **{**sizes, "divide_by": 3})


def test_what_does_not_divide_is_whole_and_said_to_be(monkeypatch, capsys, tmp_path):
    """It counts whole, so dividing the rest may not help."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**hf_models.fields("llama"), **EVEN, "vocab_size": 61, "tie_word_embeddings": False}))
    model = decoder.Decoder(jzero.hf.read_config(config))
    sizes = {"num_rows": 8, "num_places": 10, "dtype": "float32"}
    layouts.choose_mesh(model, divide_by=4, **sizes)
    assert "whole on each, since 4 does not divide them: embed/embedding, head/kernel\n" in capsys.readouterr().out
    monkeypatch.setattr(layouts, "memory_limit", lambda: 170_000)
    with pytest.raises(SystemExit, match="do not fit 8 devices"):
        layouts.choose_mesh(model, divide_by=None, **sizes)
