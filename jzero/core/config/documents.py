"""Files from outside: JSON that others wrote, or that the web did. They are checked before anything is made of them.

Each kind of file has one table of its fields, with their types and ranges, which `settings.block` checks.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MAX_DEPTH = 50
"""Levels of blocks. The files have four or so, and Python can follow some hundreds."""
MAX_VALUES = 100_000
"""Values in all blocks, where aliases can make any number of a few lines. Without them a file's size bounds both."""


def parse(
    data: bytes, name: object, loads: Callable[..., Any] = json.loads, says: str = "is no JSON"
) -> dict[str, Any]:
    """Returns the fields of a file.

    Args:
      data: What it holds.
      name: What errors call it.
      loads: Parses text, as `json.loads` does.
      says: What errors say if that fails.

    Raises:
      ValueError: It is not UTF-8, cannot be parsed, is no block, is nested too deeply, or has a field twice.
    """
    try:
        fields = loads(data.decode(), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(_too_deep(name)) from None
    except ValueError as error:
        raise ValueError(f"{name} {says} ({str(error).rstrip('.')}): correct it, or fetch it again.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{name} must hold a block of keys: got a {type(fields).__name__}.")
    check_size(fields, name, most=math.inf)
    return fields


def unique(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Returns a block from its names and values; raises a `ValueError` if a name is there twice."""
    counts = collections.Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"a block must have each key once: got {twice[:10]} more than once")
    return dict(pairs)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def check_size(
    value: object, name: object, inside: Callable[[Any], Iterable[object]] = _inside, *, most: float = MAX_VALUES
) -> None:
    """Raises a `ValueError` if blocks lie too deep in each other, in themselves, or hold too much.

    Args:
      value: The outermost block.
      name: What errors call it.
      inside: Returns what lies in a value; by default for data of Python.
      most: Most values, aliases counted.
    """
    stack, count = [(value, 0)], 0
    while stack:
        outer, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise ValueError(_too_deep(name))
        if count > most:
            raise ValueError(f"{name} holds more than {most:,} values, aliases counted: look for what multiplies.")
        stack += [(x, depth + 1) for x in inside(outer)]


def _too_deep(name: object) -> str:
    return f"{name} is nested deeper than {MAX_DEPTH} levels: check its braces."
