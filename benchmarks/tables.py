"""Tables of figures as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Figures = dict[str, Any]
Show = Callable[[Figures], str]
Column = tuple[str, Show]

MIB, GB, MS = 2**20, 1e9, 1e-3


def table(columns: Sequence[Column], rows: Iterable[tuple[str, Figures]]) -> list[str]:
    """Returns a table with one line for each of `rows`; columns without any cell are left out."""
    rows = list(rows)
    shown = [(title, show) for title, show in columns if any(show(x) for _, x in rows)]
    if not shown:
        return ["", "Nothing was measured.", ""]
    lines = ["", f"| | {' | '.join(title for title, _ in shown)} |", "|---" * (len(shown) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(show(x) for _, show in shown)} |" for name, x in rows]
    return [*lines, ""]


def short(x: float) -> str:
    """Returns a number with three digits or all before the point, without an exponent."""
    digits = 2 - math.floor(math.log10(abs(float(f"{x:.3g}")))) if x else 0
    return f"{x:.{min(max(digits, 0), 6)}f}"


def number(key: str, unit: float = 1.0) -> Show:
    """Returns what shows a figure in a unit."""
    return lambda x: "" if x.get(key) is None else short(x[key] / unit)


def fixed(key: str, digits: int = 2) -> Show:
    """Returns what shows a figure with so many digits after the point, such as a ratio."""
    return lambda x: "" if x.get(key) is None else f"{x[key]:.{digits}f}"


def quotient(key: str, other: str) -> Show:
    """Returns what shows one figure as a part of another."""
    return lambda x: "" if x.get(key) is None or not x.get(other) else f"{x[key] / x[other]:.2f}"


def plan(x: Figures) -> str:
    """Shows whether a program keeps to its plan."""
    return "" if x.get("violations") is None else "departs" if x["violations"] else "kept"


def span(values: Iterable[float]) -> str:
    """Returns the range of some ratios."""
    ordered = sorted(values)
    return "none" if not ordered else f"{ordered[0]:.2f} to {ordered[-1]:.2f}"
