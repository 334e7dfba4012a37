"""Rotary embeddings: the angle per position of each pair of dimensions, by the kinds that `config.json` names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

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
