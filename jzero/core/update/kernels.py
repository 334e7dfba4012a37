"""What one pass over records computes of a parameter: operands, results, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Var

from jzero.core.layout.leaves import StateLeaf
from jzero.core.update.chunks import Part, Target, by_target
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
    targets: tuple[Target, ...]
    arrays: tuple[Var, ...]
    scalars: tuple[Var, ...]
    structure: int

    def on(self, part: Part, read: Callable[[OperandSource], jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
        """Returns the results on a piece of a part, see `by_target`."""
        values = [part.positions() if x.kind == "positions" else read(x) for x in self.sources]
        return by_target(part, self.kernel(values, shape), self.targets)


def _in_records(fields: Sequence[Field]) -> Field | None:
    return next((field for field in fields if field.source.kind == "record"), None)
