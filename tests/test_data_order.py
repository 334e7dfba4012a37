"""Orders, positions and lanes against brute force; no device is touched."""

import itertools

import hypothesis
from hypothesis import strategies as st

from jzero.data.interleave import Lanes
from jzero.data.order import EpochOrder
from jzero.data.position import BatchSchedule, Position

SIZES = st.integers(1, 60)
few = hypothesis.settings(max_examples=8, deadline=None)  # Grain's permutation is slow for small sizes


def places(order, epoch):
    return [order.example(epoch, place) for place in range(order.num_examples)]


@few
@hypothesis.given(SIZES, st.integers(0, 2**40), st.integers(0, 5), st.none() | st.integers(1, 70))
def test_an_epoch_has_each_example_once(num_examples, seed, epoch, window):
    order = EpochOrder(num_examples=num_examples, seed=seed, shuffle=True, window=window)
    assert sorted(places(order, epoch)) == list(range(num_examples))


def test_orders_differ_by_epoch_and_seed_and_are_not_shared():
    orders = {
        (seed, epoch): EpochOrder(num_examples=200, seed=seed, shuffle=True) for seed in range(3) for epoch in range(3)
    }
    found = {tuple(places(order, epoch)) for (_, epoch), order in orders.items()}
    assert len(found) == 9, "the second epoch of seed 0 is not the first of seed 1 either"
    assert tuple(range(200)) not in found
    assert places(EpochOrder(num_examples=200, seed=1, shuffle=False), 2) == list(range(200))


def test_windows_are_shuffled_inside_and_among_themselves():
    offsets = set()
    for epoch in range(2):
        found = places(EpochOrder(num_examples=240, seed=5, shuffle=True, window=30), epoch)
        firsts = [min(found[i : i + 30]) for i in range(0, 240, 30)]
        assert firsts != sorted(firsts)
        offsets |= {
            tuple(x - first for x in found[i : i + 30]) for i, first in zip(range(0, 240, 30), firsts, strict=True)
        }
    assert len(offsets) == 16, "each by a permutation of its own, in each epoch"
    assert tuple(range(30)) not in offsets


def brute_force(num_examples, batch_size, num_epochs, drop_remainder, start):
    """Returns `(epoch, places)` of each batch from `(epoch, place)` on, by writing every epoch down."""
    batches = []
    for epoch in range(start[0], num_epochs):
        left = list(range(num_examples))[start[1] if epoch == start[0] else 0 :]
        chunks = [left[i : i + batch_size] for i in range(0, len(left), batch_size)]
        batches += [(epoch, chunk) for chunk in chunks if not drop_remainder or len(chunk) == batch_size]
    return batches


@hypothesis.given(st.data())
def test_schedule_is_that_of_brute_force(data):
    num_examples, batch_size, num_epochs = data.draw(SIZES), data.draw(st.integers(1, 70)), data.draw(st.integers(1, 4))
    drop = data.draw(st.booleans())
    hypothesis.assume(not drop or batch_size <= num_examples)
    start = data.draw(st.tuples(st.integers(0, num_epochs), st.integers(0, num_examples - 1)))
    schedule = BatchSchedule(
        num_examples=num_examples, batch_size=batch_size, num_epochs=num_epochs, drop_remainder=drop
    )
    expected = brute_force(num_examples, batch_size, num_epochs, drop, start)
    assert schedule.num_batches(Position(*start)) == len(expected)
    for number, (epoch, chunk) in enumerate(expected):
        span = schedule.span(number, Position(*start))
        assert (span.epoch, list(range(span.start, span.stop))) == (epoch, chunk)
        # From the position after a batch, whatever the size of the next ones, what is left follows.
        after = schedule.after(span)
        rest = brute_force(num_examples, 1, num_epochs, False, (after.epoch, after.example))
        flat = [(e, place) for e, places in expected[number + 1 :] for place in places]
        if drop:
            assert [x for x in [(e, p) for e, (p,) in rest] if x in set(flat)] == flat
        else:
            assert [(e, p) for e, (p,) in rest] == flat


def taking_turns(counts, num_lanes):
    """Returns `(file, number)` of each example, by dealing the files out and passing round."""
    lanes = [[] for _ in range(num_lanes)]
    for file, count in enumerate(counts):
        shortest = min(lanes, key=len)
        shortest += [(file, number) for number in range(count)]
    rounds = itertools.zip_longest(*lanes)
    return [example for turn in rounds for example in turn if example is not None]


@hypothesis.given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 15))
def test_lanes_take_turns(counts, num_lanes):
    lanes = Lanes(counts, num_lanes)
    assert [lanes.locate(index) for index in range(sum(counts))] == taking_turns(counts, num_lanes)
