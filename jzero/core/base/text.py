"""Key paths and tables as text, and reports as notebooks and JSON have them."""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax

LEAST_WIDTH = 30
"""A column narrower than this does not wrap in its place."""

PRE = '<pre style="white-space: pre-wrap; margin: 0">{}</pre>'


def key_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the keys along a key path, e.g. `("decoder", "kernel")`."""
    return tuple(name for name in map(_key_name, path) if name is not None)


@functools.lru_cache(maxsize=1 << 16)  # a plan asks for the path of each leaf several times
def _key_name(key: Any) -> str | None:
    return jax.tree_util.keystr((key,), simple=True) if str(key) else None  # that of a padded leaf has none


def path_str(path: tuple[Any, ...]) -> str:
    """Returns a key path as text, e.g. `"decoder/kernel"`."""
    return "/".join(key_names(path))


def few(texts: Sequence[object], most: int, between: str = ", ") -> str:
    """Returns the first of many texts, and how many more there are."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join([*map(str, texts[:most]), *more])


def format_number(x: float, digits: int) -> str:
    """Returns a number to so many digits; large ones in full rather than with an exponent."""
    text = f"{x:.{digits}g}"
    return f"{x:.0f}" if "e+" in text else text


class Table:
    """Rows of text in columns, as data until it is printed."""

    def __init__(  # noqa: PLR0913  # options
        self,
        rows: Iterable[Sequence[str]],
        *,
        left: int,
        last_left: bool = False,
        optional: Collection[str] = (),
        max_rows: int | None = None,
        rule: bool = False,
        indent: int = 0,
    ) -> None:
        """Makes a table.

        Args:
          rows: The rows, titles first.
          left: The number of columns, from the first, that are flush left; the others are flush right.
          last_left: Whether the last column is flush left, too.
          optional: The titles of columns that are left out if they are empty.
          max_rows: Of more rows below the titles, the rest is only counted.
          rule: Whether a line is printed under the titles.
          indent: Blanks before each printed row.
        """
        head, *body = rows
        hidden = 0 if max_rows is None else max(0, len(body) - max_rows)
        self.rest = [f"... {hidden} more"] * (hidden > 0)
        shown = [i for i, title in enumerate(head) if title not in optional or any(row[i] for row in body)]
        self.rows = [[row[i] for i in shown] for row in (head, *body[: len(body) - hidden])]
        self.flush_left = [i < left or (last_left and i == len(head) - 1) for i in shown]
        self.rule, self.indent = rule, indent

    def lines(self, width: float, change: Callable[[str], str]) -> list[str]:
        """Returns lines of up to `width` characters, wrapped within the last column, with each cell changed."""
        rows = [[change(cell) for cell in row] for row in self.rows]
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [
            [x.ljust(n) if left else x.rjust(n) for x, n, left in zip(row, sizes, self.flush_left, strict=True)]
            for row in rows
        ]
        lines = [" " * self.indent + "  ".join(row).rstrip() for row in aligned]
        last = self.indent + sum(n + 2 for n in sizes[:-1])
        head, *body = (_wrapped_line(line, width, last) for line in lines)
        rule = ["-" * max(map(len, [*head, *itertools.chain(*body)]))] if self.rule else []
        return [*head, *rule, *itertools.chain(*body), *self.rest]

    def to_html(self) -> str:
        """Returns it as HTML."""
        head, *body = self.rows
        body_rows = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in [*body, *zip(self.rest)])
        return f"<table><thead><tr>{_cells(head, 'th')}</tr></thead><tbody>{body_rows}</tbody></table>"


Part = str | Table
"""A part of a report: lines of text, or a table."""


def printed(parts: Sequence[Part], width: float = math.inf, change: Callable[[str], str] = str) -> str:
    """Returns a report in lines of up to `width` characters, tables by their last column, as far as it can be done."""
    lines = [x.lines(width, change) if isinstance(x, Table) else _wrapped(change(x), width) for x in parts]
    return "\n".join(itertools.chain(*lines))


def _wrapped(text: str, width: float) -> list[str]:
    return [part for line in text.split("\n") for part in _wrapped_line(line, width, 0)]


def _wrapped_line(line: str, width: float, last: int) -> list[str]:
    """Wraps a line within its last column, or under the others if that is too narrow."""
    if len(line) <= width:
        return [line]
    under = width - last < LEAST_WIDTH
    wrap = functools.partial(textwrap.wrap, width=int(width), break_on_hyphens=False)
    if last == 0:
        return wrap(line, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2))
    indent = " " * (4 if under else last)
    cell = wrap(line[last:], initial_indent=indent, subsequent_indent=indent) or [""]
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

    def parts(self) -> list[Part]:
        """Returns what it prints, from above."""
        raise NotImplementedError

    def __str__(self) -> str:
        return printed(self.parts())

    def _repr_html_(self) -> str:
        return "\n".join(x.to_html() if isinstance(x, Table) else PRE.format(html.escape(x)) for x in self.parts())


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


def _cells(texts: Sequence[str], tag: str) -> str:
    return "".join(f'<{tag} style="text-align: left">{html.escape(text)}</{tag}>' for text in texts)
