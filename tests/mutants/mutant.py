"""A fault of one line."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A plausible mistake that changes results or programs.

    Attributes:
      name: What is wrong.
      file: The file, below `jzero/`.
      old: Text that occurs in it once.
      new: What takes its place.
      test: The test that must fail, as `file::function` below `tests/`.
      cases: Which cases of it suffice, as pytest's `-k` takes them, where all would take long.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    cases: str = ""
