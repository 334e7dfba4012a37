"""Flax's `TrainState`, which a train step updates itself."""

from __future__ import annotations

from flax.training.train_state import TrainState

from jzero.state.train_state import register_plain

register_plain(TrainState.apply_gradients)
