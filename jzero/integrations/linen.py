"""Registers jzero's types with Flax: optimizer state, padded leaves.

Serialization (`flax.serialization.to_bytes`, `to_state_dict`) holds stored arrays; layers see natural shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import serialization
from flax.core import meta

from jzero.plan.on_disk import OnDisk
from jzero.plan.opt_state import DiskState, LossScaleState, ZeroOptState
from jzero.plan.padded import Padded


def _to_state_dict(x: Any) -> dict[str, Any]:
    return {f.name: serialization.to_state_dict(getattr(x, f.name)) for f in dataclasses.fields(x)}


def _from_state_dict(x: Any, state: dict[str, Any]) -> Any:
    values = {
        f.name: serialization.from_state_dict(getattr(x, f.name), state[f.name], name=f.name)
        for f in dataclasses.fields(x)
        if f.name in state  # a newer field keeps the target's value
    }
    return dataclasses.replace(x, **values)


for _cls in (ZeroOptState, LossScaleState, DiskState):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict)


def _refuse(x: OnDisk, *_: Any) -> Any:
    raise TypeError(
        f"{x.path!r} is on disk, or in records in the host's memory, so Flax cannot serialize it: use "
        "`jzero.save_checkpoint`, or bring the state to memory with `jzero.unshard_train_state`."
    )


serialization.register_serialization_state(OnDisk, _refuse, _refuse)
serialization.register_serialization_state(Padded, lambda x: x.stored, lambda x, stored: Padded(stored, x.path, x.cut))
meta.AxisMetadata.register(Padded)
