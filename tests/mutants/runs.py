"""Runs the tests of faults on a copy of the repository."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


def outcome(mutant: Mutant, root: Path) -> str:
    """Returns what became of a fault in a copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0"]
    cases = ["-k", mutant.cases] if mutant.cases else []
    # Byte code, which knows its source by size and second, is kept from fault to fault: each takes more than a second.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        with applied(mutant, root):
            code = subprocess.run(
                [*command, f"tests/{mutant.test}", *cases],
                cwd=root,
                env=environment,
                stdout=subprocess.DEVNULL,
                timeout=TIMEOUT,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT} s"
    return {0: "SURVIVED", 1: "killed"}.get(code, f"NOT RUN (pytest exits with {code})")
