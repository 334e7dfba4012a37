"""A DeepSpeed configuration, parsed by a schema."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jzero.core.config.settings import shown
from jzero.deepspeed.key import (
    AUTO,
    REQUIRED,
    USUAL,
    Block,
    Key,
    KeyEntry,
    KeyVerdict,
    Parsed,
    Ruling,
    Schema,
    Type,
    Verdict,
    parameter_names,
)

AUTO_NOTE = '"auto" is for a trainer to fill in'
STRICT = ("zero_optimization", "fp16", "bf16")
"""Blocks in which, and below which, an unknown key is an error. Elsewhere DeepSpeed lets it pass."""
ALIKE, NEARLY_EQUAL = 0.6, 0.85
"""How alike two names are if one is taken for the other; the second holds for single values where others may be."""


def parse(raw: Block, schema: Schema, **context: Any) -> Parsed:
    """Returns a configuration, parsed; what cannot be read is in its `problems`."""
    types = {block: _type_of(raw.get(block), known) for block, known in schema.types.items()}
    keys = {path: key for path, key in schema.keys.items() if ".params." not in path}
    for block, kind in types.items():
        defaults = {} if kind is None else kind.defaults
        for name in parameter_names(kind):
            key = schema.keys[path := f"{block}.params.{name}"]
            keys[path] = dataclasses.replace(key, default=defaults.get(name, key.default))
    entries: dict[str, KeyEntry] = {}
    problems = ["`bfloat16` and `bf16` are the same key: keep one."] if "bfloat16" in raw and "bf16" in raw else []
    leaves = list(_leaves(raw, schema))
    for path, written, value in leaves:
        if path in keys and path in entries:
            problems.append(f"`{written}` and `{entries[path].row.key}` are the same key: keep one.")
        elif isinstance(read := _read(path, written, value, keys, schema, types), str):
            problems.append(read)
        elif read is not None:
            entries[path] = read
    missing = {path for path, key in keys.items() if key.default == REQUIRED} - {path for path, *_ in leaves}
    problems += [f"`{path}` is missing: DeepSpeed has no default for it." for path in keys if path in missing]
    return Parsed(keys, schema.blocks, types, entries, tuple(problems), **context)


def _type_of(block: object, known: Mapping[str, Type]) -> Type | None:
    """Returns the type of an optimizer or schedule; the case of an optimizer's does not count."""
    name = block.get("type") if isinstance(block, Mapping) else None
    return known.get(name, known.get(name.lower())) if isinstance(name, str) else None


def _leaves(block: Block, schema: Schema, prefix: str = "", written: str = "") -> Iterator[tuple[str, str, object]]:
    """Yields what has verdicts of its own: its path, as written in the file, too, and its value."""
    for name, value in block.items():
        path = schema.canonical(f"{prefix}{name}")
        if path == "zero_optimization" and isinstance(value, bool):  # of DeepSpeed's first releases
            yield f"{path}.stage", f"{written}{name}", int(value)
        elif path in schema.blocks and isinstance(value, Mapping) and value:
            yield from _leaves(value, schema, f"{path}.", f"{written}{name}.")
        else:
            yield path, f"{written}{name}", value


def _read(
    path: str, written: str, value: Any, keys: Mapping[str, Key], schema: Schema, types: Mapping[str, Type | None]
) -> KeyEntry | str | None:
    """Returns what a file has at a path, or a problem, or `None` for nothing."""
    if path in keys:
        return _read_key(keys[path], path, written, value)
    if path in schema.blocks:
        if value is not None and value != {}:
            return f"`{written}` must be a block of keys: got {shown(value)}."
        return None if path.endswith(".params") else KeyEntry(KeyVerdict(written, value, "ignored", "empty"))
    block, is_param, name = path.partition(".params.")
    if is_param and block in types:
        if types[block] is None:
            noun = {"scheduler": "schedule"}.get(block, block)
            return KeyEntry(KeyVerdict(written, value, "ignored", f"no {noun} reads it"))
        known = parameter_names(types[block])
        return f"`{written}` is not known." + _hint(name, known, f" There are {', '.join(known)}.")
    prefix = path.rpartition(".")[0]
    inside = [x[len(prefix) :].lstrip(".") for x in (*keys, *schema.blocks, *schema.old_names) if x.startswith(prefix)]
    is_strict = prefix.partition(".")[0] in STRICT
    cutoff = ALIKE if is_strict or isinstance(value, Mapping) else NEARLY_EQUAL
    hint = _hint(written.rpartition(".")[2], [name for name in inside if "." not in name], cutoff=cutoff)
    if is_strict:
        return f"`{written}` is not a key that DeepSpeed knows.{hint}"
    verdict: Verdict = "refused" if hint else "ignored"
    return KeyEntry(KeyVerdict(written, value, verdict, f"unknown; DeepSpeed reads no such key.{hint}"))


def _hint(name: str, names: Sequence[str], without: str = "", *, cutoff: float = ALIKE) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean `{close[0]}`?" if close else without


def _read_key(key: Key, path: str, written: str, value: Any) -> KeyEntry | str:
    """Returns what a file has for a key, or a problem."""
    name, as_written = path.rpartition(".")[2], written.rpartition(".")[2]
    if isinstance(value, str) and value == AUTO:
        default = "not known" if key.default in (None, AUTO, REQUIRED) else f"DeepSpeed's default, {key.default}"
        is_undecided = key.verdict == "honoured"
        changes_numbers = not path.startswith("zero_optimization.") and name not in USUAL
        verdict: Verdict = "open" if is_undecided and changes_numbers else "ignored"
        return KeyEntry(KeyVerdict(written, value, verdict, f"{AUTO_NOTE}; here: {default}", is_undecided))
    if value is None and key.default is None:
        return KeyEntry(KeyVerdict(written, value, "ignored", "null, as by default"))
    if (problem := key.kind.problem(value)) is not None:
        return f"`{written}` must be {problem}: got {shown(value)}."
    kept = key.kind.plain(value)
    now = "" if as_written in (name, f"stage3_{name}") else f"now `{name}`: "
    found = Ruling(key.verdict, now + key.note)
    if (reason := key.kind.lacks(value)) is not None:
        found = Ruling("refused", reason)
    elif key.verdict == "refused" and (kept == key.default or (isinstance(kept, Mapping) and not _is_on(kept))):
        found = Ruling("ignored", "off")
    return KeyEntry(KeyVerdict(written, value, *found), has_value=True, value=kept)


def _is_on(block: Block) -> bool:
    """Whether a block is on: by `enabled` at any depth if there is such a key, or else if it holds anything."""
    switches = list(_switches(block))
    return any(switches) if switches else bool(block)


def _switches(block: Block) -> list[bool]:
    if "enabled" in block:
        return [bool(block["enabled"])]
    return [switch for value in block.values() if isinstance(value, Mapping) for switch in _switches(value)]
