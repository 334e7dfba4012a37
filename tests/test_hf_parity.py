"""Published models of each family through `examples/llm/decoder.py`: the logits of `transformers`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decoder
import jzero
import jzero.lora
from jzero.weights.safetensors_files import TensorFile
from tests import hf_models
from tests.tiers import default_for, slow

SGD = optax.sgd(1e-3)
LOGITS = np.load(hf_models.LOGITS)


@functools.cache
def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


def born(config, num_devices=8, lora=None, trainable=None, tx=SGD, product="ragged", **options):
    """Returns a state of the decoder, its parameters numbers that are in no file, and the decoder."""
    model = decoder.Decoder(config, lora, product)
    params = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), shapes_of(model))
    plain = jzero.TrainState.create(params=params, tx=tx)
    zero = jzero.ZeroConfig(**{"stage": 3, "persistence_threshold": 0, **options})
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices])
    return jzero.shard_train_state(plain, config=zero, mesh=mesh, trainable=trainable), model


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


def test_each_byte_of_a_cut_leaf_is_read_once(tmp_path, monkeypatch):
    config = hf_models.write_folder(tmp_path, "mistral")
    state, _ = born(config)
    read = {}
    view = TensorFile.view

    def counted(self, index):
        found = view(self, index)
        read[self.name] = read.get(self.name, 0) + found.nbytes
        return found

    monkeypatch.setattr(TensorFile, "view", counted)
    jzero.load_params(state, tmp_path / "model.safetensors.index.json", mapping="auto")
    sizes = {name: x.nbytes for name, x in hf_models.tensors(config).items()}
    cut = {name: size for name, size in sizes.items() if not name.endswith("norm.weight")}
    assert {name: read[name] for name in cut} == cut


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
