"""Tries drawn faults, and says which the default suite sees."""

from __future__ import annotations

import collections
import queue
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import judges, runs
from tests.mutants.drawn import Fault

FIRST = 20.0  # seconds of the tests that are tried first: most faults are killed by them


def verdicts(faults: list[Fault], jobs: int) -> Iterator[tuple[str, Fault]]:
    """Tries faults in copies of the repository, and says of each what became of it, as soon as that is known.

    Args:
      faults: The faults.
      jobs: How many at a time.
    """
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(jobs):
            (folder := Path(directory) / str(index)).mkdir()
            copies.put(runs.copied(folder))
        (folder / "tests_to_run").write_text("\n".join(judges.seconds()))
        if (clean := runs.verdict_of(folder, ["--collect-only", "@tests_to_run"])) != "SURVIVED":
            raise RuntimeError(f"Tests of the map are not there any more, {clean}: make it anew.")

        def judge(fault: Fault) -> str:
            copy = copies.get()
            try:
                return _judge(fault, copy)
            finally:
                copies.put(copy)

        yield from zip(pool.map(judge, faults), faults, strict=True)


def table(found: list[tuple[str, Fault]]) -> Iterator[str]:
    """Returns how many faults of each room were killed, or survived."""
    by_room: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for verdict, fault in found:
        for room in (str(Path(fault.file).parent), "all"):
            by_room[room][verdict.partition(" ")[0]] += 1
    for room, counted in sorted(by_room.items(), key=lambda x: (x[0] == "all", x[0])):
        yield f"{room:32} " + ", ".join(f"{number} {verdict}" for verdict, number in sorted(counted.items()))


def _judge(fault: Fault, copy: Path) -> str:
    if not (judges.MAP / fault.file).exists():
        return "UNKNOWN (the file is newer than the map: make it anew)"
    tests, seconds = judges.of_lines(fault.file, fault.line, fault.last), judges.seconds()
    # First those that look at this file and little else, for their time.
    ordered = sorted(tests, key=lambda test: (seconds.get(test, 1.0) + 0.05) / tests[test])
    if not ordered:
        return "UNSEEN (no test executes it)"
    total, first = 0.0, 0
    for test in ordered:
        total += seconds.get(test, 1.0)
        first += total < FIRST
    file = copy / fault.file
    with runs.changed(file, fault.applied(file.read_text())):
        for part in (ordered[: max(first, 1)], ordered[max(first, 1) :]):
            (copy / "tests_to_run").write_text("\n".join(part))
            verdict = runs.verdict_of(copy, ["-o", "timeout=100", "@tests_to_run"]) if part else "SURVIVED"
            if verdict != "SURVIVED":  # code that cannot be imported fails before pytest counts it as a failure
                return verdict.replace("NOT RUN", "killed").replace("no end", "killed (no end)")
    return f"SURVIVED {len(ordered)} tests"
