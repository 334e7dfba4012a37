"""The tables of keys in `docs/migrating/`, made from those of the code.

`python -m tests.deepspeed_tables` writes them anew; a test compares them.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

from jzero.deepspeed.key import Key
from jzero.deepspeed.optimizers import OPTIMIZERS, REFUSED
from jzero.deepspeed.report import IN_WORDS
from jzero.deepspeed.schedules import SCHEDULES
from jzero.deepspeed.schema import NO_CAP, SCHEMA

PAGES = sorted((pathlib.Path(__file__).parents[1] / "docs" / "migrating").glob("*.md"))
MARK = "<!-- {}: `python -m tests.deepspeed_tables` writes this table -->"
ZERO = "zero_optimization."


def key_table(keys: Mapping[str, Key], *, prefix: str) -> str:
    """Returns a Markdown table with one row per key."""
    rows = [
        f"| {_names(path, key, prefix)} | {_value(key.default)} | {IN_WORDS[key.verdict]} | {key.note} |"
        for path, key in keys.items()
    ]
    return "\n".join(["| key | DeepSpeed's default | verdict | |", "|---|---|---|---|", *rows])


def type_table() -> str:
    """Returns a Markdown table of optimizers and schedules."""
    rows = [f"| optimizer | `{name}` | {kind.note} |" for name, kind in OPTIMIZERS.items()]
    rows += [f"| optimizer | `{name}` | refused: {note} |" for name, note in REFUSED.items()]
    rows += [f"| scheduler | `{name}` | {_parameters(kind.names)} |" for name, kind in SCHEDULES.items()]
    return "\n".join(["| block | type | |", "|---|---|---|", *rows])


def tables() -> dict[str, str]:
    """Returns the tables of the pages by name."""
    zero = {path: key for path, key in SCHEMA.keys.items() if path.startswith(ZERO)}
    others = {path: key for path, key in SCHEMA.keys.items() if path not in zero and ".params." not in path}
    return {
        "zero": key_table(zero, prefix=ZERO),
        "others": key_table(others, prefix=""),
        "types": type_table(),
    }


def table_in_pages(name: str) -> str:
    """Returns the table that follows a mark."""
    (found,) = re.findall(_pattern(name), "".join(page.read_text() for page in PAGES))
    return found[1].rstrip("\n")


def _pattern(name: str) -> str:
    return f"({re.escape(MARK.format(name))}\n\n)" + r"((?:\|.*\n)+)"


def _names(path: str, key: Key, prefix: str) -> str:
    old = "".join(f", `{name}`" for name in key.old_names)
    return f"`{path[len(prefix) :]}`{old}"


def _value(default: object) -> str:
    if default == NO_CAP:
        return "2^63-1"
    words = {None: "", True: "true", False: "false"}
    return str(words[default]) if default is None or isinstance(default, bool) else str(default)


def _parameters(names: str) -> str:
    honoured = [name for name in names.split() if SCHEMA.keys[f"scheduler.params.{name}"].verdict == "honoured"]
    return "`report.schedule`, of " + ", ".join(f"`{name}`" for name in honoured)


def main() -> None:
    """Writes the tables into the pages."""
    for page in PAGES:
        text = page.read_text()
        for name, table in tables().items():
            text = re.sub(_pattern(name), lambda found, table=table: f"{found[1]}{table}\n", text)
        page.write_text(text)


if __name__ == "__main__":
    main()
