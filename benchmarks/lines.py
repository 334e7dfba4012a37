"""Result files of one JSON line per program, which a later run adds to."""

from __future__ import annotations

import json
import pathlib
from typing import Any

__all__ = ["add_line", "lines_of"]


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a result file, none if there is no such file."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def add_line(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Adds a line to a result file, and prints it."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)
