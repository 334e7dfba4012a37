"""Adapters in `examples/llm/decoder.py`: their numbers, what they train, what travels, what a checkpoint keeps."""

import argparse
import json

import jax
import numpy as np
import pytest

import decoder
import jzero
import jzero.hf
import training
from jzero.cli import decoder as cli_decoder
from jzero.cli import sizes as cli_sizes
from tests import hf_models

ADAPTERS = r"layers/.*/lora_[ab]"
LORA = decoder.Lora(rank=3, alpha=6.0, modules="q|v|down")
SIZES = {"vocab_size": 72, "hidden_size": 48, "intermediate_size": 96, "num_key_value_heads": 6}
"""What 8 devices and 3 divide: then both cut the same dimension, along which integers have their scales."""
TOKENS = np.random.default_rng(0).integers(0, 61, (24, 18)).astype(np.int32)  # rows for 8 and for 3 devices


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("qwen2") / "config.json"
    file.write_text(json.dumps(hf_models.fields("qwen2", **SIZES)))
    return jzero.hf.read_config(file)


def paths_of(params):
    return {"/".join(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


def logits(model, params):
    return np.asarray(jax.jit(lambda params: model.apply({"params": params}, TOKENS))(params))


def test_adapters_are_products_beside_the_chosen_kernels(config):
    shapes = jax.eval_shape(decoder.Decoder(config, LORA).init, jax.random.key(0), TOKENS)["params"]
    found = {path: x.shape for path, x in paths_of(shapes).items() if "lora" in path}
    sides = {"q": (48, 48), "v": (48, 48), "down": (96, 48)}
    want = {f"layers/{name}/lora_a": (3, rows, 3) for name, (rows, _) in sides.items()}
    assert found == want | {f"layers/{name}/lora_b": (3, 3, columns) for name, (_, columns) in sides.items()}
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, shapes)
    adapted = logits(decoder.Decoder(config, LORA), params)
    for layer in map(params["layers"].__getitem__, sides):
        a, b = layer.pop("lora_a"), layer.pop("lora_b")
        layer["kernel"] = layer["kernel"] + 6.0 / 3 * np.einsum("lir,lro->lio", a, b)
    np.testing.assert_allclose(adapted, logits(decoder.Decoder(config), params), atol=2e-5)


def test_untrained_adapters_change_nothing():
    init = jax.jit(decoder.Projection(40, bias=False, lora=LORA).init)
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
    plan = jzero.plan_train_state(state, config=training.zero_config(args), trainable=ADAPTERS)
    each = {"q": 8192, "k": 5120, "v": 5120, "o": 8192, "gate": 18_432, "up": 18_432, "down": 18_432}  # rows + columns
    elements, count = 32 * 8 * sum(each.values()), 4  # Adam counts its steps
    base = sum(leaf.param.bytes_per_device for leaf in plan.leaves if not leaf.trained)
    assert plan.bytes_per_device.total - base == elements * (4 + 2 + 8) // 8 + count == 36_700_164
