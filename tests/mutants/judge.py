"""Tries drawn faults, and says which the default suite sees."""

from __future__ import annotations

import collections
import contextlib
import queue
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import judges, runs
from tests.mutants.drawn import Fault
from tests.mutants.equivalent import EQUIVALENT, key

FIRST = 1 / 25  # of the suite's time, for the tests that each fault meets alone: they kill eight of ten
SECONDS = 300  # for what one fault meets first
SUITE = ("--maxfail=0", "--ignore=tests/test_mutants.py")  # which sees that texts of other faults are gone
UNDECIDED = "undecided"  # the nearest tests let it live, or there are none


def verdicts(faults: list[Fault], jobs: int) -> Iterator[tuple[str, Fault]]:
    """Tries faults in copies of the repository, and says of each what became of it, as soon as that is known.

    Each meets the tests nearest to it alone, and is undecided if they pass. What is undecided is put into one copy, all
    of it: each fault meets those of the suite's tests alone that fail there and execute it.

    Args:
      faults: The faults.
      jobs: How many at a time.
    """
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(jobs):
            (folder := Path(directory) / str(index)).mkdir()
            copies.put(runs.copied(folder))
        there = runs.collected(folder)

        def judge(fault: Fault, tests: list[str]) -> str:
            copy = copies.get()
            file = copy / fault.file
            try:
                with runs.changed(file, fault.applied(file.read_text())):
                    return _verdict(copy, tests, seconds=SECONDS)
            finally:
                copies.put(copy)

        tried = []
        for fault in faults:
            if key(fault) in EQUIVALENT:
                yield "equivalent", fault
            else:
                tests = [test for test in _nearest(fault) if test in there]
                tried.append((fault, pool.submit(judge, fault, tests) if tests else None))
        left = []
        for fault, alone in tried:
            verdict = alone.result() if alone else "SURVIVED"
            if verdict == "SURVIVED":
                left.append(fault)
            yield verdict.replace("SURVIVED", UNDECIDED), fault
        failed = []
        while left:
            group = _apart(left)
            left = [fault for fault in left if fault not in group]
            failed += _failed_of_all(group, folder, jobs)
        again = [(fault, pool.submit(judge, fault, tests) if tests else None) for fault, tests in failed]
        yield from ((alone.result() if alone else "SURVIVED", fault) for fault, alone in again)


def table(found: dict[Fault, str]) -> Iterator[str]:
    """Returns how many faults of each room were killed, or survived."""
    by_room: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for fault, verdict in found.items():
        for room in (str(Path(fault.file).parent), "all"):
            by_room[room][verdict.partition(" ")[0]] += 1
    for room, counted in sorted(by_room.items(), key=lambda x: (x[0] == "all", x[0])):
        yield f"{room:32} " + ", ".join(f"{number} {verdict}" for verdict, number in sorted(counted.items()))


def _nearest(fault: Fault) -> list[str]:
    """The tests that are tried first: those that look at the fault's file and little else, for their time."""
    tests, seconds = judges.of_lines(fault.file, fault.line, fault.last), judges.seconds()
    executed = judges.executed()
    costs = {test: (seconds.get(test, 1.0) + 0.05) * executed[test] / tests[test] for test in tests}
    cases: collections.Counter[str] = collections.Counter()
    for test in sorted(costs, key=costs.__getitem__):
        cases[function := test.partition("[")[0]] += 1
        costs[test] *= cases[function]  # another case of the same test rarely sees more
    chosen, left = [], FIRST * sum(seconds.values())
    for test in sorted(costs, key=costs.__getitem__):
        left -= seconds.get(test, 1.0)
        if chosen and left < 0:
            break
        chosen.append(test)
    return chosen


def _apart(faults: list[Fault]) -> list[Fault]:
    """Those that can be made at once."""
    chosen: list[Fault] = []
    for fault in faults:
        if not any(x.file == fault.file and x.line <= fault.last and fault.line <= x.last for x in chosen):
            chosen.append(fault)
    return chosen


def _failed_of_all(faults: list[Fault], copy: Path, jobs: int) -> list[tuple[Fault, list[str]]]:
    """Runs the suite on a copy that has all of the faults: which of the tests that failed each has to meet."""
    report = copy / "failed.xml"
    with contextlib.ExitStack() as stack:
        for fault in sorted(faults, key=lambda x: -x.begin):  # what is before it in its file stays in its place
            file = copy / fault.file
            stack.enter_context(runs.changed(file, fault.applied(file.read_text())))
        _verdict(copy, ["tests"], *SUITE, "-n", str(jobs), f"--junitxml={report}")
    failed = judges.failed(report)
    executing = {fault: judges.of_lines(fault.file, fault.line, fault.last) for fault in faults}
    # Signatures, tables and texts are read by tests that execute none of their lines; others are newer than the map.
    reading = set(failed).difference(*executing.values())
    return [(fault, [x for x in failed if x in tests or x in reading]) for fault, tests in executing.items()]


def _verdict(copy: Path, tests: list[str], *options: str, seconds: int = 12 * SECONDS) -> str:
    (copy / "tests_to_run").write_text("\n".join(tests))
    verdict = runs.verdict_of(copy, ["-o", "timeout=100", *options, "@tests_to_run"], seconds)
    # Code that cannot be imported fails before pytest counts it as a failure.
    return verdict.replace("NOT RUN", "killed").replace("no end", "killed (no end)")
