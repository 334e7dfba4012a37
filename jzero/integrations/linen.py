"""Flax's own serialization (`flax.serialization.to_bytes`, `to_state_dict`) of the optimizer state that jzero adds."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import serialization

from jzero._opt_state import LossScaleState, PendingUpdate, ZeroOptState

__all__: list[str] = []


def _to_state_dict(x: Any) -> dict[str, Any]:
    return {f.name: serialization.to_state_dict(getattr(x, f.name)) for f in dataclasses.fields(x)}


def _from_state_dict(x: Any, state: dict[str, Any]) -> Any:
    values = {
        f.name: serialization.from_state_dict(getattr(x, f.name), state[f.name], name=f.name)
        for f in dataclasses.fields(x)
        if f.name in state  # a field that was added since keeps the target's value
    }
    return dataclasses.replace(x, **values)


for _cls in (ZeroOptState, LossScaleState, PendingUpdate):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict)
