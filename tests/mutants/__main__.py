"""Tries faults, one after another, and says which the suite sees."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import tests.mutants
from tests.mutants import MUTANTS
from tests.mutants.runs import copied, failures_without_faults, occurrences, outcome


class Clock:
    """Seconds that passed, and those of the processors, which other programs do not change."""

    def __init__(self) -> None:
        self.start = self.last = self._now()

    def _now(self) -> tuple[float, float]:
        times = os.times()
        return times.elapsed, times.children_user + times.children_system

    def lap(self) -> str:
        """Returns the seconds since the last call."""
        before, self.last = self.last, self._now()
        return self._text(before)

    def total(self) -> str:
        """Returns the seconds since the start."""
        return self._text(self.start)

    def _text(self, before: tuple[float, float]) -> str:
        passed, used = (now - then for now, then in zip(self._now(), before, strict=True))
        return f"{passed:6.1f} s ({used:.1f} s of CPU)"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=tests.mutants.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="which faults; all by default")
    names = parser.parse_args().names
    if unknown := set(names) - {x.name for x in MUTANTS}:
        parser.error(f"there are no faults of the names {sorted(unknown)}")
    chosen = [x for x in MUTANTS if not names or x.name in names]
    if missing := [x for x in chosen if occurrences(x) != 1]:
        for mutant in missing:
            print(f"{mutant.name:42} PATTERN occurs {occurrences(mutant)} times in jzero/{mutant.file}")
        return 1
    clock, killed = Clock(), 0
    with tempfile.TemporaryDirectory() as directory:
        root = copied(Path(directory))
        if failures := failures_without_faults(chosen, root):
            print(failures)
            return 1
        print(f"{'without faults':42} {'passed':10} {clock.lap()}", flush=True)
        for mutant in chosen:
            found = outcome(mutant, root)
            killed += found == "killed"
            print(f"{mutant.name:42} {found:10} {clock.lap()}", flush=True)
    print(f"{killed} of {len(chosen)} killed, {clock.total()}")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
