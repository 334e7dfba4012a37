"""Who computes which matrices: each one once, and the busiest device not far from the mean."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.core.plan.assignment import MatrixKind, MatrixWork, WholeMatrix, assign

kinds = st.lists(st.tuples(st.integers(1, 60), st.floats(0.1, 1000.0)), min_size=1, max_size=7)


def units_of(schedule, num_devices):
    """Yields `(device, kind, unit)` of everything that a schedule computes."""
    for kind, rounds in enumerate(schedule.rounds):
        for device in range(num_devices):
            yield from ((device, kind, device * rounds + r) for r in range(rounds))
    for batch in schedule.per_device_batches:
        assert len(batch) == num_devices
        yield from ((device, *unit) for device, unit in enumerate(batch) if unit is not None)


@given(kinds, st.integers(1, 70))
def test_each_unit_is_computed_once_and_no_device_has_much_more_than_the_mean(kinds, num_devices):
    counts, costs = zip(*kinds, strict=True)
    schedule = assign(counts, costs, num_devices)
    found = list(units_of(schedule, num_devices))
    assert sorted((kind, unit) for _, kind, unit in found) == [(k, u) for k, n in enumerate(counts) for u in range(n)]
    loads = collections.Counter()
    for device, kind, _ in found:
        loads[device] += costs[kind]
    assert [loads[device] for device in range(num_devices)] == pytest.approx(schedule.loads)
    total = sum(n * cost for n, cost in kinds)
    assert max(schedule.loads) <= total / num_devices + max(costs) + 1e-6 * total


def test_text_and_data_tell_the_busiest_device_and_what_is_whole():
    work = MatrixWork(
        (MatrixKind((40, 56), 5, 2.5e6, ("a", "b", "c", "d")), MatrixKind((37, 3), 1, 500.0, ("out",))),
        (WholeMatrix(("q",), (64, 64), "other mesh axes shard it"),),
        5e6,
    )
    assert work.lines("data", 8) == [
        "matrix work over data (N=8): busiest device 5 of 12.5 MFLOP, 2.50 times less than whole on each",
        "    5 x (40, 56)  2.5 MFLOP each  a, b, c, and 1 more",
        "    1 x (37, 3)  0.5 kFLOP each  out",
        "  whole on every device: q (64, 64): other mesh axes shard it",
    ]
    assert work.to_dict()["kinds"][1] == {"shape": [37, 3], "num": 1, "flops": 500.0, "paths": ["out"]}
    assert work.to_dict()["whole"] == [{"paths": ["q"], "shape": [64, 64], "reason": "other mesh axes shard it"}]
    assert MatrixWork().lines("data", 8) == []
    assert MatrixWork(unknown="why").lines("data", 8) == ["matrix work over data (N=8): why"]
    assert MatrixWork((), work.whole).lines("data", 8)[0] == "matrix work over data (N=8): none is divided"
