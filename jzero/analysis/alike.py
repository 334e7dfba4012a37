"""Rows of a table that are alike: they differ from one above them in a single option."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def grouped(rows: Iterable[T], options: Callable[[T], Mapping[str, str]], apart: str) -> list[tuple[T, str]]:
    """Returns the first row of each group, and what the others differ in from it, in words.

    Args:
      rows: The rows, best first.
      options: The options of a row, by name.
      apart: The option in which rows of a group never differ.

    Example:
      >>> from jzero.analysis.alike import grouped
      >>> rows = [{"stage": "1", "mesh": "a"}, {"stage": "1", "mesh": "b"}, {"stage": "3", "mesh": "c"}]
      >>> [(row["mesh"], alike) for row, alike in grouped(rows, dict, "stage")]
      [('a', '1 by mesh'), ('c', '')]
    """
    groups: list[tuple[T, collections.Counter[str]]] = []
    for row in rows:
        for first, others in groups:
            differs = [name for name, value in options(row).items() if options(first)[name] != value]
            if len(differs) == 1 and differs[0] != apart:
                others[differs[0]] += 1
                break
        else:
            groups.append((row, collections.Counter()))
    return [(row, ", ".join(f"{n} by {name}" for name, n in others.items())) for row, others in groups]
