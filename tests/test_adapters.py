"""Adapters that PEFT wrote, as `examples/llm/adapters.py` reads them, scaled or refused; those of the decoder."""

import argparse
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adapters
import decoder
import generate
import jzero
import jzero.hf
import training
from jzero.cli import decoder as cli_decoder
from jzero.cli import sizes as cli_sizes
from jzero.core.config.settings import check
from tests import hf_models, shared

SAID = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
SHAPES = {"self_attn.q_proj": (36, 60), "mlp.down_proj": (56, 36)}  # of Mistral, [in, out]


def write_adapters(folder, **fields):
    """Writes a folder as PEFT does: `q_proj` and `down_proj` of three layers."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(SAID | fields))
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(3):
        for name, (num_in, num_out) in SHAPES.items():
            home = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{home}.lora_A.weight"] = rng.normal(size=(4, num_in)).astype(np.float32) / 6
            tensors[f"{home}.lora_B.weight"] = rng.normal(size=(num_out, 4)).astype(np.float32) / 6
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / 2),
        ({"target_modules": r"model\.layers\.\d+\.(self_attn\.q|mlp\.down)_proj"}, 6 / 4),
        ({"target_modules": "all-linear", "exclude_modules": ["lm_head"], "lora_dropout": 0.1}, 6 / 4),
        ({"rank_pattern": {}, "modules_to_save": None, "bias": "none", "of_a_newer_peft": None}, 6 / 4),
    ],
)
def test_adapters_are_where_and_what_their_configuration_says(fields, factor, tmp_path):
    lora = adapters.read_lora(write_adapters(tmp_path, **fields))
    assert (lora.rank, lora.modules) == (4, "down|q")
    assert lora.alpha / lora.rank == factor, "by which the decoder multiplies A B"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", "IA3"),
        ("alpha_pattern", {"q_proj": 2}),
        ("use_dora", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa_niter_4"),
        ("kasa_config", {}),
        ("of_a_newer_peft", 3),
        ("target_modules", ["q_proj", "own_proj"]),
        ("target_modules", r"model\.layers\.[01]\..*"),
        ("exclude_modules", ["mlp.down_proj"]),
        ("target_parameters", ["mlp.experts.down_proj"]),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}`"):
        adapters.read_lora(write_adapters(tmp_path, **{name: value}))


def test_adapters_of_packed_experts_come_back(tmp_path):
    """gpt-oss's, of which PEFT has one tensor for all experts; that it reads them, `test_peft_reads_adapters` shows."""
    model = decoder.Decoder(
        hf_models.write_folder(tmp_path / "like", "gpt_oss", num_hidden_layers=2),
        decoder.Lora(rank=3, alpha=6.0, modules="q|gate_up|down"),
    )
    rng, shapes = np.random.default_rng(0), jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes["params"])
    zeros = jax.tree.map(np.zeros_like, params)
    mesh = jzero.make_mesh(devices=jax.devices()[:3])
    state, other = (
        jzero.shard_train_state(jzero.TrainState.create(params=x, tx=shared.sgd(1.0)), stage=3, mesh=mesh)
        for x in (params, zeros)
    )
    jzero.hf.export_peft(state, tmp_path / "adapter", like=tmp_path / "like", rank=np.int64(3), alpha=np.float32(6))
    lora = adapters.read_lora(tmp_path / "adapter")
    assert (lora.rank, lora.alpha, lora.modules) == (3, 6.0, "down|gate_up|q")
    mapping = jzero.hf.peft_mapping(tmp_path / "like", rank=lora.rank)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    found = shared.whole(jzero.load_params(other, file, mapping=mapping, paths=generate.ADAPTERS)).params
    for name in lora.modules.split("|"):
        for side in ("lora_a", "lora_b"):
            np.testing.assert_array_equal(found["layers"][name][side], params["layers"][name][side])
    b = load_file(file)["base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"]
    np.testing.assert_array_equal(b.reshape(112, 3, 5)[:, 2, 4], params["layers"]["gate_up"]["lora_b"][1, 4, 2])
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    tensors = hf_models.tensors(model.config)
    for prefix in ("model", "model.text.decoder"):
        like = tmp_path / prefix
        shutil.copytree(tmp_path / "like", like)
        hf_models.write_tensors(like, {x.replace("model", prefix, 1): tensor for x, tensor in tensors.items()})
        one = jzero.Mapping({"layers/down/kernel": jzero.From(f"{prefix}.layers.*.mlp.experts.down_proj")})
        with pytest.raises(ValueError, match=r"only mlp\.experts\.down_proj has adapters"):
            jzero.hf.export_peft(state, tmp_path / "half", like=like, rank=3, alpha=6.0, mapping=one)


@pytest.mark.slow
def test_every_field_of_peft_is_decided():
    peft = pytest.importorskip("peft")
    unset = peft.LoraConfig().to_dict()
    assert {x.name for x in dataclasses.fields(peft.LoraConfig)} <= adapters.FIELDS.keys()
    for name, value in unset.items():
        if name != "peft_type":  # unset there
            check(name, value, adapters.FIELDS[name])


# In the decoder: their numbers, and what they take.


def test_untrained_adapters_change_nothing():
    init = jax.jit(decoder.Projection(40, bias=False, lora=decoder.Lora(rank=3, alpha=6.0)).init)
    params = init(jax.random.key(0), np.ones((1, 48), np.float32))["params"]
    bound, a = 48**-0.5, params["lora_a"]
    assert -bound <= a.min() < -0.8 * bound, "drawn as PEFT does"
    assert 0.8 * bound < a.max() <= bound
    assert not params["lora_b"].any()


def test_adapters_are_divided_by_the_number_of_devices():
    """Of a Llama of 8B, in the layout of `finetune.py`: 4 bytes an element, 2 of gradient, 8 of moments."""
    sizes = cli_sizes.model_sizes("8B", {})
    state = jax.eval_shape(cli_decoder.make_state(sizes, rank=8, base_dtype="bfloat16"), jax.random.key(0))
    args = argparse.Namespace(precision="bf16", persistence_threshold=100_000, context=1)
    plan = jzero.plan_train_state(state, config=training.zero_config(args), trainable=generate.ADAPTERS)
    each = {"q": 8192, "k": 5120, "v": 5120, "o": 8192, "gate": 18_432, "up": 18_432, "down": 18_432}  # rows + columns
    elements, count = 32 * 8 * sum(each.values()), 4  # Adam counts its steps
    base = sum(leaf.param.bytes_per_device for leaf in plan.leaves if not leaf.trained)
    assert plan.bytes_per_device.total - base == elements * (4 + 2 + 8) // 8 + count == 36_700_164
