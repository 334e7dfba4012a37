"""Makes jzero's types known to Flax where they are defined, since Flax passes types over that it does not know.

Serialization (`flax.serialization.to_bytes`, `to_state_dict`) holds natural arrays; layers see natural shapes, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from flax import serialization
from flax.core import meta

T = TypeVar("T")


def register_fields(cls: type[T]) -> type[T]:
    """Registers a dataclass as the dictionary of its fields. A field that a dictionary lacks keeps its value."""

    def to_state_dict(x: Any) -> dict[str, Any]:
        return {f.name: serialization.to_state_dict(getattr(x, f.name)) for f in dataclasses.fields(x)}

    def from_state_dict(x: Any, state: dict[str, Any]) -> Any:
        values = {
            f.name: serialization.from_state_dict(getattr(x, f.name), state[f.name], name=f.name)
            for f in dataclasses.fields(x)
            if f.name in state  # written before the field existed
        }
        return dataclasses.replace(x, **values)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)
    return cls


def register_array(cls: type[T], inner: Callable[[T], Any], replace: Callable[[T, Any], T]) -> None:
    """Registers a box around an array: serialized as what `inner` returns, unboxed by Linen's modules."""
    serialization.register_serialization_state(cls, inner, replace)
    meta.AxisMetadata.register(cls)


def register_refusal(cls: type[T], why: Callable[[T], str]) -> None:
    """Registers a type that cannot be serialized; `why` says of an object why, and what to do instead."""

    def refuse(x: T, *_: Any) -> Any:
        raise TypeError(why(x))

    serialization.register_serialization_state(cls, refuse, refuse)
