"""Types that every room uses and jax does not name."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np

PyTree: TypeAlias = Any
"""A tree of arrays, or of whatever stands for them: no type checker knows its structure."""

DType: TypeAlias = np.dtype[Any]
"""A dtype, including those that NumPy does not know by itself (bfloat16, PRNG keys)."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation, by name, each of a type of its own."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys from the root of a tree to a leaf, of jax's types of keys."""

AxisNames: TypeAlias = str | tuple[str, ...] | None
"""The mesh axes that cut one dimension: an entry of a `PartitionSpec`."""

State: TypeAlias = Any
"""A train state of the caller's own class: a dataclass, an NNX object, or a pair of them."""


class TrainStateLike(Protocol):
    """A train state as jzero works on it: a dataclass pytree, of Flax, of jzero or of the user."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def step(self) -> Any: ...
    @property
    def params(self) -> PyTree: ...
    @property
    def opt_state(self) -> PyTree: ...
    @property
    def tx(self) -> Any: ...

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed."""
        ...

    def apply_gradients(self, *, grads: PyTree) -> Any:
        """Returns the state after one optimizer step."""
        ...
