"""A configuration file as a dictionary."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 50
"""Levels of blocks; DeepSpeed's own have four."""


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a file holds, or the dictionary itself.

    Raises:
      ValueError: The file cannot be parsed, holds no dictionary or a key twice, or is nested too deeply.
      TypeError: `source` is neither a path nor a dictionary.
    """
    if isinstance(source, Mapping):
        _check_depth(source, "The DeepSpeed configuration")
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"A DeepSpeed configuration is a path or a dictionary: got {type(source).__name__}.")
    name = repr(os.fspath(source))
    with open(source, encoding="utf-8") as file:
        try:
            found = _parse(file.read(), os.fspath(source))
        except RecursionError:
            raise ValueError(_too_deep(name)) from None
    _check_depth(found, name)
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(source)!r} must hold a dictionary: got {type(found).__name__}.")
    return found


def _check_depth(value: Any, name: str) -> None:
    """Raises if blocks lie inside each other deeper than Python can follow, or inside themselves."""
    stack = [(value, 0)]
    while stack:
        found, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ValueError(_too_deep(name))
        if isinstance(found, Mapping):
            stack += [(x, depth + 1) for x in found.values()]
        elif isinstance(found, list | tuple):
            stack += [(x, depth + 1) for x in found]


def _too_deep(name: str) -> str:
    return f"{name} is nested deeper than {MAX_DEPTH} levels, which no DeepSpeed configuration is: mend it."


def _parse(text: str, path: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        # DeepSpeed reads Hjson, which has comments and trailing commas. Few files make use of that.
        if importlib.util.find_spec("hjson") is None:
            raise ValueError(
                f"{path!r} is not plain JSON: {error}. If it is Hjson (comments, trailing commas), which DeepSpeed "
                "reads, `pip install hjson`, or hand in a dictionary."
            ) from error
    hjson = importlib.import_module("hjson")
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except hjson.HjsonDecodeError as error:
        raise ValueError(f"{path!r} is neither JSON nor Hjson: {error}.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = collections.Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"A DeepSpeed configuration must have each key once: got {twice} more than once in one block.")
    return dict(pairs)
