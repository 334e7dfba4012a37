"""Tiny published models of each family, made of numbers that any program can make again.

`tests/data/make_hf_logits.py` keeps their logits by `transformers`.
"""

import json
import pathlib
import zlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jzero.hf import read_config
from jzero.weights.families import tensor_shapes

SIZES = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
LOCAL = {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 4}
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]


def rotary(theta: float, **scaling: Any) -> dict[str, dict[str, Any]]:
    """Returns the fields about rotary embeddings in both spellings."""
    return {
        "old": {"rope_theta": theta, "rope_scaling": scaling or None, "torch_dtype": "float32"},
        "new": {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}, "dtype": "float32"},
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **rotary(1e4)},
    "llama3": {"model_type": "llama", "tie_word_embeddings": True, **BIASED, **rotary(5e5, **STRETCHED)},
    "mistral": {"model_type": "mistral", "head_dim": 10, "sliding_window": 4, **rotary(1e6)},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **rotary(1e6, rope_type="linear", factor=2.0)},
    "qwen3": {"model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": False, **rotary(1e6)},
    "gemma": {"model_type": "gemma", "head_dim": 10, "hidden_act": "gelu_pytorch_tanh", **rotary(1e4)},
    "gemma2": {"model_type": "gemma2", "final_logit_softcapping": 2.0, **LOCAL, **rotary(1e4)},
    "mixtral": {"model_type": "mixtral", "sliding_window": 4, "num_local_experts": 5, **rotary(1e6)},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 10,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        **rotary(1e6),
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 7, "num_experts_per_tok": 3, **rotary(1e4)},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 10,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 4,
        "swiglu_limit": 1.5,
        **rotary(1.5e5, rope_type="yarn", factor=8.0, truncate=False, original_max_position_embeddings=32),
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "layer_types": TYPES,
        **LOCAL,
        "old": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "torch_dtype": "float32"},
        "new": {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "dtype": "float32",
        },
    },
}
LOGITS = pathlib.Path(__file__).parent / "data" / "hf_logits.npz"
DEFAULTS = LOGITS.with_name("hf_defaults.json")
TOKENS = np.arange(2 * 9).reshape(2, 9) * 23 % 61


def fields(family: str, spelling: str = "new", **changes: Any) -> dict[str, Any]:
    """Returns what is in the `config.json` of a family."""
    found = {**SIZES, **FAMILIES[family]}
    return {**{k: v for k, v in found.items() if k not in ("old", "new")}, **found[spelling], **changes}


def tensors(config: Any) -> dict[str, np.ndarray]:
    """Returns a model's tensors, norms and biases not trivial."""
    made = {}
    for name, shape in tensor_shapes(config).items():
        x = np.random.RandomState(zlib.crc32(name.encode())).randn(*shape)  # frozen for all versions of NumPy
        if len(shape) == 1:
            x = 0.3 * x + (name.endswith("norm.weight") and not config.unit_norm)
        else:
            x = x * 1.5 * shape[-1] ** -0.5
        made[name] = x.astype(np.float32)
    return made


def write_folder(folder: pathlib.Path, family: str, spelling: str = "new", **changes: Any) -> Any:
    """Writes a published model in two files with an index, and returns its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields(family, spelling, **changes)))
    config = read_config(folder)
    write_tensors(folder, tensors(config))
    return config


def write_tensors(folder: pathlib.Path, made: dict[str, np.ndarray]) -> None:
    """Writes tensors in two files with an index."""
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(made)}
    for file in set(where.values()):
        save_file({n: x for n, x in made.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
    size = sum(x.nbytes for x in made.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
