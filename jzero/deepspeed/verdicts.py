"""The verdict on each key of a configuration, and the arguments that its keys become.

[Note: Verdicts]
A verdict is a function of the parsed configuration and nothing else. It is what the first rule says that says anything,
of those of the blocks around the key, from the outside in, and then of its own; or else what its row of the schema
says. A key whose row stands, or whose rule says "honoured", gives jzero its value. A rule can only say that an "auto"
is ignored, since otherwise nothing is known of its value.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from jzero.deepspeed.key import NOT_SET, KeyVerdict, Parsed, Ruling
from jzero.deepspeed.parsing import AUTO_NOTE


def exception(c: Parsed, path: str) -> Ruling | None:
    """Returns what a rule says about a key, see [Note: Verdicts]; `None` if its row of the schema holds."""
    outer = [path[:i] for i, letter in enumerate(path) if letter == "."]
    own = c.keys[path].rules if path in c.keys else ()
    rules = (*(rule for block in outer for rule in c.blocks.get(block, ())), *own)
    return next((ruling for rule in rules if (ruling := rule(c, path)) is not None), None)


def verdicts(c: Parsed) -> tuple[KeyVerdict, ...]:
    """Returns the verdict on each key of a configuration, and on missing ones whose defaults change the numbers."""
    there = [_verdict(c, path, entry.row) for path, entry in c.entries.items()]
    implied = {path: key.implied(c, path) for path, key in c.keys.items() if key.implied and path not in c.entries}
    missing = {path: exception(c, path) or ruling for path, ruling in implied.items() if ruling is not None}
    return (*there, *(KeyVerdict(path, NOT_SET, *ruling) for path, ruling in missing.items()))


def _verdict(c: Parsed, path: str, row: KeyVerdict) -> KeyVerdict:
    ruling = exception(c, path)
    if c.is_auto(path):
        decided = c.keys[path].decided if path in c.keys else None
        if decided and (value := decided(c, path)) is not None and (ruling is None or ruling.verdict == "honoured"):
            ruling = Ruling("ignored", f"{AUTO_NOTE}; here: {value}")
        ruling = ruling if ruling is not None and ruling.verdict == "ignored" else None
    return row if ruling is None else KeyVerdict(row.key, row.value, *ruling)


def arguments(c: Parsed) -> dict[str, dict[str, Any]]:
    """Returns the arguments that the keys become, by class."""
    found: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for path, key in c.keys.items():
        owner, _, name = key.target.partition(".")
        ruling = exception(c, path) if owner else None
        if owner and (ruling is None or ruling.verdict == "honoured"):
            value = key.value(c, path)
            found[owner] |= value if isinstance(value, Mapping) else {} if value is None else {name: value}
    return found
