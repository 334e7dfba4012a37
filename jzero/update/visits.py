"""What a pass over records on disk computes, and its results.

An update whose state is on disk cannot be one program. `find_visits` says what to compute from each record, one `Visit`
per parameter; `records` computes it; `run.run_update` takes the results as `FromDisk`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jzero._types import DType
from jzero.layout.leaves import StateLeaf
from jzero.plan.plan import ZeroPlan
from jzero.update.chunks import Part, number_of_part
from jzero.update.split import Kernel

if TYPE_CHECKING:
    from jzero.update.columns import Columns


RecordResults: TypeAlias = tuple[list[jax.Array], list[jax.Array], list[jax.Array]]
"""The new fields, the results and the numbers of a record."""


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


class Programs:
    """The visits of one pass, and their jitted programs; one for all parameters that compute the same.

    Args:
      plan: The plan of the state.
      visits: What the pass computes, by parameter, as one trace of an update finds them: whatever that depends on, such
        as the optimizer and the factors of the gradients, these programs depend on, too.
    """

    def __init__(self, plan: ZeroPlan, visits: Sequence[Visit]) -> None:
        self.plan, self.visits = plan, visits
        self._jitted: dict[Hashable, Callable[..., RecordResults]] = {}

    def compute(self, visit: Visit) -> Callable[..., RecordResults]:
        """Returns `_compute` for one of the visits."""
        leaf = self.plan.leaves[visit.param].grad
        targets = tuple(x._replace(number=0) if isinstance(x, SumTarget) else x for x in visit.targets)
        key = (visit.structure, visit.sources, targets, leaf.cut, leaf.shape)
        if key not in self._jitted:
            self._jitted[key] = jax.jit(functools.partial(_compute, visit, leaf), static_argnames="shape")
        return self._jitted[key]


def _compute(  # noqa: PLR0913  # operands of a program, by kind
    visit: Visit,
    leaf: StateLeaf,
    fields: Sequence[jax.Array],
    slices: Sequence[jax.Array],
    numbers: Sequence[jax.Array],
    start: jax.Array,
    *,
    shape: tuple[int, ...],
) -> RecordResults:
    """Returns the new fields, the results and the numbers of one record.

    Args:
      visit: What to compute.
      leaf: The layout of the parameter's gradient.
      fields: The fields that it reads, [*shape].
      slices: The same rectangle of arrays, [*shape].
      numbers: 0-d arrays.
      start: Its place in the stored array, int32 [ndim].
      shape: The shape of the record.
    """
    part = Part(leaf, lambda dim: start[dim] + lax.broadcasted_iota(jnp.int32, shape, dim))
    operands = {"disk": iter(fields), "near": iter(slices), "number": iter(numbers)}
    operands |= {"grads": operands["near"], "params": operands["near"]}
    values = [part.positions() if x.kind == "positions" else next(operands[x.kind]) for x in visit.sources]
    outs = iter(visit.kernel(values, shape))
    new: list[jax.Array] = []
    results: list[jax.Array] = []
    sums: list[jax.Array] = []
    for target in visit.targets:
        if isinstance(target, SumTarget):
            factors = [next(outs) for _ in range(target.num_factors)]
            sums.append(number_of_part(part, factors, target.how, target.dtype))
        else:
            (new if isinstance(target, int) else results).append(part.without_padding(next(outs), 0))
    return new, results, sums
