"""Lazy parameters: a shard and how to make it whole, kept so through casts, slices and other cheap operations.

In: a stored shard, [D/N, F] on each of N devices. Out: the whole parameter, [D, F], made where an equation reads it.
What an equation makes of parameters alone stays lazy if it can: the shard itself is sliced or cast (`on_shard`), or the
operation is repeated at each use (`Deferred`). So in

    { lambda ; w:f32[512,64] x:f32[8,512]. let
        a:bf16[512,64] = convert_element_type[new_dtype=bfloat16] w
        b:f32[8,64] = dot_general[...] x a
      in (b,) }

`a` is `w`'s shard with `wire_dtype=bf16`, [64, 64] on each of 8 devices, and `dot_general` is what gathers it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.arrays.casts import round_without_derivative
from jzero.arrays.collectives import Wire, gather_param
from jzero.arrays.placement import on_device
from jzero.jaxpr.primitives import CHEAP
from jzero.plan.layout import Cut

__all__ = [
    "Deferred",
    "Lazy",
    "Operation",
    "RowOf",
    "defer",
    "is_constant",
    "is_cut",
    "is_lazy",
    "num_bytes",
]

Equation = Any

MAX_DEFERRED = 16
"""Operations in one deferred value; longer chains (a recurrence over parameters, say) are computed once and kept."""


class RowOf(NamedTuple):
    """Which stack a lazy parameter is a row, or a part of a row, of.

    Attributes:
      depth: How many loops the row's loop is inside of.
      stack: The number of the stack among those that the loop scans.
    """

    depth: int
    stack: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Lazy:
    """A parameter that is made whole where it is used.

    Attributes:
      shard: This device's part, on the device or in host memory. [..., P/N]
      whole: The whole parameter if it is at hand; it serves uses that want it in its own dtype. [..., D]
      cut: How the part lies in the natural shape.
      wire: The axes to gather over.
      wire_dtype: What the value is cast to on the device that holds it, before it travels.
      dtype: What the whole value is cast to. Never narrower than `wire_dtype`.
      row_of: In the turn of a loop, the stack that it comes from.
    """

    shard: Any
    whole: jax.Array | None
    cut: Cut
    wire: Wire
    wire_dtype: Any
    dtype: Any
    row_of: RowOf | None = None

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Splits into arrays and static layout."""
        return (self.shard, self.whole), (self.cut, self.wire, self.wire_dtype, self.dtype, self.row_of)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> Lazy:
        """Joins what `tree_flatten` split."""
        return cls(*children, *aux)

    @property
    def shape(self) -> tuple[int, ...]:
        """Natural shape."""
        return self.cut.shape

    @property
    def key(self) -> Any:
        """What tells it from other parameters while its shard is alive."""
        return id(self.shard), self.cut

    def drop_leading(self) -> Lazy:
        """Returns the layout of one slice; the arrays are already sliced (by a scan)."""
        return dataclasses.replace(self, cut=self.cut.drop_leading())

    def gathered(self) -> jax.Array:
        """Returns the whole parameter as it travels. [..., P/N] -> [..., D]."""
        if not is_cut(self):
            assert self.whole is not None
            return self.whole
        # A shard in host memory is brought here, where it is needed.
        return gather_param(round_without_derivative(on_device(self.shard), self.wire_dtype), self.cut, self.wire)


class Operation(NamedTuple):
    """An equation's operation as a static, comparable value."""

    key: Any
    eqn: Equation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operation) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Deferred:
    """A cheap operation on lazy values alone, repeated at each use.

    Attributes:
      inputs: Lazy values, or arrays of one element.
      operation: The operation.
    """

    inputs: tuple[Any, ...]
    operation: Operation

    def tree_flatten(self) -> tuple[tuple[Any, ...], Operation]:
        """Splits into inputs and static operation."""
        return self.inputs, self.operation

    @classmethod
    def tree_unflatten(cls, operation: Operation, inputs: Sequence[Any]) -> Deferred:
        """Joins what `tree_flatten` split."""
        return cls(tuple(inputs), operation)

    @property
    def shape(self) -> tuple[int, ...]:
        """Natural shape."""
        return tuple(self.operation.eqn.outvars[0].aval.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self.operation.eqn.outvars[0].aval.dtype

    @property
    def num_operations(self) -> int:
        """Operations that one use repeats, those that it shares with itself counted each time."""
        return 1 + sum(x.num_operations for x in self.inputs if isinstance(x, Deferred))


def is_lazy(x: Any) -> bool:
    """Whether `x` is a lazy value."""
    return isinstance(x, Lazy | Deferred)


def is_cut(x: Any) -> bool:
    """Whether `x` is a parameter that has to be gathered."""
    return isinstance(x, Lazy) and (x.whole is None or x.whole.dtype != x.wire_dtype)


def is_constant(x: Any) -> bool:
    """Whether a value is known to the compiler: made of literals alone."""
    if isinstance(x, Deferred):
        return all(map(is_constant, x.inputs))
    return isinstance(x, bool | int | float | complex | np.ndarray | np.generic) and np.size(x) == 1


def num_bytes(values: Iterable[Any]) -> int:
    """Returns the size of arrays, and of parameters as they travel, whole."""

    def dtype(x: Any) -> Any:
        return jnp.dtype(x.wire_dtype if isinstance(x, Lazy) else x.dtype)

    return sum(math.prod(x.shape) * dtype(x).itemsize for x in values)


def defer(eqn: Equation, inputs: Sequence[Any]) -> Deferred | None:
    """Returns the equation's result as a deferred value, if it is cheap and takes parameters and numbers alone."""
    if eqn.primitive.name not in CHEAP or len(eqn.outvars) != 1:
        return None
    if not all(is_lazy(x) or np.size(x) == 1 for x in inputs):
        return None
    if sum(x.num_operations for x in inputs if isinstance(x, Deferred)) >= MAX_DEFERRED:
        return None
    key: Any
    try:
        key = (eqn.primitive, tuple(sorted(eqn.params.items())), eqn.outvars[0].aval)
        hash(key)
    except TypeError:  # parameters without an order or a hash: the equation itself is the key
        key = id(eqn)
    return Deferred(tuple(inputs), Operation(key, eqn))
