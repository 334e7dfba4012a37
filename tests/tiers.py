"""Which cases of a matrix run by default; the others are `-m slow`.

A case must be able to find what no other case finds. Most faults show with one value of one parameter: a matrix has the
cases that differ in mechanism, each value in one of them, and by default runs fewer still.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def default_for(default: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns `cases` as parameters of pytest, slow unless they are in `default`; a tuple is several parameters."""
    default = list(default)
    return [case if case in default else slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def slow(*values: Any) -> Any:
    """A case that only `-m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
