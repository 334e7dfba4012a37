"""Examples of different lengths in rows of one length, for `jzero.data.make_loader`.

The loader saves its position in their order, so a resumed run sees the rows that it would have seen.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from chat_data import Example

MAX_OPEN_ROWS = 32


class PackedRows(Sequence[dict[str, np.ndarray]]):
    """Rows of `row_tokens` tokens, each with whole examples.

    A row has `tokens`, `positions` (from 0 in each example), `segments` (its examples by number; -1: padding) and
    `learned`. An example goes to the first row with space, of the last few that were begun.
    """

    def __init__(self, examples: Sequence[Example], row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self._rows: list[list[Example]] = []
        free: dict[int, int] = {}  # tokens by row
        for example in examples:
            size = len(example.tokens)
            row = next((row for row, space in free.items() if space >= size), len(self._rows))
            if row == len(self._rows):
                self._rows.append([])
                free[row] = row_tokens
            self._rows[row].append(example)
            free[row] -= size
            if len(free) > MAX_OPEN_ROWS:
                del free[min(free, key=free.__getitem__)]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all rows, by which the loader detects a position that was saved for other data."""
        digest = hashlib.sha256(str(self.row_tokens).encode())
        for row in self._rows:
            for example in row:
                digest.update(example.tokens.tobytes() + example.learned.tobytes())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        examples = [example for row in self._rows for example in row]
        used, learned = sum(len(x.tokens) for x in examples), sum(int(x.learned.sum()) for x in examples)
        places = len(self) * self.row_tokens
        return f"{len(self)} rows of {self.row_tokens} tokens, {used / places:.0%} full, {learned / places:.0%} learned"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        columns = {
            "tokens": [example.tokens for example in row],
            "positions": [np.arange(len(example.tokens), dtype=np.int32) for example in row],
            "segments": [np.full(len(example.tokens), number, np.int32) for number, example in enumerate(row)],
            "learned": [example.learned for example in row],
        }
        fill = {"segments": -1}
        used = sum(len(example.tokens) for example in row)
        return {
            name: np.pad(np.concatenate(parts), (0, self.row_tokens - used), constant_values=fill.get(name, 0))
            for name, parts in columns.items()
        }
