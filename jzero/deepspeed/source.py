"""A configuration as a dictionary: DeepSpeed's own, or the one that Accelerate makes of its YAML."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from jzero.deepspeed.accelerate import BLOCK, FILE, from_accelerate
from jzero.deepspeed.key import Block

MAX_DEPTH = 50
"""Levels of blocks; DeepSpeed's own have four."""


class Source(NamedTuple):
    """A configuration, and the devices that Accelerate's file names; `None` if nothing does."""

    values: Block
    num_devices: int | None = None


def read_source(source: str | os.PathLike[str] | Block) -> Source:
    """Returns the configuration that a file or a dictionary holds.

    Raises:
      ValueError: The file cannot be parsed, holds no dictionary or a key twice, or is nested too deeply.
      TypeError: `source` is neither a path nor a dictionary.
    """
    raw = source if isinstance(source, Mapping) else _read_file(source)
    _check_depth(raw, "The DeepSpeed configuration" if isinstance(source, Mapping) else repr(os.fspath(source)))
    if BLOCK not in raw:
        return Source(raw)
    block = raw[BLOCK]
    if not isinstance(block, Mapping):
        raise ValueError(f"`{BLOCK}` must be a block of keys: got {block!r}.")
    path = block.get(FILE)
    return Source(*from_accelerate(raw, None if path is None else read_source(path).values))


def _read_file(source: object) -> Block:
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"A DeepSpeed configuration is a path or a dictionary: got {type(source).__name__}.")
    path = os.fspath(source)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    is_yaml = path.endswith((".yaml", ".yml"))
    try:
        raw = _parse_yaml(text, path) if is_yaml else _parse(text, path)
    except RecursionError:
        raise ValueError(_too_deep(repr(path))) from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path!r} must hold a dictionary: got {type(raw).__name__}.")
    if is_yaml and BLOCK not in raw:
        other = raw.get("deepspeed")
        raise ValueError(
            f"{path!r} must be a configuration of Accelerate with a block `{BLOCK}`: "
            + (f"its `deepspeed` names {other!r}, so pass that file." if other else f"got {list(raw)!r:.200}.")
        )
    return raw


def _check_depth(value: object, name: str) -> None:
    """Raises if blocks lie inside each other deeper than Python can follow, or inside themselves."""
    stack = [(value, 0)]
    while stack:
        inner, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ValueError(_too_deep(name))
        if isinstance(inner, Mapping):
            stack += [(x, depth + 1) for x in inner.values()]
        elif isinstance(inner, list | tuple):
            stack += [(x, depth + 1) for x in inner]


def _too_deep(name: str) -> str:
    return f"{name} is nested deeper than {MAX_DEPTH} levels; DeepSpeed configurations are not: check its braces."


def _parse_yaml(text: str, path: str) -> object:
    yaml = _optional("yaml")
    if yaml is None:
        raise ValueError(f"{path!r} is YAML, which needs PyYAML: `pip install pyyaml`.")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path!r} must be YAML: {error}.") from error


def _parse(text: str, path: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        # DeepSpeed reads Hjson, which has comments and trailing commas. Few files make use of that.
        hjson = _optional("hjson")
        if hjson is None:
            raise ValueError(
                f"{path!r} is not plain JSON: {error}. If it is Hjson (comments, trailing commas), which DeepSpeed "
                "reads, `pip install hjson`, or hand in a dictionary."
            ) from error
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except hjson.HjsonDecodeError as error:
        raise ValueError(f"{path!r} is neither JSON nor Hjson: {error}.") from error


def _optional(name: str) -> ModuleType | None:
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    counts = collections.Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"A DeepSpeed configuration must have each key once: got {twice} more than once in one block.")
    return dict(pairs)
