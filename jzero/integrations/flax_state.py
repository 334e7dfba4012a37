"""Flax's `TrainState`."""

from __future__ import annotations

from flax.training.train_state import TrainState

from jzero.core.state.adapter import StateAdapter, adapter_of


@adapter_of.register(TrainState)
class FlaxAdapter(StateAdapter):
    """Presents a Flax `TrainState`, or one of a subclass."""

    @property
    def has_own_update(self) -> bool:
        """Whether a subclass has an `apply_gradients` of its own."""
        return type(self.state).apply_gradients is not TrainState.apply_gradients
