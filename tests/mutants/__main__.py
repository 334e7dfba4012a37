"""Tries faults, all or those named or drawn, and says which the suite sees."""

import argparse
import sys
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, judge, judges
from tests.mutants.drawn import draw
from tests.mutants.runs import ROOT


def say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults of the table; all if none is named")
    parser.add_argument("--random", type=int, metavar="N", help="draw N faults instead, each on a line of its own")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="drawn faults tried at a time (default: %(default)s)")
    parser.add_argument(
        "--of", type=Path, metavar="FILE", help="draw in this file or folder; alone: print the tests that judge it"
    )
    parser.add_argument(
        "--map", action="store_true", help="run the default suite to see which test executes what (needs pytest-cov)"
    )
    arguments = parser.parse_args()
    if arguments.map:
        return judges.make()
    below = (arguments.of or ROOT / "jzero").resolve()
    files = sorted(below.rglob("*.py")) if below.is_dir() else [below]
    if arguments.random or arguments.of:
        if not judges.MAP.exists():
            parser.error("make the map of tests first: python -m tests.mutants --map")
        if arguments.random:
            found = {}
            for verdict, fault in judge.verdicts(draw(ROOT, files, arguments.random, arguments.seed), arguments.jobs):
                say(f"{verdict}: {fault}")
                found[fault] = verdict
            say(*judge.table(found))
            return int(any(not verdict.startswith(("killed", "equivalent")) for verdict in found.values()))
        say(*judges.table(files))
        return 0
    if unknown := set(arguments.names) - {x.name for x in MUTANTS}:
        parser.error(f"there are no faults of the names {sorted(unknown)}")
    cases = " or ".join(f"[{name}]" for name in arguments.names) or "test_every_fault_is_killed"
    return pytest.main(["-v", "-n", "0", "-m", "slow", "-k", cases, str(ROOT / "tests" / "test_mutants.py")])


if __name__ == "__main__":
    sys.exit(main())
