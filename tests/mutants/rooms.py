"""Which room of the package each test file judges: by the faults that it must see, and by what it imports.

`python -m tests.mutants.rooms` writes the table into `tests/README.md`; `tests/test_mutants.py` compares.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator

from tests.mutants import MUTANTS
from tests.mutants.runs import ROOT

PAGE = ROOT / "tests" / "README.md"
INTRODUCTION = """# What each test file judges

Written by `python -m tests.mutants.rooms`. **Bold**: a planted fault of the room must make it fail (`tests/mutants/`);
others import the room's modules. The first line of each file says what must hold. `python -m tests.mutants --of FILE`
prints the tests that execute one file of the package.

| room | test files, without `test_` |
|---|---|
"""
WHOLE = "all of `jzero`"
ELSEWHERE = {  # what neither has a fault nor imports a module
    WHOLE: "contradictions errors_in_states lookups_in_training manual_axes messages parity public_api references "
    "round_trips walk_of_a_state wrong_objects",
    "analysis": "analyze",
    "benchmarks": "benchmarks gpu_pack",
    "checkpoint": "checkpoint_parts",
    "core/engine": "scopes",
    "deepspeed": "estimator",
    "docs": "migrating notebooks",
    "examples": "chat_data examples finetune generate multi_process_example",
    "tests": "mutants",
}


def table() -> str:
    """Returns the page."""
    rooms: dict[str, set[str]] = collections.defaultdict(set)
    for room, files in ELSEWHERE.items():
        rooms[room].update(files.split())
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        for module in _imported(ast.parse(file.read_text())):
            rooms[_room(*module.split(".")[1:])].add(file.stem.removeprefix("test_"))
    for mutant in MUTANTS:
        name = mutant.test.split("::")[0].removeprefix("test_").removesuffix(".py")
        room = rooms[_room(*mutant.file.removesuffix(".py").split("/"))]
        room.discard(name)
        room.add(f"**{name}**")
    rows = (f"| {room} | {' '.join(sorted(rooms[room], key=_plain))} |\n" for room in sorted(rooms, key=_plain))
    return INTRODUCTION + "".join(rows)


def unlisted() -> list[str]:
    """Returns the test files that judge nothing."""
    listed = set(table().replace("*", "").split())
    return [x.name for x in sorted(PAGE.parent.glob("test_*.py")) if x.stem.removeprefix("test_") not in listed]


def _plain(name: str) -> str:
    return name.strip("*`")


def _room(first: str, *others: str) -> str:
    return f"{first}/{others[0]}" if first == "core" and others else first


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [x.name for x in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.startswith("jzero."))


if __name__ == "__main__":
    PAGE.write_text(table())
