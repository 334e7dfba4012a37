"""Which cases of a matrix run by default; the others are `-m slow`.

A case of the default suite must be able to find what no other case finds. Most faults show with one value of one
parameter, so by default a matrix runs each value once.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def singles(ids: Callable[[Any], str] | None = None, /, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes by the product of `values`; by default each value runs once."""
    # Values need not be hashable, so positions stand for them.
    rows = list(itertools.product(*(range(len(column)) for column in values.values())))
    missing = {x for row in rows for x in enumerate(row)}
    default: set[tuple[int, ...]] = set()
    times: collections.Counter[tuple[int, int]] = collections.Counter()  # that a parameter had a value
    while missing:
        # Of the rows that cover most the one whose values ran least; of these the first, so the choice never changes.
        best = max(rows, key=lambda row: (len({*enumerate(row)} & missing), -sum(times[x] for x in enumerate(row))))
        default.add(best)
        times.update(enumerate(best))
        missing -= {*enumerate(best)}
    cases = []
    for row in rows:
        case = [column[i] for column, i in zip(values.values(), row, strict=True)]
        cases.append(pytest.param(*case) if row in default else slow(*case))
    return pytest.mark.parametrize(list(values), cases, ids=ids)


def stages(*default: int, of: Sequence[int] = (0, 1, 2, 3)) -> pytest.MarkDecorator:
    """Parametrizes by `stage`; by default only those given run."""
    return pytest.mark.parametrize("stage", default_for(default, of))


def default_for(default: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns `cases` as parameters of pytest, slow unless they are in `default`; a tuple is several parameters."""
    default = list(default)
    return [case if case in default else slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def slow(*values: Any) -> Any:
    """A case that only `-m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
