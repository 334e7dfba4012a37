"""Key paths and tables as text, and reports as notebooks and JSON have them."""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import jax

LEAST_WIDTH = 30
"""A column narrower than this does not wrap in its place."""


def key_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the keys along a key path, e.g. `("decoder", "kernel")`."""
    return tuple(name for name in map(_key_name, path) if name is not None)


@functools.lru_cache(maxsize=1 << 16)  # a plan asks for the path of each leaf several times
def _key_name(key: Any) -> str | None:
    return jax.tree_util.keystr((key,), simple=True) if str(key) else None  # that of a padded leaf has none


def path_str(path: tuple[Any, ...]) -> str:
    """Returns a key path as text, e.g. `"decoder/kernel"`."""
    return "/".join(key_names(path))


def format_number(x: float, digits: int) -> str:
    """Returns a number to so many digits; large ones in full rather than with an exponent."""
    text = f"{x:.{digits}g}"
    return f"{x:.0f}" if "e+" in text else text


def format_rows(
    rows: Sequence[Sequence[str]], *, left: int, last_left: bool = False, max_rows: int | None = None
) -> list[str]:
    """Returns one line per row; the first `left` columns, and perhaps the last, are flush left, the others right.

    Of more than `max_rows` below the first, which has titles, the rest is only counted.
    """
    hidden = 0 if max_rows is None else max(0, len(rows) - 1 - max_rows)
    rows = rows[: len(rows) - hidden]
    flush_left = {*range(left), *([len(rows[0]) - 1] if last_left else [])}
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i in flush_left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ] + [f"... {hidden} more"] * (hidden > 0)


def table_rows(columns: Mapping[str, Sequence[str]], *, optional: Collection[str]) -> list[Sequence[str]]:
    """Returns the rows of a table, titles first, from its columns by title, without optional ones that are empty."""
    shown = [title for title, cells in columns.items() if title not in optional or any(cells)]
    return [shown, *zip(*(columns[title] for title in shown), strict=True)]


def wrapped(text: str, width: int) -> str:
    """Returns a report in lines of up to `width` characters, tables by their last column, as far as it can be done."""
    return "\n".join(line for lines in _paragraphs(text) for line in _wrapped_paragraph(lines, width))


def _paragraphs(text: str) -> list[list[str]]:
    """Returns the lines between blank ones, and the blank ones."""
    return [list(lines) for _, lines in itertools.groupby(text.splitlines(), lambda line: not line)]


def _wrapped_paragraph(lines: list[str], width: int) -> list[str]:
    starts = _columns(lines)
    last = starts[-1] if _is_table(lines, starts) else 0
    under = width - last < LEAST_WIDTH
    return [
        part for line in lines for part in ([line] if len(line) <= width else _wrapped_line(line, width, last, under))
    ]


def _wrapped_line(line: str, width: int, last: int, under: bool) -> list[str]:
    """Wraps a line within its last column, or under the others if that is too narrow."""
    if last == 0:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    indent = " " * (4 if under else last)
    cell = textwrap.wrap(
        line[last:], width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    ) or [""]
    head = line[:last]
    return [head.rstrip(), *cell] if under else [head + cell[0][last:], *cell[1:]]


class Report:
    """A result: a dataclass whose text is for people. Notebooks show its tables as tables, in their own colors.

    Attributes:
      derived: The properties that its data has beside its fields.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures as plain data."""
        return picked(self, *self.derived, *_fields(self))

    def to_json(self) -> str:
        """Returns all of it as JSON, which has no infinity and no NaN: these are text."""
        return json.dumps(_finite(self.to_dict()), indent=2, ensure_ascii=False, allow_nan=False)

    def _repr_html_(self) -> str:
        return as_html(str(self))


def picked(x: Any, *names: str) -> dict[str, Any]:
    """Returns some attributes as plain data."""
    return {name: as_data(getattr(x, name)) for name in names}


def plain(x: Any) -> Any:
    """Returns a number or flag as Python has it, where it is a scalar of NumPy or jax; else the value itself."""
    kind = getattr(getattr(x, "dtype", None), "kind", "")
    return x.item() if kind in tuple("biuf") and getattr(x, "shape", None) == () else x


def as_data(x: Any) -> Any:
    """Returns plain data: numbers, text, lists and dictionaries, among them the fields of dataclasses."""
    x = plain(x)
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if hasattr(x, "to_dict"):
        return x.to_dict()
    if names := _fields(x):
        return picked(x, *names)
    if isinstance(x, Mapping):
        return {str(name): as_data(value) for name, value in x.items()}
    if isinstance(x, list | tuple | set | frozenset):
        return [as_data(value) for value in (x if isinstance(x, list | tuple) else sorted(x, key=str))]
    return str(x)


def _finite(x: Any) -> Any:
    """Returns plain data with text in place of the numbers that JSON does not have."""
    if isinstance(x, Mapping):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _fields(x: Any) -> Sequence[str]:
    return [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else getattr(x, "_fields", ())


def as_html(text: str) -> str:
    """Returns a report as HTML: each paragraph of aligned columns as a table, all others as they are, wrapped."""
    return "\n".join(_paragraph_as_html(lines) for lines in _paragraphs(text) if lines[0])


def _paragraph_as_html(lines: list[str]) -> str:
    rows = [line for line in lines if line.strip("- ")]
    starts = _columns(rows)
    if not _is_table(rows, starts):
        return f'<pre style="white-space: pre-wrap">{html.escape(chr(10).join(lines))}</pre>'
    ends = [*starts[1:], None]
    head, *body = ([row[a:b].strip() for a, b in zip(starts, ends, strict=True)] for row in rows)
    body_rows = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in body)
    return f"<table><thead><tr>{_cells(head, 'th')}</tr></thead><tbody>{body_rows}</tbody></table>"


def _is_table(rows: Sequence[str], starts: Sequence[int]) -> bool:
    return len(rows) > 1 and len(starts) > 1


def _cells(texts: Sequence[str], tag: str) -> str:
    return "".join(f'<{tag} style="text-align: left">{html.escape(text)}</{tag}>' for text in texts)


def _columns(rows: Sequence[str]) -> list[int]:
    """Returns where columns start: after two or more places that are blank in every row."""
    width = max(map(len, rows), default=0)
    blank = [all(row[i : i + 1].strip() == "" for row in rows) for i in range(width)]
    return [i for i in range(width) if not blank[i] and (i == 0 or all(blank[max(i - 2, 0) : i]))]
