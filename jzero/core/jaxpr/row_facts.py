"""How a value depends on the rows of the batch, and how sums, products and other functions of such values do.

Facts name the dimensions that hold rows, not which row is where: any rows along a dimension are taken for the same rows
in the same order. So what a shuffled batch, or one half of it, is combined with goes unnoticed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from jzero.core.base import compat

How: TypeAlias = Literal["rows", "ratio", "sum"]


class RowKind(enum.IntEnum):
    """How a value depends on rows. Operations that keep kinds give the highest of their operands'.

    Attributes:
      SAME: Not at all.
      ROW: Each element depends on one row: `x @ w`.
      LINEAR: Each element is a sum over rows of functions of single rows: `losses.mean()`, `x - x.mean(0)`.
      UNKNOWN: In an unknown way.
      COUPLED: Some element is a function of several rows that is no such sum: `jnp.square(x - x.mean(0))`.
      EXCHANGED: It is made with rows of other devices, which the program asked for.
    """

    SAME = 0
    ROW = 1
    LINEAR = 2
    UNKNOWN = 3
    COUPLED = 4
    EXCHANGED = 5


class Cause(NamedTuple):
    """The equation that combined rows.

    Attributes:
      how: "rows": it combines different rows; "ratio": it divides by a sum over rows; "sum": it applies some other
        function to a sum over rows that is not linear.
      source: The line of the program, e.g. `train.py:12 (loss_fn)`; empty if it is not known.
    """

    primitive: str
    how: How
    source: str


class RowFacts(NamedTuple):
    """How one value depends on the rows of the batch.

    Attributes:
      differs: Whether devices may have different values.
      reads: Whether it is made from rows, be it through a collective that makes it equal on all devices.
      row_dims: The dimensions along which elements belong to different rows; negative ones are passes of a scan.
      rows: How many rows the batch has.
      cause: The equation that combined rows, or ceases to be linear with the next function.
      growth: How it grows with the number of rows, see `jzero.core.jaxpr.growth`; not a number if that is unknown.
      terms: Of a plain sum over rows, the number of its terms; 1 of their mean; 0 of anything else.
    """

    differs: bool = False
    reads: bool = False
    kind: RowKind = RowKind.SAME
    row_dims: frozenset[int] = frozenset()
    rows: int = 1
    cause: Cause | None = None
    growth: float = math.nan
    terms: int = 0

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over rows, and known to be no mean."""
        return self.may_be_sum and abs(self.growth) > LEAST_GROWTH  # false if it is not a number

    @property
    def may_be_sum(self) -> bool:
        """Whether it is a sum over rows, a mean, or of single rows, of which a loop may add up all."""
        return self.kind in (RowKind.ROW, RowKind.LINEAR) and not self.row_dims

    @property
    def needs_growth(self) -> bool:
        """Whether only a trace over more rows tells a sum from a mean."""
        return self.may_be_sum and self.terms != 1

    @property
    def is_constant(self) -> bool:
        """Whether it is known to be the same for all rows, however many there are."""
        return not self.differs and not self.reads and self.growth in (0, -math.inf)

    @property
    def coupled(self) -> Cause | None:
        """The equation that combined rows in a way that is not linear."""
        return self.cause if self.kind is RowKind.COUPLED else None

    def at(self, place: Callable[[int], int | None]) -> RowFacts:
        """Returns the facts after dimension `d` moved to `place(d)`; `None` drops it."""
        moved = (d if d < 0 else place(d) for d in self.row_dims)
        return self._replace(row_dims=frozenset(d for d in moved if d is not None))


SAME = RowFacts()
LEAST_GROWTH = 1e-3
"""What grows by less does not: `x.sum() / (len(x) + 1e-8)` is a mean."""
LEAST_TERMS = 256
"""A sum of so many terms, divided by their number, is a mean. A smaller number may be any constant: the loss says no
more than one trace shows, and `x.sum() / 8` is no mean because a device happens to have eight rows."""


def without(axes: Iterable[int]) -> Callable[[int], int | None]:
    """Returns where dimensions are once some are gone."""
    gone = {*axes}
    return lambda d: None if d in gone else d - sum(a < d for a in gone)


def joined(values: Sequence[RowFacts], kind: RowKind, eqn: JaxprEqn | None = None, how: How = "sum") -> RowFacts:
    """Returns facts of this kind about a result that reads all values; `eqn` combines rows, unless one before did."""
    causes = [x.cause for x in sorted(values, key=lambda x: -x.kind) if x.cause is not None]
    cause = next((x for x in causes if x.how == "ratio"), causes[0] if causes else None)  # which has a simple remedy
    if cause is None and eqn is not None:
        cause = Cause(eqn.primitive.name, how, compat.source_of(eqn))
    dims = frozenset[int]().union(*(x.row_dims for x in values))
    return RowFacts(kind=kind, row_dims=dims, rows=max(x.rows for x in values), cause=cause)


def collected(values: Sequence[RowFacts]) -> RowFacts:
    """Returns the facts of an array whose elements come from several."""
    values = [x for x in values if x.kind]
    return joined(values, max(x.kind for x in values)) if values else SAME


def applied(values: Sequence[RowFacts], eqn: JaxprEqn, how: How = "sum") -> RowFacts:
    """Returns the facts of any function of elements at the same position."""
    total = collected(values)
    if total.kind is RowKind.ROW and _cross(values):
        return joined([total], RowKind.COUPLED, eqn, "rows")
    return joined([total], RowKind.COUPLED, eqn, how) if total.kind is RowKind.LINEAR else total


def _cross(values: Sequence[RowFacts]) -> bool:
    """Whether values have rows along different dimensions, as in `x[:, None] - x`."""
    found = [x for x in values if x.kind]
    return len({x.row_dims for x in found}) > 1 and max(x.rows for x in found) > 1


def added(values: Sequence[RowFacts], eqn: JaxprEqn) -> RowFacts:
    """Returns the facts of a sum of elements at the same position."""
    total = collected(values)
    if total.kind is RowKind.ROW and _cross(values):
        total = total._replace(kind=RowKind.LINEAR)
    is_shifted = total.kind is RowKind.LINEAR and total.row_dims and any(x.kind is RowKind.ROW for x in values)
    # x - x.mean(0): whatever is applied to it couples rows
    return joined([total], total.kind, eqn, "rows") if is_shifted else total


def lost(values: Sequence[RowFacts], dims: Iterable[int] = ()) -> RowFacts:
    """Returns the facts of an operation that is not understood."""
    total = collected(values)
    kind = RowKind.UNKNOWN if total.kind in (RowKind.ROW, RowKind.LINEAR) else total.kind
    return total._replace(kind=kind, row_dims=frozenset(dims))


def summed(x: RowFacts, axes: Iterable[int]) -> RowFacts:
    """Returns the facts of sums along some dimensions."""
    left = x.at(without(axes))
    if x.row_dims.isdisjoint(axes) or x.kind > RowKind.LINEAR:
        return left
    return left._replace(kind=RowKind.LINEAR, cause=x.cause if left.row_dims else None)


def mixed(x: RowFacts, dims: Iterable[int], eqn: JaxprEqn) -> RowFacts:
    """Returns the facts of a function of all elements along some dimensions."""
    couples = x.kind is RowKind.ROW and not x.row_dims.isdisjoint(dims)
    return joined([x], RowKind.COUPLED, eqn, "rows") if couples else applied([x], eqn)
