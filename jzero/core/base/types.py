"""Types that every room uses and jax does not name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import jax
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


class Optimizer(Protocol):
    """An optax transformation, or a wrapper of one."""

    @property
    def init(self) -> Callable[[PyTree], PyTree]: ...
    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]: ...


class Jitted(Protocol):
    """What `jax.jit` returns, or what stands for it; jax's own types lack `clear_cache`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program of these arguments; compiles it first if need be."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Returns the program of these arguments as a jaxpr."""
        ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> PyTree:
        """Returns the shapes of its results."""
        ...

    def clear_cache(self) -> None:
        """Forgets all compiled programs."""
        ...


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
