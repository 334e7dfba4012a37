"""Faults of one line, each with the test that must fail: whether the suite, or a smaller one, still sees them.

    python -m tests.mutants                  # all, on a copy of the repository, one after another
    python -m tests.mutants frozen_zero_is_positive data_order_ignores_epoch

A fault is killed if pytest says that tests failed, not if it cannot collect them; that they pass without any fault the
suite itself says. `tests/test_mutants.py` keeps the table true, and with `-m slow` runs all of it.
"""

from tests.mutants import engine, front, keeping, layout, records, steps, storage, waiting

MUTANTS = [x for room in (layout, engine, keeping, waiting, steps, storage, records, front) for x in room.MUTANTS]
