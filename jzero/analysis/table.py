"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "format_rows"]


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


def format_bytes(count: float) -> str:
    """Returns a number of bytes in the largest unit that it has one of."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
