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
TIMEOUT = 450
# Neither history nor environments nor caches: what tests neither read nor change.
IGNORED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "site")


def copied(directory: Path) -> Path:
    """Returns a copy of the repository, as it is now."""
    # Without asking git: CI runs on a copy that is no repository.
    ignored = shutil.ignore_patterns(*IGNORED)
    shutil.copytree(ROOT, directory, ignore=ignored, dirs_exist_ok=True)
    return directory


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    """Returns how often the text of a fault occurs."""
    file = root / "jzero" / mutant.file
    return file.read_text().count(mutant.old) if file.exists() else 0


@contextlib.contextmanager
def changed(file: Path, text: str) -> Iterator[None]:
    """Has another text in a file of a copy."""
    before = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)


def outcome(mutant: Mutant, root: Path) -> str:
    """Returns what became of a fault in a copy."""
    file = root / "jzero" / mutant.file
    cases = ["-k", mutant.cases] if mutant.cases else []
    with changed(file, file.read_text().replace(mutant.old, mutant.new)):
        return verdict_of(root, ["-p", "no:cacheprovider", f"tests/{mutant.test}", *cases])


def collected(root: Path) -> set[str]:
    """Returns the tests of the default suite of a copy."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    return {line for line in found.splitlines() if "::" in line}


def verdict_of(root: Path, arguments: list[str], seconds: int = TIMEOUT) -> str:
    """Returns what tests say of a copy, as pytest's arguments choose them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *arguments]
    # Byte code, which knows its source by size and second, is kept from fault to fault: each takes more than a second.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        code = subprocess.run(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return f"no end after {seconds} s"
    return {0: "SURVIVED", 1: "killed"}.get(code, f"NOT RUN (pytest exits with {code})")
