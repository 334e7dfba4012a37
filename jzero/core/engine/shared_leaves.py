"""Several lazy values, split into their distinct leaves and expressions of these.

    SharedLeaves.of(values) -> SharedLeaves

Values that share parameters, such as `w` and `2 * w`, have the distinct leaves `(w,)`, and each is an expression of
them. So a parameter that occurs in two values is gathered once, and all values can be passed to a function as a pytree.
`LazyRows` holds lazy values that the iterations of a loop return, one for each iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

import jax

from jzero.core.engine.lazy import Deferred, Leaf, Operand, Operation, ShardedParam, is_lazy
from jzero.core.jaxpr.identity import IdDict

if TYPE_CHECKING:
    from typing_extensions import TypeIs


T = TypeVar("T")
Expression: TypeAlias = "int | tuple[Operation, tuple[Expression, ...]]"
Expressions: TypeAlias = tuple[Expression, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["expressions"])
@dataclasses.dataclass(frozen=True)
class SharedLeaves:
    """Values, as distinct leaves and expressions of them.

    Attributes:
      leaves: The distinct lazy parameters and arrays.
      expressions: One per value: the index of a leaf, or an operation with the expressions of its inputs.
    """

    leaves: tuple[Value, ...]
    expressions: Expressions

    @classmethod
    def of(cls, values: Iterable[Value]) -> SharedLeaves:
        """Splits arrays and lazy values."""
        leaves: list[Value] = []  # distinct, in the order of their first use
        index: IdDict[Value, int] = IdDict()

        def expression(x: Value) -> Expression:
            if isinstance(x, Deferred):
                return x.operation, tuple(map(expression, x.inputs))  # hashable, so that equal ones run once
            i = index.setdefault(x, len(leaves))
            if i == len(leaves):
                leaves.append(x)
            return i

        expressions = tuple(map(expression, values))
        return cls(tuple(leaves), expressions)

    def values(self) -> list[Value]:
        """Returns the values; equal values are one object."""
        return self._make(lambda operation, inputs: Deferred(tuple(cast("list[Operand]", inputs)), operation))

    def compute(self) -> list[jax.Array]:
        """Returns the values as arrays, if all leaves are arrays; equal values are computed once."""
        return self._make(lambda operation, inputs: operation.apply(inputs))

    def _make(self, apply: Callable[[Operation, list[T]], T]) -> list[T]:
        results: dict[Expression, T] = {}

        def value(x: Expression) -> T:
            if isinstance(x, int):
                return cast("T", self.leaves[x])
            if x not in results:  # an operation that two values share runs once
                results[x] = apply(x[0], [value(y) for y in x[1]])
            return results[x]

        return [value(x) for x in self.expressions]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static(Generic[T]):
    """A static value that a function returns from its trace, instead of an array."""

    value: T


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["stacks", "shared"], meta_fields=["places", "expression"]
)
@dataclasses.dataclass(frozen=True)
class LazyRows:
    """Lazy values that the iterations of a loop returned, one for each iteration, such as cast weights.

    Attributes:
      stacks: Leaves that differ from iteration to iteration: stacks of parameters and arrays, with a leading dimension.
      shared: Leaves that are the same in all iterations.
      places: For each leaf of a row, whether it is shared, and its index in `shared` or `stacks`.
      expression: What a row is, as in `SharedLeaves`.
    """

    stacks: tuple[Leaf, ...]  # [L, D/N, F] for a parameter, else [L, ...]
    shared: tuple[Value, ...]
    places: tuple[tuple[bool, int], ...]
    expression: Expression

    def row(self, rows: Sequence[Leaf]) -> Value:
        """Returns the lazy value of one iteration, given that iteration's row of each stack."""
        leaves = tuple(self.shared[i] if is_shared else rows[i] for is_shared, i in self.places)  # parameters: [D/N, F]
        return SharedLeaves(leaves, (self.expression,)).values()[0]


Value: TypeAlias = "jax.Array | ShardedParam | Deferred | LazyRows"
"""A value of the walk."""


def is_unevaluated(x: object) -> TypeIs[ShardedParam | Deferred | LazyRows]:
    """Whether `x` is a lazy value, or rows of them."""
    return is_lazy(x) or isinstance(x, LazyRows)
