"""Key paths and tables as text, and reports as notebooks show them."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any

import jax


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


class Report:
    """A result whose text is for people. Notebooks show its tables as tables, in their own colors."""

    def _repr_html_(self) -> str:
        return as_html(str(self))


def as_html(text: str) -> str:
    """Returns a report as HTML: each paragraph of aligned columns as a table, all others as they are, wrapped."""
    paragraphs = [list(lines) for blank, lines in itertools.groupby(text.splitlines(), lambda x: not x) if not blank]
    return "\n".join(map(_paragraph_as_html, paragraphs))


def _paragraph_as_html(lines: list[str]) -> str:
    rows = [line for line in lines if line.strip("- ")]
    starts = _columns(rows)
    if len(rows) < 2 or len(starts) < 2:
        return f'<pre style="white-space: pre-wrap">{html.escape(chr(10).join(lines))}</pre>'
    ends = [*starts[1:], None]
    head, *body = ([row[a:b].strip() for a, b in zip(starts, ends, strict=True)] for row in rows)
    body_rows = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in body)
    return f"<table><thead><tr>{_cells(head, 'th')}</tr></thead><tbody>{body_rows}</tbody></table>"


def _cells(texts: Sequence[str], tag: str) -> str:
    return "".join(f'<{tag} style="text-align: left">{html.escape(text)}</{tag}>' for text in texts)


def _columns(rows: Sequence[str]) -> list[int]:
    """Returns where columns start: after two or more places that are blank in every row."""
    width = max(map(len, rows), default=0)
    blank = [all(row[i : i + 1].strip() == "" for row in rows) for i in range(width)]
    return [i for i in range(width) if not blank[i] and (i == 0 or all(blank[max(i - 2, 0) : i]))]
