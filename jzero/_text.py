"""Key paths and tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

__all__ = ["format_rows", "key_names", "path_str"]


def key_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the keys along a key path, e.g. `("decoder", "kernel")`."""
    names = (jax.tree_util.keystr((key,), simple=True) for key in path if str(key))  # that of a padded leaf is none
    return tuple(names)


def path_str(path: tuple[Any, ...]) -> str:
    """Returns a key path as text, e.g. `"decoder/kernel"`."""
    return "/".join(key_names(path))


def format_rows(rows: Sequence[Sequence[str]], *, left: int, last_left: bool = False) -> list[str]:
    """Returns one line per row; the first `left` columns, and perhaps the last, are flush left, the others right."""
    flush_left = {*range(left), *([len(rows[0]) - 1] if last_left else [])}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i in flush_left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
