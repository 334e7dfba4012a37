"""Flax's `TrainState`, which a train step updates itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState

from jzero.state.train_state import register_plain

__all__: list[str] = []


def _overwrites_nothing(state: Any) -> bool:
    return not isinstance(state.params, Mapping) or OVERWRITE_WITH_GRADIENT not in state.params


register_plain(TrainState.apply_gradients, _overwrites_nothing)
