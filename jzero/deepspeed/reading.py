"""A configuration file as a dictionary."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["read_source"]


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a file holds, or the dictionary itself.

    Raises:
      ValueError: The file cannot be parsed, holds no dictionary, or holds a key twice.
      TypeError: `source` is neither a path nor a dictionary.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"A DeepSpeed configuration is a path or a dictionary: got {type(source).__name__}.")
    with open(source, encoding="utf-8") as file:
        found = _parse(file.read(), os.fspath(source))
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(source)!r} must hold a dictionary: got {type(found).__name__}.")
    return found


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
