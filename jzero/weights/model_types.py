"""The families that jzero knows: the fields that each reads of `config.json`, and what its models have besides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jzero.core.config.settings import ANY, FLAG, TEXT, Setting, block, integer, list_of, number, optional

FULL, SLIDING = "full_attention", "sliding_attention"
SIZE = integer(1, most=2**24)
MOST_LAYERS = 2**16
HEAD_DIM = Setting("even, from 2 to 65536, since rotations are of pairs", lambda x: _even(integer(2, most=2**16).of(x)))
_COUNT = optional(integer(1, most=2**31 - 1))
_POSITIVE = number("a number from 1e-9 to 1e9", lambda x: 1e-9 <= x <= 1e9)
_SCALE = optional(_POSITIVE)
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def _dtype(value: object) -> str:
    name = TEXT.of(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError
    return name


def _even(value: int) -> int:
    if value % 2:
        raise ValueError
    return value


_DTYPE = optional(Setting(f"one of {_DTYPES}", _dtype))
_THETA = optional(number("a number above 1, up to 1e15", lambda x: 1 < x <= 1e15))
_PART = optional(number("a number above 0, up to 1", lambda x: 0 < x <= 1))
_ROTARY = {
    **dict.fromkeys(("rope_type", "type"), optional(TEXT)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _SCALE),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), _SCALE),
    "rope_theta": _THETA,
    "original_max_position_embeddings": _COUNT,
    "partial_rotary_factor": _PART,
    "truncate": optional(FLAG),
}
_ROPE = optional(block(_ROTARY | dict.fromkeys((FULL, SLIDING), optional(block(_ROTARY)))))
COMMON: dict[str, Setting[Any]] = {
    "model_type": TEXT,
    **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads"), SIZE),
    **dict.fromkeys(("intermediate_size", "num_key_value_heads"), optional(SIZE)),
    "num_hidden_layers": integer(1, most=MOST_LAYERS),
    "head_dim": optional(integer(1)),
    "max_position_embeddings": _COUNT,
    "rms_norm_eps": number("a number above 0, below 1", lambda x: 0 < x < 1),
    "tie_word_embeddings": FLAG,
    "rope_theta": _THETA,
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _ROPE),
    "partial_rotary_factor": _PART,
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("quantization_config", "is_causal"), ANY),  # see `ONLY`
}
"""The fields that every family reads, with the values that they may have."""
OWN: dict[str, Setting[Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), optional(TEXT)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"), FLAG),
    "sliding_window": _COUNT,
    "max_window_layers": integer(0),
    "sliding_window_pattern": integer(1),
    "layer_types": optional(list_of(TEXT)),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), _SCALE),
    "rope_local_base_freq": _THETA,
    **dict.fromkeys(("num_experts", "num_local_experts"), optional(SIZE)),
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size"), SIZE),
    "router_aux_loss_coef": number("a number from 0 to 1e9", lambda x: 0 <= x <= 1e9),
    "swiglu_alpha": _POSITIVE,
    "swiglu_limit": _SCALE,
    **dict.fromkeys(("use_bidirectional_attention", "router_jitter_noise", "clip_qkv"), ANY),  # see `ONLY`
    **dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), ANY),
}
"""The fields that some families read, likewise."""
_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": False,
}
_WINDOWED_GEMMA: dict[str, Any] = {
    **_GEMMA,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_MIXTURE: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_experts": None,
    "num_local_experts": None,
    "router_aux_loss_coef": 0.001,
}
"""Of `num_experts` and `num_local_experts`, files have either."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"num_key_value_heads": 8, "hidden_act": "silu", "sliding_window": 4096, "layer_types": None},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "gemma": {**_GEMMA, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {**_WINDOWED_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **_WINDOWED_GEMMA,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "mixtral": {
        **_MIXTURE,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "rope_theta": 1e6,
    },
    "qwen3_moe": {
        **_MIXTURE,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    "olmoe": {
        **_MIXTURE,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "attention_bias": False,
        "clip_qkv": None,
    },
    "gpt_oss": {
        **_MIXTURE,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 1.5e5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""The known values of `model_type`, each with the fields that it alone reads, or that have a default of its own.

What a family does not read is not looked at: `transformers` ignores a soft cap in a Llama, too.
"""

QK_NORMS = ("qwen3", "gemma3_text", "qwen3_moe", "olmoe")
"""The families that normalize queries and keys."""
ALTERNATING = ("gemma2", "gpt_oss")
"""The families in which every second layer sees all tokens, unless `layer_types` says otherwise."""
POST_NORMS = ("gemma2", "gemma3_text")
"""The families whose attention and feed-forward blocks end with a norm."""
ONLY = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    "router_jitter_noise": 0.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "clip_qkv": None,
}
"""Fields with the one value that `ModelConfig` can say."""
ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}


ROTARY = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The known kinds, with the fields that each needs."""


def inverse_frequencies(kind: str, fields: Mapping[str, Any], head_dim: int) -> tuple[tuple[float, ...], float]:
    """Returns the angles per position, `[head_dim / 2]`, and a factor on the numbers that are turned.

    Args:
      kind: A key of `ROTARY`.
      fields: What that needs, and `rope_theta`.
      head_dim: Size of a head.
    """
    freq = float(fields["rope_theta"]) ** -(np.arange(0, head_dim, 2) / head_dim)
    factor = 1.0
    if kind == "linear":
        freq = freq / fields["factor"]
    elif kind == "llama3":  # long waves are stretched, short ones stay, those between are a mixture
        low, high = fields["low_freq_factor"], fields["high_freq_factor"]
        share = np.clip((fields["original_max_position_embeddings"] * freq / (2 * np.pi) - low) / (high - low), 0, 1)
        freq = (1 - share) * freq / fields["factor"] + share * freq
    elif kind == "yarn":  # likewise, by the number of a pair
        low, high = (_pair(turns, fields, head_dim) for turns in _bounds(fields))
        if fields.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        share = 1 - np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
        freq = (1 - share) * freq / fields["factor"] + share * freq
        factor = _yarn_factor(fields)
    return tuple(freq.tolist()), factor


def _bounds(fields: Mapping[str, Any]) -> tuple[float, float]:
    """Returns how often the pairs turn within the context of pretraining that begin and end the mixture."""
    return fields.get("beta_fast") or 32, fields.get("beta_slow") or 1


def _pair(turns: float, fields: Mapping[str, Any], head_dim: int) -> float:
    """Returns the number of the pair of dimensions that turns so often within the context of pretraining."""
    context = fields["original_max_position_embeddings"]
    return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(fields["rope_theta"]))


def _yarn_factor(fields: Mapping[str, Any]) -> float:
    if (said := fields.get("attention_factor")) is not None:
        return float(said)

    def scale(by: float) -> float:
        return 0.1 * by * math.log(fields["factor"]) + 1 if fields["factor"] > 1 else 1.0

    both = fields.get("mscale"), fields.get("mscale_all_dim")
    return scale(both[0]) / scale(both[1]) if both[0] and both[1] else scale(1)
