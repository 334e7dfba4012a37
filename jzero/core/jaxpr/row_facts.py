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
    """

    SAME = 0
    ROW = 1
    LINEAR = 2
    UNKNOWN = 3
    COUPLED = 4


class Cause(NamedTuple):
    """The equation that combined rows.

    Attributes:
      primitive: Its primitive.
      how: "rows": it combines different rows; "ratio": it divides sums over rows; "sum": it applies a function that is
        not linear to a sum over rows.
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
      kind: How it depends on rows.
      row_dims: The dimensions along which elements belong to different rows; negative ones are passes of a scan.
      rows: How many rows the batch has.
      times: By how much more a row counts than in a mean: a sum over 8 rows has 8; 0 if it may be a mean.
      terms: How many elements of each row the last operation summed; a mean divides by that number next.
      number: The number that all elements equal, not a number if it is unknown; `None` if they may differ.
      cause: The equation that combined rows, or ceases to be linear with the next function.
    """

    differs: bool = False
    reads: bool = False
    kind: RowKind = RowKind.SAME
    row_dims: frozenset[int] = frozenset()
    rows: int = 1
    times: float = 1.0
    terms: int = 0
    number: float | None = None
    cause: Cause | None = None

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over rows that is not divided by a multiple of their number."""
        return self.kind is RowKind.LINEAR and not self.row_dims and self.times not in (0, 1)

    @property
    def coupled(self) -> Cause | None:
        """The equation that combined rows in a way that is not linear."""
        return self.cause if self.kind is RowKind.COUPLED else None

    def at(self, place: Callable[[int], int | None]) -> RowFacts:
        """Returns the facts after dimension `d` moved to `place(d)`; `None` drops it."""
        moved = (d if d < 0 else place(d) for d in self.row_dims)
        return self._replace(row_dims=frozenset(d for d in moved if d is not None), number=None)


SAME = RowFacts()


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
    dims, times = frozenset[int]().union(*(x.row_dims for x in values)), max(x.times for x in values)
    return RowFacts(kind=kind, row_dims=dims, rows=max(x.rows for x in values), times=times, cause=cause)


def collected(values: Sequence[RowFacts]) -> RowFacts:
    """Returns the facts of an array whose elements come from several."""
    values = [x for x in values if x.kind]
    return joined(values, max(x.kind for x in values)) if values else SAME


def applied(values: Sequence[RowFacts], eqn: JaxprEqn, how: How = "sum") -> RowFacts:
    """Returns the facts of any function of elements at the same position."""
    total = collected(values)._replace(times=1.0)
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
        total = total._replace(kind=RowKind.LINEAR, times=2 * total.times)
    is_shifted = total.kind is RowKind.LINEAR and total.row_dims and any(x.kind is RowKind.ROW for x in values)
    # x - x.mean(0): whatever is applied to it couples rows
    return joined([total], total.kind, eqn, "rows") if is_shifted else total


def scaled(x: RowFacts, number: float | None) -> RowFacts:
    """Returns the facts of a product with elements that all equal a number, see `RowFacts.number`."""
    size, is_row = 1.0 if number is None or x.kind > RowKind.LINEAR else abs(number), x.kind is RowKind.ROW
    if math.isnan(size):
        times = 0.0
    elif not 0 < size < 1 or abs(size * x.terms - 1) < 1e-3:  # no divisor, or that of a mean within each row
        times = x.times
    else:
        parts = 1 / (size * x.times or 1) / (x.rows if is_row else 1)  # 1: a mean; 2: one of half of the rows
        is_mean = parts > 0.999 and abs(parts / round(parts) - 1) < 1e-3
        times = 0.0 if is_mean else x.times if is_row else x.times * size
    return x._replace(terms=0, times=times)


def lost(values: Sequence[RowFacts], dims: Iterable[int] = ()) -> RowFacts:
    """Returns the facts of an operation that is not understood."""
    total = collected(values)
    kind = total.kind if total.kind in (RowKind.SAME, RowKind.COUPLED) else RowKind.UNKNOWN
    return total._replace(kind=kind, row_dims=frozenset(dims))


def summed(x: RowFacts, axes: Iterable[int], shape: Sequence[int]) -> RowFacts:
    """Returns the facts of sums along some dimensions."""
    left, own = x.at(without(axes)), x.row_dims & {*axes}
    count = math.prod(int(shape[d]) for d in own or axes)
    if not own or x.kind > RowKind.LINEAR:
        return left._replace(terms=count)
    cause = x.cause if left.row_dims else None
    return left._replace(kind=RowKind.LINEAR, times=x.times * math.gcd(count, x.rows), terms=0, cause=cause)


def mixed(x: RowFacts, dims: Iterable[int], eqn: JaxprEqn) -> RowFacts:
    """Returns the facts of a function of all elements along some dimensions."""
    couples = x.kind is RowKind.ROW and not x.row_dims.isdisjoint(dims)
    return joined([x], RowKind.COUPLED, eqn, "rows") if couples else applied([x], eqn)
