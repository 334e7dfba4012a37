"""How a value depends on the rows of the batch, and how the result of an operation depends on them.

The kinds of `Kind` are ordered: if an operation keeps kinds, its result has the highest of its operands.

    x @ w                      ROW      each element belongs to one row
    losses.mean()              LINEAR   a sum over rows, divided by their number
    x - x.mean(0)              LINEAR   each element is a sum over rows; still one per row
    jnp.square(x - x.mean(0))  COUPLED  a function of several rows that is no sum
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from jzero import _compat
from jzero.jaxpr.row_layouts import Layout, merged, without_units

Number: TypeAlias = float | Literal["unknown"] | None
HALF = 2.0


class Kind(enum.IntEnum):
    """How a value depends on the rows of the batch.

    Attributes:
      SAME: Not at all.
      ROW: Each element depends on one row.
      LINEAR: Each element is a sum over rows of functions of single rows.
      UNKNOWN: In an unknown way.
      COUPLED: Some element is a function of several rows that is no such sum.
    """

    SAME = 0
    ROW = 1
    LINEAR = 2
    UNKNOWN = 3
    COUPLED = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    """The equation that combined rows.

    Attributes:
      eqn: The equation.
      how: "rows": it combines different rows; "ratio": it divides sums over rows; "sum": it applies a function that is
        not linear to a sum over rows.
      place: The equation whose line of the program counts: a call of a function of jax that contains `eqn`.
    """

    eqn: JaxprEqn
    how: Literal["rows", "ratio", "sum"]
    place: JaxprEqn | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cause) and self.eqn is other.eqn and self.place is other.place

    def __hash__(self) -> int:
        return id(self.eqn)

    @property
    def source(self) -> str:
        """The line of the program, e.g. `train.py:12 (loss_fn)`; empty if it is not known."""
        return _compat.source_of(self.eqn if self.place is None else self.place)


class Origin(NamedTuple):
    """Which rows the positions of an array stand for.

    Attributes:
      token: Equal for arrays whose positions stand for the same rows.
      first: The row at position 0.
      is_exact: Whether different origins mean different rows.
    """

    token: Hashable
    first: int = 0
    is_exact: bool = True


BATCH = Origin("batch")


def unknown_origin(place: JaxprEqn, number: int = 0) -> Origin:
    """Returns the origin of rows whose order is not known, such as that of `x[permutation]`, by the equation."""
    return Origin(("unknown", id(place), number), is_exact=False)


class Scale(NamedTuple):
    """What a sum over rows was divided by.

    Attributes:
      rows: Over how many rows it was taken.
      divisor: The product of the numbers that it was divided by.
      is_mean: Whether that is a multiple of the rows, or may be one.
      reduced: How many elements of each row the last operation summed; a mean divides by that number next.
    """

    rows: int = 1
    divisor: float = 1.0
    is_mean: bool = False
    reduced: int = 0

    def checked(self) -> Scale:
        """Returns the scale of a sum over rows, which is a mean once its divisor is a multiple of the rows."""
        times = self.divisor / self.rows
        return Scale(self.rows, self.divisor, self.is_mean or (times > 0.999 and abs(times / round(times) - 1) < 1e-3))


class Value(NamedTuple):
    """How a value depends on the rows of the batch.

    Attributes:
      kind: How it depends on rows.
      layout: Where it has rows.
      origin: Which rows these are, if each element belongs to one.
      scale: What sums over rows were divided by.
      number: The number that all of its elements equal, if it does not depend on rows.
      cause: The equation that combined rows in a way that is not linear, or ceases to be with the next function.
    """

    kind: Kind
    layout: Layout = ()
    origin: Origin = BATCH
    scale: Scale = Scale()
    number: Number = None
    cause: Cause | None = None

    def at(self, layout: Layout, origin: Origin | None = None) -> Value:
        """Returns the value with another layout of its rows."""
        if self.kind is Kind.SAME:
            return self
        return Value(self.kind, layout, self.origin if origin is None else origin, self.scale, None, self.cause)

    def with_scale(self, scale: Scale) -> Value:
        """Returns the value after a multiplication."""
        return Value(self.kind, self.layout, self.origin, scale, None, self.cause)


SAME = Value(Kind.SAME)


def _are_aligned(values: Sequence[Value]) -> bool:
    """Whether values, all with rows, have the same ones in the same places."""
    first, *others = values
    return all(
        x.origin == first.origin
        and (x.layout == first.layout or without_units(x.layout) == without_units(first.layout))
        for x in others
    )


def _layout(values: Sequence[Value]) -> Layout:
    return values[0].layout if len(values) == 1 else merged(x.layout for x in values)


def _worst(values: Sequence[Value]) -> Kind:
    return max(x.kind for x in values)


def _cause(values: Sequence[Value]) -> Cause | None:
    causes = [x.cause for x in sorted(values, key=lambda x: -x.kind) if x.cause is not None]
    return next((x for x in causes if x.how == "ratio"), causes[0] if causes else None)  # which has a simple remedy


def applied(values: Sequence[Value], eqn: JaxprEqn, *, how: Literal["rows", "ratio", "sum"] = "sum") -> Value:
    """Returns the value of any function of elements at the same position."""
    values = [x for x in values if x.kind]
    if not values:
        return SAME
    layout, worst = _layout(values), _worst(values)
    if worst is Kind.COUPLED or any(x.kind is Kind.LINEAR for x in values):
        return Value(Kind.COUPLED, layout, cause=_cause(values) or Cause(eqn, how))
    if worst is Kind.UNKNOWN:
        return Value(Kind.UNKNOWN, layout)
    if _are_aligned(values):
        return Value(Kind.ROW, layout, values[0].origin)
    if all(x.origin.is_exact for x in values):
        return Value(Kind.COUPLED, layout, cause=Cause(eqn, "rows"))
    return Value(Kind.UNKNOWN, layout)


def added(values: Sequence[Value], eqn: JaxprEqn) -> Value:
    """Returns the value of a sum of elements at the same position."""
    values = [x for x in values if x.kind]
    if len(values) < 2:
        return values[0] if values else SAME
    layout, worst, cause = _layout(values), _worst(values), _cause(values)
    if worst > Kind.LINEAR:
        return Value(worst, layout, cause=cause)
    scale, rowwise = _scale(values), [x for x in values if x.kind is Kind.ROW]
    if worst is Kind.ROW:
        if _are_aligned(values):
            return Value(Kind.ROW, layout, values[0].origin, scale)
        if not all(x.origin.is_exact for x in values):
            return Value(Kind.UNKNOWN, layout)
    if layout and rowwise and cause is None:
        cause = Cause(eqn, "rows")  # x - x.mean(0): whatever is applied to it couples rows
    return Value(Kind.LINEAR, layout, scale=scale, cause=cause)


def _scale(values: Sequence[Value]) -> Scale:
    sums = [x.scale for x in values if not x.scale.is_mean]  # what is added to a mean does not divide it
    if not sums:
        return values[0].scale
    return Scale(max(x.rows for x in sums), min(x.divisor for x in sums))


def scaled(x: Value, number: Number) -> Value:
    """Returns the value of a product with a value without rows; its elements equal `number` unless that is `None`."""
    if x.kind is Kind.LINEAR and not isinstance(number, float):
        return x.with_scale(x.scale._replace(is_mean=True, reduced=0))  # it may be one
    if x.kind not in (Kind.ROW, Kind.LINEAR) or number is None:
        return x
    if number == "unknown":
        return x.with_scale(x.scale._replace(is_mean=True, reduced=0))
    assert isinstance(number, float)
    size = abs(number)
    if size >= 1 or size == 0:
        return x.with_scale(x.scale._replace(reduced=0))
    if x.scale.reduced and abs(size * x.scale.reduced - 1) < 1e-3:
        return x.with_scale(x.scale._replace(reduced=0))  # a mean over elements of each row
    if x.kind is Kind.ROW and 1 / size == HALF:  # as in 0.5 * jnp.square(...)
        return x.with_scale(x.scale._replace(reduced=0))
    scale = Scale(x.scale.rows, x.scale.divisor / size, x.scale.is_mean)
    return x.with_scale(scale.checked() if x.kind is Kind.LINEAR else scale)


def collected(values: Sequence[Value], eqn: JaxprEqn, layout: Layout, *, keeps_order: bool) -> Value:
    """Returns the value of an array whose elements are taken from several values.

    Args:
      values: The values.
      eqn: The equation.
      layout: Where the result has rows.
      keeps_order: Whether positions still stand for the same rows, if they do in all values.
    """
    values = [x for x in values if x.kind]
    if not values:
        return SAME
    worst = _worst(values)
    if worst is Kind.ROW and keeps_order and _are_aligned(values):
        return Value(Kind.ROW, layout, values[0].origin, _scale(values))
    origin = unknown_origin(eqn) if worst is Kind.ROW else BATCH
    return Value(worst, layout, origin, _scale(values), cause=_cause(values))


def joined(x: Value, y: Value, place: JaxprEqn, number: int) -> Value:
    """Returns the value of what may be either: results of branches, or of a loop's passes."""
    if x == y:
        return x
    if not x.kind and not y.kind:
        return Value(Kind.SAME, number="unknown") if x.number is not None and y.number is not None else SAME
    moving = [v for v in (x, y) if v.kind]
    layout, worst = _layout(moving), _worst(moving)
    if worst is Kind.ROW:
        origin = moving[0].origin if _are_aligned(moving) else unknown_origin(place, number)
        return Value(worst, layout, origin, _scale(moving))
    return Value(worst, layout, scale=_scale(moving), cause=_cause(moving))
