"""What a pass over records on disk computes, and its results.

An update whose state is on disk cannot be one program. `find_visits` says what to compute from each record, one `Visit`
per parameter; `records` computes it; `run.run_update` takes the results as `FromDisk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax

from jzero._types import DType
from jzero.update.split import Kernel

if TYPE_CHECKING:
    from jzero.update.columns import Columns


class FromDisk(NamedTuple):
    """Results of passes over records, for the rest of an update.

    Attributes:
      sums: Numbers over fields on disk, by their number among all such sums.
      results: By parameter with state on disk, its new value, laid out like its gradient; none if nothing changes.
      columns: The columns that are updated on the devices, see `jzero.update.columns`; `None` if there are none.
    """

    sums: Mapping[int, jax.Array]
    results: Mapping[int, jax.Array]
    columns: Columns | None = None


NO_DISK = FromDisk({}, {})


class Source(NamedTuple):
    """Where a pass over records gets an operand.

    Attributes:
      kind: "disk" (a field of the record), "grads" or "params" (the parameter's own, as the step has it), "near" (an
        array that the program of numbers returns), "number", or "positions" (of elements in the natural array).
      number: Which one, of several of a kind.
    """

    kind: str
    number: int = 0


class SumTarget(NamedTuple):
    """A number over all elements of a parameter, joined from one per record.

    Attributes:
      number: Its number among all sums over fields on disk.
      how: A primitive of `REDUCTIONS`.
      num_factors: How many results are multiplied first.
      dtype: Its dtype.
    """

    number: int
    how: str
    num_factors: int
    dtype: DType


class Visit(NamedTuple):
    """What a pass computes from each record of a parameter.

    Attributes:
      param: The parameter.
      kernel: The elementwise function.
      sources: Where its operands come from.
      targets: What becomes of its results: the number of the field that it replaces, the dtype of a new parameter or
        its update, or a sum over several results.
      structure: Equal for parameters that compute the same.
    """

    param: int
    kernel: Kernel
    sources: tuple[Source, ...]
    targets: tuple[int | DType | SumTarget, ...]
    structure: int

    @property
    def makes_sums(self) -> bool:
        """Whether it computes sums, rather than new records."""
        return any(isinstance(x, SumTarget) for x in self.targets)


class VisitOperands(NamedTuple):
    """What the program of numbers computes for a visit: arrays laid out like the gradient, and numbers."""

    near: list[jax.Array]
    numbers: list[jax.Array]
