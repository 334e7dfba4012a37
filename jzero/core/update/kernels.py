"""What is computed of each part of a parameter, a chunk, a record or columns: operands, results, and where they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var
from jax.typing import ArrayLike

from jzero.core.base.types import DType
from jzero.core.layout.casts import positions_of
from jzero.core.layout.leaves import StateLeaf
from jzero.core.update.split import REDUCTIONS


class OperandSource(NamedTuple):
    """Where a kernel finds an operand.

    Attributes:
      kind: "record" (a field of its record), "grads" or "params" (the parameter's own, as the step has it), "positions"
        (of elements in the natural array), "array" (any other, laid out like the gradient), or "scalar".
      number: Which one, of several of a kind.
    """

    kind: str
    number: int = 0


class SumTarget(NamedTuple):
    """A number over all elements of a parameter, joined from one per chunk, part or record.

    Attributes:
      number: Its number among all sums over parameters in records; 0 for another one.
      how: A primitive of `REDUCTIONS`.
      num_factors: How many results are multiplied first.
    """

    number: int
    how: str
    num_factors: int
    dtype: DType


Target: TypeAlias = int | DType | SumTarget
"""What becomes of a result: the number of what it overwrites, the dtype of a new array; or it is a factor of a sum."""


class Part(NamedTuple):
    """A part of a leaf as stored, inside of a program of one device.

    Attributes:
      along: Returns the index of each element of the part along a dimension of the stored array.
    """

    leaf: StateLeaf
    along: Callable[[int], jax.Array]

    def positions(self) -> jax.Array:
        """Returns the position of each element in the natural array."""
        cut, shape = self.leaf.cut, self.leaf.shape
        natural = shape if cut is None else cut.unpadded_shape
        return positions_of(natural, [self.along(d) for d in range(len(natural))])

    def without_padding(self, x: jax.Array, value: ArrayLike) -> jax.Array:
        """Returns an array with a value in place of padding."""
        cut = self.leaf.cut
        if cut is None or not cut.is_padded:
            return x
        return jnp.where(self.along(cut.stored_dim) < cut.natural_size, x, jnp.asarray(value, x.dtype))


class Field(NamedTuple):
    """An input that stays as it is stored until a kernel reads it.

    Attributes:
      param: The number of its parameter.
      leaf: The layout of the parameter's gradient, in which all its fields are stored.
      source: Where a pass over records finds it.
    """

    param: int
    leaf: StateLeaf
    source: OperandSource


class PartKernel(NamedTuple):
    """What a pass computes of each part of a parameter.

    Attributes:
      param: The number of its parameter.
      sources: Where its operands come from.
      kernel: The function, of operands and the shape of the part.
      targets: What becomes of its results: the number of the field that one replaces, the dtype of a new parameter or
        its update, or a sum over several.
      arrays: The operands of kind "array", in their order.
      scalars: Those of kind "scalar".
      structure: Equal for parameters that compute the same.
    """

    param: int
    kernel: Callable[[Sequence[jax.Array], tuple[int, ...]], list[jax.Array]]
    sources: tuple[OperandSource, ...]
    targets: tuple[Target, ...]
    arrays: tuple[Var, ...]
    scalars: tuple[Var, ...]
    structure: int

    def on(self, part: Part, read: Callable[[OperandSource], jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
        """Returns what becomes of the results on a part, by target: zeros as padding, and sums as 0-d arrays."""
        values = [part.positions() if x.kind == "positions" else read(x) for x in self.sources]
        outs = iter(self.kernel(values, shape))

        def result(target: Target) -> jax.Array:
            if not isinstance(target, SumTarget):
                return part.without_padding(next(outs), 0)
            reduce, _, neutral = REDUCTIONS[target.how]
            product = functools.reduce(lax.mul, [next(outs).astype(target.dtype) for _ in range(target.num_factors)])
            return reduce(part.without_padding(product, neutral)).astype(target.dtype)

        return list(map(result, self.targets))


def _in_records(fields: Sequence[Field]) -> Field | None:
    return next((field for field in fields if field.source.kind == "record"), None)
