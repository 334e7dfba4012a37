"""Which tests execute a line of `jzero/`: a map that one run of the default suite makes, and edits do not spoil."""

from __future__ import annotations

import collections
import contextlib
import difflib
import functools
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage

from tests.mutants.runs import ROOT

MAP = ROOT / "build" / "judges"


SETTINGS = """
[run]
source = {root}/jzero
data_file = {map}/coverage
context = ${{PYTEST_CURRENT_TEST-}}
parallel = true
sigterm = true
"""


def make() -> int:
    """Runs the default suite and keeps which test executed what, the seconds of each, and the sources as they were.

    Processes that a test starts are watched, too; what they run belongs to that test.
    """
    shutil.rmtree(MAP, ignore_errors=True)
    MAP.mkdir(parents=True)
    shutil.copytree(ROOT / "jzero", MAP / "jzero", ignore=shutil.ignore_patterns("__pycache__"))
    (MAP / "settings").write_text(SETTINGS.format(root=ROOT, map=MAP))
    watched = ["-p", "tests.mutants.judges", "-p", "pytest_cov", "--cov=jzero", "--cov-context=test", "--cov-report="]
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", *watched, f"--junitxml={MAP / 'seconds.xml'}"]
    environment = {**os.environ, "COVERAGE_FILE": str(MAP / "coverage")}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "--append", f"--rcfile={MAP / 'settings'}"]
    subprocess.run(combine, cwd=ROOT, check=False)  # which fails if there is nothing more
    return code


def pytest_sessionstart(session: Any) -> None:
    """Has the processes watched that tests start, but not those of pytest, which it watches itself."""
    if hasattr(session.config, "workerinput"):
        os.environ["COVERAGE_PROCESS_START"] = str(MAP / "settings")


def of_lines(file: str, first: int, last: int) -> dict[str, int]:
    """Returns the tests that execute some of a file's lines, with how many of the file's lines each executes.

    A line that runs when its module is imported belongs to all tests that execute any line of the file.

    Args:
      file: The file, below the repository's root.
      first: Its first line, as the file is now.
      last: Its last.
    """
    tests: dict[str, int] = {}
    chosen = set()
    before = _lines_before(file)
    wanted = {before[line] for line in range(first, last + 1) if line in before}
    for line, contexts in _contexts(file).items():
        for context in contexts:
            tests[context] = tests.get(context, 0) + 1
            if line in wanted:
                chosen.add(context)
    imported = any(line not in before or "" in _contexts(file).get(before[line], ()) for line in range(first, last + 1))
    return {test: lines for test, lines in tests.items() if test and (imported or test in chosen)}


@functools.cache
def seconds() -> dict[str, float]:
    """Returns how long each test took."""
    return {_name(case): float(case.attrib["time"]) for case in ET.parse(MAP / "seconds.xml").iter("testcase")}


def failed(report: Path) -> list[str]:
    """Returns the tests that failed, of a report like that of the map."""
    bad = ("failure", "error")
    return [_name(case) for case in ET.parse(report).iter("testcase") if any(case.find(x) is not None for x in bad)]


def _name(case: ET.Element) -> str:
    return case.attrib["classname"].replace(".", "/") + ".py::" + case.attrib["name"]


@functools.cache
def executed() -> collections.Counter[str]:
    """Returns how many lines of all files each test executes."""
    lines: collections.Counter[str] = collections.Counter()
    with contextlib.closing(sqlite3.connect(MAP / "coverage")) as data:
        for context, bits in data.execute("select context, numbits from line_bits join context on id = context_id"):
            lines[_test(context)] += int.from_bytes(bits).bit_count()
    return lines


def _test(context: str) -> str:
    return re.split(r"\|| \(", context)[0]


@functools.cache
def _read() -> coverage.CoverageData:
    data = coverage.CoverageData(str(MAP / "coverage"))
    data.read()
    return data


@functools.cache
def _contexts(file: str) -> dict[int, set[str]]:
    """The tests by line of a file as it was; "" is its import."""
    path = next((x for x in _read().measured_files() if x.endswith("/" + file)), None)
    if path is None:
        return {}
    found = _read().contexts_by_lineno(path)
    return {line: {_test(x) for x in contexts} for line, contexts in found.items()}


@functools.cache
def _lines_before(file: str) -> dict[int, int]:
    """The line that each line of a file was when the map was made."""
    before = (MAP / file).read_text().splitlines() if (MAP / file).exists() else []
    blocks = difflib.SequenceMatcher(None, before, (ROOT / file).read_text().splitlines(), autojunk=False)
    return {b + i + 1: a + i + 1 for a, b, size in blocks.get_matching_blocks() for i in range(size)}


def table(files: list[Path]) -> Iterator[str]:
    """Returns the tests that execute lines of files: how many of their lines, and in how many seconds."""
    tests: dict[str, int] = {}
    for file in files:
        name = str(file.relative_to(ROOT))
        for test, lines in of_lines(name, 1, len(file.read_text().splitlines())).items():
            function = test.partition("[")[0]
            tests[function] = max(tests.get(function, 0), lines)
    took: dict[str, float] = {}
    for test, number in seconds().items():
        function = test.partition("[")[0]
        took[function] = took.get(function, 0.0) + number
    yield "lines  seconds  test"
    for test, lines in sorted(tests.items(), key=lambda x: (-x[1], took.get(x[0], 0.0))):
        yield f"{lines:5}  {took.get(test, 0.0):7.1f}  {test}"
