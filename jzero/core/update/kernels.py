"""What one pass over records computes of a parameter: operands, results, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Var

from jzero.core.base.types import DType
from jzero.core.layout.leaves import StateLeaf
from jzero.core.update.chunks import Part, number_of_part
from jzero.core.update.split import Kernel


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
    """A number over all elements of a parameter, joined from one per record.

    Attributes:
      number: Its number among all sums over parameters in records.
      how: A primitive of `REDUCTIONS`.
      num_factors: How many results are multiplied first.
    """

    number: int
    how: str
    num_factors: int
    dtype: DType


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


class RecordKernel(NamedTuple):
    """What a pass computes from each record of a parameter.

    Attributes:
      param: The number of its parameter.
      sources: Where its operands come from.
      targets: What becomes of its results: the number of the field that it replaces, the dtype of a new parameter or
        its update, or a sum over several results.
      arrays: The operands of kind "array", in their order.
      scalars: Those of kind "scalar".
      structure: Equal for parameters that compute the same.
    """

    param: int
    kernel: Kernel
    sources: tuple[OperandSource, ...]
    targets: tuple[int | DType | SumTarget, ...]
    arrays: tuple[Var, ...]
    scalars: tuple[Var, ...]
    structure: int

    def on(self, part: Part, read: Callable[[OperandSource], jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
        """Returns what becomes of a piece of a part, by target: zeros as padding, and sums as scalars."""
        values = [part.positions() if x.kind == "positions" else read(x) for x in self.sources]
        outs = iter(self.kernel(values, shape))

        def result(target: int | DType | SumTarget) -> jax.Array:
            if not isinstance(target, SumTarget):
                return part.without_padding(next(outs), 0)
            factors = [next(outs) for _ in range(target.num_factors)]
            return number_of_part(part, factors, target.how, target.dtype)

        return list(map(result, self.targets))


def _in_records(fields: Sequence[Field]) -> Field | None:
    return next((field for field in fields if field.source.kind == "record"), None)
