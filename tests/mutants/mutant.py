"""Faults of one line, and tables of them."""

from __future__ import annotations

import re
from typing import NamedTuple

FAULT = re.compile(r"^  (\w+):\s+(\S+)(?: -k (\S+))?\n((?:  -.*\n)+)((?:  \+.*\n)*)", re.MULTILINE)


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


def faults(table: str) -> list[Mutant]:
    """Returns the faults of a table, which is written like a diff:

    core/layout/padded.py
      flax_reads_stored_arrays: test_padded.py::test_flax_reads_and_writes_natural_shapes -k some
      - lambda x: x.natural
      + lambda x: x.stored
    """
    found = []
    for part in re.split(r"^(?=\S)", table.lstrip(), flags=re.MULTILINE)[1:]:
        file, _, below = part.partition("\n")
        if other := FAULT.sub("", below).strip():
            raise ValueError(f"{file}: no fault, which has a name, a test, lines with - and lines with +:\n{other}")
        for name, test, cases, *texts in FAULT.findall(below):
            old, new = ("\n".join(line[4:] for line in text.splitlines()) for text in texts)
            found.append(Mutant(name, file, old, new, test, cases))
    return found
