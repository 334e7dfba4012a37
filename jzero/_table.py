"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_rows"]


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
