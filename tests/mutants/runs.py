"""Runs the tests of faults on a copy of the repository."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("jzero", "examples", "tests", "pyproject.toml")
TIMEOUT = 450


def copied(directory: Path) -> Path:
    """Returns a copy of what tests need."""
    for name in COPIED:
        source, target = ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return directory


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    """Returns how often the text of a fault occurs."""
    file = root / "jzero" / mutant.file
    return file.read_text().count(mutant.old) if file.exists() else 0


@contextlib.contextmanager
def applied(mutant: Mutant, root: Path) -> Iterator[None]:
    """Has a fault in a copy."""
    file = root / "jzero" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        file.write_text(text)


def run_tests(mutants: Sequence[Mutant], root: Path, timeout: float) -> tuple[int, str]:
    """Returns how pytest exits for the tests of faults in a copy (0 passed, 1 failed, else not run), and its output."""
    tests = [f"tests/{test}" for test in dict.fromkeys(x.test for x in mutants)]
    named = [(x.test.split("::")[1], x.cases) for x in mutants]
    cases = " or ".join(dict.fromkeys(f"({name} and {cases})" if cases else name for name, cases in named))
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            [*command, *tests, "-k", cases],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {timeout} s"
    return done.returncode, done.stdout


def failures_without_faults(mutants: Sequence[Mutant], root: Path) -> str:
    """Returns the end of pytest's output if tests of faults fail, or do not run, without them; else nothing."""
    code, output = run_tests(mutants, root, TIMEOUT * len(mutants))
    return "" if code == 0 else f"{output[-3000:]}\nWithout any fault, pytest exits with {code}."


def outcome(mutant: Mutant, root: Path) -> str:
    """Returns what became of a fault."""
    with applied(mutant, root):
        code, _ = run_tests([mutant], root, TIMEOUT)
    return {0: "SURVIVED", 1: "killed"}.get(code, f"NOT RUN (pytest exits with {code})")
