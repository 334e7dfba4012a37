"""The table of faults: each can be applied, its test is there, and, with `-m slow`, that test fails."""

import ast
import collections
import functools

import pytest

from tests.mutants import MUTANTS, drawn, equivalent, mutant, rooms, runs


@functools.cache
def functions_of(file):
    """The names of the functions that a test file defines."""
    return {x.name for x in ast.parse((runs.ROOT / "tests" / file).read_text()).body if hasattr(x, "name")}


def test_every_fault_can_be_applied():
    """Code that moves takes its faults along: their texts are in `tests/mutants/`."""
    found = {x.name: (x.file, runs.occurrences(x)) for x in MUTANTS}
    assert {name: where for name, where in found.items() if where[1] != 1} == {}
    changed = [(x.file, x.old, x.new) for x in MUTANTS]
    assert len(set(changed)) == len(changed)
    assert all(x.old != x.new for x in MUTANTS)


def test_every_fault_has_a_name_of_its_own_and_a_test_that_is_there():
    twice = [name for name, count in collections.Counter(x.name for x in MUTANTS).items() if count > 1]
    assert twice == []
    tests = {x.test: x.test.split("::") for x in MUTANTS}
    assert [test for test, (file, function) in tests.items() if function not in functions_of(file)] == []


def test_what_is_no_fault_of_a_table_is_named():
    with pytest.raises(ValueError, match=r"core/step\.py: .*\nunnamed\n  - old"):
        mutant.faults("core/step.py\n  named: test.py::test\n  - old\n  + new\n  unnamed\n  - old\n")


def test_the_table_of_test_files_has_each():
    assert rooms.unlisted() == [], "plant a fault that it must see, or add it to `rooms.ELSEWHERE`"
    assert rooms.PAGE.read_text() == rooms.table(), "run `python -m tests.mutants.rooms`"


def test_drawn_faults_are_other_code():
    files = sorted((runs.ROOT / "jzero" / "core" / "layout").glob("*.py"))
    faults = drawn.draw(runs.ROOT, files, 60, seed=3)
    assert faults == drawn.draw(runs.ROOT, files, 60, seed=3)
    assert len({(fault.file, fault.line) for fault in faults}) == 60
    assert len({fault.kind for fault in faults}) > 5
    for fault in faults:
        text = (runs.ROOT / fault.file).read_text()
        assert ast.dump(ast.parse(fault.applied(text))) != ast.dump(ast.parse(text))


def test_each_excuse_is_that_of_one_fault():
    """Another fault in the same function, or the same one elsewhere, has none."""
    files = {file for file, *_ in equivalent.EQUIVALENT}
    faults = [equivalent.key(fault) for file in files for fault in drawn.faults_of(runs.ROOT, runs.ROOT / file)]
    found = collections.Counter(fault for fault in faults if fault in equivalent.EQUIVALENT)
    assert found == dict.fromkeys(equivalent.EQUIVALENT, 1)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return runs.copied(tmp_path_factory.mktemp("copy"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", MUTANTS, ids=lambda x: x.name)
def test_every_fault_is_killed(fault, copy):
    assert runs.outcome(fault, copy) == "killed"
