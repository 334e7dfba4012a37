"""Published models of each family through `examples/llm/decoder.py`: the logits of `transformers`."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decoder
import jzero
import jzero.hf
import jzero.lora
from jzero.weights.model_types import COMMON, FAMILIES, inverse_frequencies
from tests import hf_models, shared
from tests.hf_models import SIZES, STRETCHED
from tests.pages import PAGES
from tests.tiers import default_for, slow

LLAMA = {"model_type": "llama", **SIZES}


def read(folder, **fields):
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return jzero.hf.read_config(folder)


@pytest.mark.smoke
def test_both_spellings_mean_the_same(tmp_path):
    old = read(tmp_path, rope_theta=5e5, rope_scaling=STRETCHED, torch_dtype="bfloat16")
    new = read(tmp_path, rope_parameters={"rope_theta": 5e5, **STRETCHED}, dtype="bfloat16")
    assert old == new
    assert new.dtype == "bfloat16"
    # Pairs turn by theta^(-2i/6): 1 and 0.0126 and 0.000159 per position. 32 tokens hold 5.1, 0.064 and 0.0008 turns.
    np.testing.assert_allclose(new.inverse_frequencies[0], [1, 5e5 ** (-1 / 3) / 8, 5e5 ** (-2 / 3) / 8], rtol=1e-12)
    assert jzero.hf.read_config(tmp_path / "config.json") == new, "the file will do"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_out_is_as_in_transformers(family, tmp_path):
    """`transformers` may write only what differs from its defaults."""
    fields = json.loads(hf_models.DEFAULTS.read_text())[family]
    sizes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    few = {name: fields[name] for name in {*sizes, "model_type", "num_experts", "num_local_experts"} & set(fields)}
    found = []
    for i, given in enumerate((fields, few)):
        (tmp_path / f"{i}.json").write_text(json.dumps(given))
        found.append(jzero.hf.read_config(tmp_path / f"{i}.json"))
    assert found[0] == found[1]


@pytest.mark.parametrize(("context", "fast", "late"), [(4096, 32, 1), (512, 16, 2)])
def test_frequencies_of_yarn(context, fast, late):
    """Fast pairs keep theirs, slow ones are stretched, others in between."""
    fields = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": context, "truncate": False}
    found, _ = inverse_frequencies("yarn", fields | {"beta_fast": fast, "beta_slow": late}, 24)
    plain = 1e4 ** (-np.arange(0, 24, 2) / 24)
    turns = context * plain / (2 * np.pi)
    kept = np.clip(np.log(turns / late) / np.log(fast / late), 0, 1)
    assert 0 < ((kept > 0) & (kept < 1)).sum() < len(plain)
    np.testing.assert_allclose(found, kept * plain + (1 - kept) * plain / 8.0, rtol=1e-12)


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_gemma_3_turns_local_layers_faster(tmp_path, spelling):
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    }
    fields = {"model_type": "gemma3_text", "head_dim": 6, "sliding_window": 8, "sliding_window_pattern": 2}
    config = read(tmp_path, **fields, **(old if spelling == "old" else new))
    assert config.windows == (8, None, 8)
    np.testing.assert_allclose(config.inverse_frequencies[0], [1e4 ** (-i / 3) for i in range(3)])
    np.testing.assert_allclose(config.inverse_frequencies[1], [1e6 ** (-i / 3) / 8 for i in range(3)])
    assert (config.tied, config.gelu, config.unit_norm, config.embed_scale) == (True, True, True, 6.0)


def test_windows_are_those_of_the_family(tmp_path):
    assert read(tmp_path, model_type="mistral", sliding_window=8).windows == (8, 8, 8)
    assert read(tmp_path, model_type="mistral", sliding_window=None).windows == (None, None, None)
    assert read(tmp_path, model_type="qwen2", sliding_window=8, use_sliding_window=False).windows == (None,) * 3
    some = read(tmp_path, model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert some.windows == (None, None, 8)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert read(tmp_path, model_type="mistral", sliding_window=8, layer_types=types).windows == (None, 8, None)
    assert read(tmp_path, model_type="gemma2", sliding_window=8, layer_types=types).windows == (None, 8, None)


def test_a_family_reads_its_own_fields_only(tmp_path):
    """As `transformers` does: others change nothing, whatever their values."""
    every = {name: value for family in FAMILIES.values() for name, value in family.items() if name not in COMMON}
    others = {name: 0.1 if isinstance(value, float) else 7 for name, value in every.items()}
    for family, own in FAMILIES.items():
        mixture = {"num_experts": 7, "num_experts_per_tok": 2} if "num_experts" in own else {}
        plain = read(tmp_path, model_type=family, head_dim=6, **mixture)
        ignored = {name: value for name, value in others.items() if name not in own}
        assert {"llama": 9, "gemma2": 6}.get(family, 3) <= len(ignored)
        assert read(tmp_path, model_type=family, head_dim=6, **mixture, **ignored) == plain, family


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "`model_type` .*got 'mamba'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "`rope_scaling.rope_type` .*dynamic"),
        ({"rope_scaling": {"type": "linear"}}, r"`rope_scaling` .* lacks factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quantization_config` .*gptq"),
        ({"is_causal": False}, r"`is_causal` .* is False"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, r"`use_bidirectional_attention` .* is True"),
        ({"hidden_act": "relu"}, "`hidden_act` .*'relu'"),
        ({"partial_rotary_factor": 0.5}, r"`partial_rotary_factor` .* is 0\.5"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, r"`layer_types` .* 3 layers"),
        ({"num_hidden_layers": None}, "`num_hidden_layers` .*got None"),
        ({"model_type": "mixtral"}, "`num_experts` .*got None"),
        (
            {"model_type": "olmoe", "num_experts": 2, "num_experts_per_tok": 3},
            "`num_experts_per_tok` .* 2 experts: got 3",
        ),
        ({"model_type": "olmoe", "num_experts": 8, "clip_qkv": 7.0}, r"`clip_qkv` .* is 7\.0"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0]}, r"`mlp_only_layers` .* is \[0\]"),
        ({"head_dim": 9}, r"`head_dim` .* must be even.* got 9"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **fields)


def test_no_config_or_none_that_can_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"Pass a model.s folder: there is no .*config\.json"):
        jzero.hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        jzero.hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="got a list"):
        jzero.hf.read_config(tmp_path)


SGD = optax.sgd(1e-3)
LOGITS = np.load(hf_models.LOGITS)


@functools.cache
def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


def born(config, num_devices=8, lora=None, trainable=None, tx=SGD, product="ragged", **options):
    """Returns a state of the decoder, its parameters numbers that are in no file, and the decoder."""
    model = decoder.Decoder(config, lora, product)
    params = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), shapes_of(model))
    return shared.sharded(params, tx, mesh=num_devices, trainable=trainable, **options), model


@functools.cache
def compiled(model):
    return jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))


@functools.cache
def eval_step(model):
    return jzero.make_eval_step(lambda params, tokens: jzero.PerExample(model.apply({"params": params}, tokens)))


def logits(state, model):
    """Returns the logits of `hf_models.TOKENS`, computed from shards: [2, 9, V]."""
    rows = jzero.plan_of(state).num_shards
    return np.asarray(eval_step(model)(state, jnp.asarray(np.resize(hf_models.TOKENS, (2 * rows, 9)))))[:2]


def logits_alone(state, model):
    """Returns them of whole parameters, computed on one device."""
    params = jax.tree.map(lambda _, x: np.asarray(x), shapes_of(model), state.params)
    return np.asarray(compiled(model)(params, hf_models.TOKENS))


IN_LAYOUTS = ("llama3", "gemma2", "mixtral")  # `test_every_layout_holds_the_same_parameters` compares their logits
BY_DEFAULT = [family for family in hf_models.FAMILIES if family not in IN_LAYOUTS]


@pytest.mark.parametrize("family", default_for(BY_DEFAULT, hf_models.FAMILIES))
def test_logits_are_those_of_transformers(family, tmp_path):
    config = hf_models.write_folder(tmp_path / "new", family)
    assert hf_models.write_folder(tmp_path / "old", family, "old") == config, "both spellings"
    state, model = born(config)
    state = jzero.load_params(state, tmp_path / "new", mapping="auto", donate=True)
    np.testing.assert_allclose(logits_alone(state, model), LOGITS[family], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "num_devices", "product"), [(3, 8, "blocks"), (3, 3, "ragged"), (1, 3, "blocks"), (1, 8, "ragged")]
)
@pytest.mark.parametrize("family", [name for name in hf_models.FAMILIES if "experts" in str(hf_models.FAMILIES[name])])
def test_experts_give_these_logits_from_shards(family, stage, num_devices, product, tmp_path):
    config = hf_models.write_folder(tmp_path, family)
    state, model = born(config, num_devices, stage=stage, product=product)
    state = jzero.load_params(state, tmp_path, mapping="auto", donate=True)
    np.testing.assert_allclose(logits(state, model), LOGITS[family], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "stage", "num_devices", "options"),
    [
        ("mixtral", 3, 3, {"product": "blocks"}),
        pytest.param("llama3", 3, 3, {}, marks=pytest.mark.smoke),
        slow("gemma2", 1, 3, {}),
        slow("llama3", 2, 8, {"precision": "bf16"}),
        ("gemma2", 3, 8, {"offload": jzero.Offload(params="host", optimizer="host")}),
    ],
)
def test_every_layout_holds_the_same_parameters(family, stage, num_devices, options, tmp_path):
    config = hf_models.write_folder(tmp_path, family)
    state, model = born(config, num_devices, stage=stage, **options)
    state = jzero.load_params(state, tmp_path, mapping="auto", donate=bool(num_devices % 2))
    there = hf_models.tensors(config)
    o = np.stack([there[f"model.layers.{i}.self_attn.o_proj.weight"].T for i in range(3)])
    np.testing.assert_array_equal(jzero.get_full_param(state, "layers/o/kernel"), o)
    np.testing.assert_array_equal(
        jzero.get_full_param(state, "embed/embedding"), there["model.embed_tokens.weight"], "masters, where they are"
    )
    if stage in (0, 3):
        np.testing.assert_allclose(logits(state, model), LOGITS[family], rtol=0, atol=1e-5)


def test_experts_and_their_adapters_over_a_rounded_base(tmp_path):
    config = hf_models.write_folder(tmp_path, "mixtral", num_hidden_layers=1)
    adapters = {"lora": decoder.Lora(rank=2, alpha=4.0, modules="up|down"), "trainable": r".*/lora_[ab]"}
    state, model = born(config, 3, quantization=jzero.Quantization(frozen="int8"), **adapters)
    state = jzero.load_params(state, tmp_path, mapping="auto", paths=r"(?!.*/lora_[ab]).*", donate=True)
    for path, shape in {
        "up/lora_a": (36, 2),
        "up/lora_b": (2, 56),
        "down/lora_a": (56, 2),
        "down/lora_b": (2, 36),
    }.items():
        drawn = np.random.default_rng(len(path)).normal(size=(1, 5, *shape)).astype(np.float32) / 6
        state = jzero.set_full_param(state, f"layers/{path}", value=drawn)
    whole = jax.tree.map(np.asarray, jzero.gather_params(state))
    up = np.stack(
        [hf_models.tensors(config)[f"model.layers.0.block_sparse_moe.experts.{i}.w3.weight"].T for i in range(5)]
    )
    rounded = np.abs(whole["layers"]["up"]["kernel"][0] - up).max()
    assert 0 < rounded < np.abs(up).max() / 127
    merged = jzero.lora.merged(2, 4.0)
    for name in ("up", "down"):
        leaves = whole["layers"][name]
        whole["layers"][name] = {"kernel": merged(f"layers/{name}/kernel", leaves)}
    wanted = compiled(decoder.Decoder(config, product="blocks"))(whole, hf_models.TOKENS)
    np.testing.assert_allclose(logits(state, model), wanted, rtol=0, atol=1e-5)


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    config = hf_models.write_folder(tmp_path, "llama", tie_word_embeddings=True)
    there = hf_models.tensors(config)
    state, _ = born(config)
    hf_models.write_tensors(tmp_path, {**there, "lm_head.weight": there["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match=r"'lm_head\.weight' are one"):
        jzero.load_params(state, tmp_path, mapping="auto")
    hf_models.write_tensors(tmp_path, {**there, "lm_head.weight": there["model.embed_tokens.weight"]})
    loaded = jzero.load_params(state, tmp_path, mapping="auto")
    embedding = jzero.get_full_param(loaded, "embed/embedding")
    np.testing.assert_array_equal(embedding, there["model.embed_tokens.weight"])


def test_the_guides_table_has_every_family():
    rows = re.findall(r"^\|[^|]+\| `(\w+)` \|", PAGES["guides/published_models.md"].read_text(), re.MULTILINE)
    assert sorted({*rows} - {"model_type"}) == sorted(FAMILIES)
