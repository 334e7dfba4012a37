"""Checks that what a loss returns for one part of the batch is what the step takes it for.

The step runs the loss once per device and micro-batch, each on its rows, and averages the results. That is the result
of the whole batch for a mean over independent rows, and for nothing else. `jzero.core.jaxpr.rows` reads off the traced
loss what each of its results is. If the batch is one part, every loss is right, and nothing is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jzero.core.base.guard import attempt, warn
from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree
from jzero.core.engine.outputs import Marked, PerExample, Summed, Weighted
from jzero.core.engine.trace import TracedLoss
from jzero.core.jaxpr.row_facts import SAME, RowFacts
from jzero.core.layout.mesh import batch_axes
from jzero.core.plan.plan import ZeroPlan

EXTREMES = {"reduce_max": "Max", "reduce_or": "Max", "reduce_min": "Min", "reduce_and": "Min"}
"""The marks for what some operations make of rows."""


class Result(NamedTuple):
    """One array that a loss returns.

    Attributes:
      name: Its name in messages: "loss", or `aux['accuracy']`.
      mark: How it is reduced: `Weighted`, or a kind of `Marked`; `None` if it is averaged.
      shape: Its shape and dtype.
    """

    name: str
    mark: type | None
    shape: jax.Array | jax.ShapeDtypeStruct
    facts: RowFacts

    @property
    def must_be_constant(self) -> bool:
        """Whether it cannot be averaged, and no mark says what else becomes of it."""
        return self.name != "loss" and self.mark is None and not jnp.issubdtype(self.shape.dtype, jnp.inexact)

    @property
    def needs_growth(self) -> bool:
        """Whether a trace over more rows may tell more about it."""
        is_equal = not self.facts.differs and not self.facts.reads
        return is_equal if self.must_be_constant else self.mark is None and self.facts.needs_growth


def results_of(traced: TracedLoss) -> list[Result]:
    """Returns the arrays that a traced loss returns, except the new values of the state."""
    loss, (aux, _) = traced.out_shape
    of_aux = jax.tree_util.tree_leaves_with_path(aux, is_leaf=lambda x: isinstance(x, Weighted | Marked))
    trees = [("loss", loss), *((f"aux[{path_str(path)!r}]", x) for path, x in of_aux)]
    marked = [y for name, x in trees for y in _marked(name, x)]
    facts = itertools.chain(traced.row_facts, itertools.repeat(SAME))  # if they were not asked for, nothing is known
    return [Result(*x, of_rows) for x, of_rows in zip(marked, facts, strict=False)]


def _marked(name: str, x: PyTree) -> Iterator[tuple[str, type | None, jax.Array | jax.ShapeDtypeStruct]]:
    """Yields the name, the mark and the shape of each array of a result."""
    if not isinstance(x, Weighted):
        yield (name, type(x), x.value) if isinstance(x, Marked) else (name, None, x)
        return
    is_aux = name != "loss" and not isinstance(x.sum, Summed)  # in `aux` of a train step it means nothing
    for field in ("sum", "weight"):
        part = getattr(x, field)
        yield f"{name}.{field}", None if is_aux else Weighted, part.value if isinstance(part, Summed) else part


def check_row_dims(results: list[Result], num_rows: int | None) -> None:
    """Raises a `TypeError` that names each value whose rows would be reduced over devices."""
    bad, move = [], ""
    for name, mark, shape, facts in results:
        if not facts.row_dims or mark in (Weighted, PerExample):
            continue
        rows, dims = "one value per example", sorted(facts.row_dims)
        if dims != [0] or shape.shape[0] != num_rows:
            rows = f"examples along dimension {', '.join(map(str, dims))}"
            move = " It takes them along dimension 0: `jnp.moveaxis(x, 1, 0)` or `x.reshape(rows, -1)` puts them there."
        bad.append(f"  {name}: {f'{mark.__name__} of ' if mark else ''}{shape.dtype}{list(shape.shape)}, {rows}")
    if bad:
        raise TypeError(
            "These values belong to single examples. Averages, sums or extremes over devices would mix examples that "
            "have nothing to do with each other:\n"
            + "\n".join(bad)
            + "\nWrap each in `jzero.PerExample(x)`, which returns those of the whole batch, or reduce it over the "
            f"examples first.{move}"
        )


def warn_coupled(results: list[Result], plan: ZeroPlan, num_parts: int, maker: str) -> bool:
    """Warns about results that are no means over independent rows. Returns whether it did."""
    lines = attempt(_troubles, results, plan)
    if not lines:
        return False
    warn(
        f"The loss runs on each of {num_parts} parts of the batch, and the results are averaged. For these that is not "
        "the result of the whole batch:\n" + "\n".join(lines) + f"\nIf you mean that: `{maker}(..., check_rows=False)`."
    )
    return True


def _troubles(results: list[Result], plan: ZeroPlan) -> list[str]:
    """Returns a line for each result that is no mean over independent rows, and one about what helps."""
    troubled = [(x, says) for x in results if (says := _trouble(x))]
    lines = [f"  {x.name} {says}" for x, says in troubled]
    axes = batch_axes(plan.config)
    axis = repr(axes[0] if len(axes) == 1 else axes)
    if any(x.facts.coupled and x.facts.coupled.how != "ratio" for x, _ in troubled):
        lines.append(
            f"Rows that need all others get them by `jax.lax.all_gather(x, {axis}, tiled=True)`, their mean by "
            f"`jax.lax.pmean(x.mean(0), {axis})`, and batch statistics by `nn.BatchNorm(axis_name={axis})`."
        )
    return lines


def _trouble(result: Result) -> str:
    """Returns what is wrong with a result, and what to do; empty if it is a mean, or if that is unknown."""
    name, mark, shape, facts = result
    if mark not in (None, Weighted) or not jnp.issubdtype(shape.dtype, jnp.number):
        return ""
    is_loss, cause = name.startswith("loss"), facts.coupled
    if cause is None:
        other = "`jzero.Weighted(sum, weight)`" if is_loss else "`jzero.Summed(x)`"
        return f"is a sum over rows: return the mean, or {other}." if facts.is_sum and mark is None else ""
    where = f"`{cause.primitive}` at {cause.source or 'an unknown line'}"
    if cause.how == "ratio":
        way = "`jzero.Weighted(sum, weight)`" if is_loss else "sum and weight as `jzero.Summed`, and divide them then"
        return f"divides by a sum over rows, {where}: for a mean over some elements return {way}."
    if not is_loss and (mark_for := EXTREMES.get(cause.primitive)):
        return f"combines different rows, {where}: return `jzero.{mark_for}(x)`."
    if cause.how == "sum":
        way = "apply it to each row" if is_loss else "return the mean, and apply it to what the step returns"
        return f"applies a function to a sum over rows, {where}: {way}."
    return f"combines different rows, {where}."
