"""Tries faults, all or those named, and says which the suite sees."""

import sys

import pytest

from tests.mutants import MUTANTS
from tests.mutants.runs import ROOT

if __name__ == "__main__":
    names = sys.argv[1:]
    if unknown := set(names) - {x.name for x in MUTANTS}:
        sys.exit(f"there are no faults of the names {sorted(unknown)}")
    cases = " or ".join(f"[{name}]" for name in names) or "test_every_fault_is_killed"
    sys.exit(pytest.main(["-v", "-n", "0", "-m", "slow", "-k", cases, str(ROOT / "tests" / "test_mutants.py")]))
