"""Global batches: which rows, where, in which order, and what happens when something is wrong."""

import itertools
import json
import multiprocessing
import pathlib
import threading
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jzero
import jzero.data
from jzero.data.files import Lanes
from jzero.data.position import BatchSchedule, EpochOrder, Position
from tests import shared
from tests.data_examples import Source, examples, make, whole_lines, with_noise


@pytest.mark.parametrize(
    ("axes", "options", "spec"),
    [
        ({}, {}, ("data",)),
        ({"replica": 2, "data": 4}, {"replica_axis": "replica"}, ("replica", "data")),
        ({"data": 4, "model": 2}, {}, ("data",)),
        ({"fsdp": 8}, {"axis": "fsdp"}, ("fsdp",)),
    ],
)
def test_batches_are_laid_out_as_the_steps_expect(axes, options, spec):
    mesh, source = jzero.make_mesh(**axes), examples(21)
    loader = jzero.data.make_loader(source, batch_size=8, mesh=mesh, **options)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    for number, batch in enumerate(batches):
        rows = source[8 * number : 8 * number + 8]
        rows += [source[0]] * (8 - len(rows))
        expected = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        expected["weights"] = np.array([8 * number + row < 21 for row in range(8)], np.float32)
        assert jax.tree.structure(batch) == jax.tree.structure(expected)
        for x, whole in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
            assert x.sharding == NamedSharding(mesh, PartitionSpec(spec))
            assert x.dtype == (np.int32 if whole.dtype == np.int64 else whole.dtype)
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_training_on_a_padded_remainder_equals_optax_on_the_examples():
    source = examples(21)
    params = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.zeros(())}
    losses_of = lambda params, batch: (batch["x"] @ params["w"] + params["b"] - batch["y"]["z"]) ** 2

    def loss_fn(params, batch):
        losses = losses_of(params, batch)
        return jzero.Weighted((losses * batch["weights"]).sum(), batch["weights"].sum())

    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.adam(0.1)), stage=3)
    loader = jzero.data.make_loader(source, batch_size=16, num_epochs=2)
    state, losses = shared.train(jzero.make_train_step(loss_fn), state, loader)

    batches = [jax.tree.map(lambda *leaves: np.stack(leaves), *rows) for rows in [source[:16], source[16:]] * 2]
    mean = lambda params, batch: losses_of(params, batch).mean()
    want = shared.by_optax(mean, params, optax.adam(0.1), batches)
    np.testing.assert_allclose(losses, want.losses, rtol=2e-6)
    for name, x in jzero.gather_params(state).items():
        np.testing.assert_allclose(x, want.params[name], rtol=2e-6)


def test_positions_of_other_data_are_refused(tmp_path):
    state = iter(jzero.data.make_loader(Source(20), batch_size=8, shuffle=True, seed=4)).get_state()
    other = iter(jzero.data.make_loader(Source(21), batch_size=8, shuffle=True, shuffle_window=5, seed=5))
    with pytest.raises(ValueError, match="position is of other data") as caught:
        other.set_state(state)
    for line in ("num_examples: saved 20, here 21", "seed: saved 4, here 5", "shuffle_window: saved None, here 5"):
        assert line in str(caught.value)
    assert "shuffle: " not in str(caught.value), "only what differs"
    with pytest.raises(ValueError, match=r"no \['epoch', 'example'\]"):
        other.set_state({"next_index": 3})
    for position in (None, 3, []):
        with pytest.raises(TypeError, match="`state` must be a position"):
            other.set_state(position)
    for example in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"`state\['example'\]` must be"):
            other.set_state({**other.get_state(), "example": example})
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"01234567890123456789")
    read = lambda path: [{"id": x} for x in pathlib.Path(path).read_bytes()]
    forth, back = [tmp_path / "a", tmp_path / "b"], [tmp_path / "b", tmp_path / "a"]
    one, *others = (
        iter(jzero.data.make_loader(jzero.data.FileSource(paths, open_file=read, interleave=lanes), batch_size=8))
        for paths, lanes in ((forth, 1), (back, 1), (forth, 2))
    )
    for two in others:
        with pytest.raises(ValueError, match="source: saved"):
            one.set_state(two.get_state())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_position_moves_past_the_batches_made_ahead(prefetch):
    others = set(multiprocessing.active_children())
    with iter(jzero.data.make_loader(Source(64), batch_size=8, prefetch=prefetch)) as batches:
        first = next(batches)
        assert set(multiprocessing.active_children()) <= others, "threads make them, unless workers are asked for"
        start = batches.get_state()
        second = next(batches)
        batches.set_state({**start, "example": 0})
        jax.tree.map(np.testing.assert_array_equal, next(batches), first)
        jax.tree.map(np.testing.assert_array_equal, next(batches), second)


def test_workers_make_the_batches_that_threads_make(tmp_path):
    for i, count in enumerate((9, 14, 7)):
        (tmp_path / f"{i}").write_text("".join(f"{10 * i + j} " for j in range(count)))
    source = jzero.data.FileSource(sorted(tmp_path.iterdir()), open_file=whole_lines, interleave=2)

    def batches(**options):
        loader = jzero.data.make_loader(source, batch_size=8, transform=with_noise, **options)
        found = iter(loader)
        state = json.loads(json.dumps(found.get_state()))
        found.set_state({**state, "example": 3})  # from the middle on
        return found

    others = set(multiprocessing.active_children())
    with batches(num_workers=2) as by_workers, batches(prefetch=0) as expected:
        for _ in range(2):
            ours, theirs = next(by_workers), next(expected)
            assert jax.tree.map(lambda x: x.sharding, ours) == jax.tree.map(lambda x: x.sharding, theirs)
            assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), ours, theirs))
            assert by_workers.get_state() == expected.get_state()
        assert len(set(multiprocessing.active_children()) - others) == 2
        assert ours["noise"].shape == (8,)
        with pytest.raises(KeyError, match="no such record") as caught:
            [next(by_workers) for _ in range(2)]
        assert "example 29 of epoch 0" in "".join(caught.value.__notes__)
        assert by_workers.get_state()["example"] == 27


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]


def wait_for_threads_to_end():
    deadline = time.monotonic() + 20
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not prefetch_threads()


def test_threads_end_with_the_data_or_with_close():
    assert wait_for_threads_to_end()
    loader = jzero.data.make_loader(Source(64), batch_size=8, num_epochs=None)
    batches = iter(loader)
    assert not prefetch_threads(), "none before the first batch"
    next(batches)
    assert prefetch_threads()
    batches.close()
    batches.close()
    assert wait_for_threads_to_end()
    with pytest.raises(ValueError, match="This iterator is closed"):
        next(batches)
    finished = iter(jzero.data.make_loader(Source(64), batch_size=8))
    assert len(list(finished)) == 8
    assert wait_for_threads_to_end()
    for _ in loader:
        break
    assert wait_for_threads_to_end(), "left behind by a loop"


def test_a_loader_without_end_has_no_length():
    loader = make(examples(9), num_epochs=None)
    assert (loader.batches_per_epoch, loader.num_examples) == (2, 9)
    with pytest.raises(TypeError, match="has no length"):
        len(loader)


SIZES = st.integers(1, 60)
few = hypothesis.settings(max_examples=8)  # Grain's permutation is slow for small sizes


def places(order, epoch):
    return [order.example(epoch, place) for place in range(order.num_examples)]


@few
@hypothesis.given(SIZES, st.integers(0, 2**40), st.integers(0, 5), st.none() | st.integers(1, 70))
def test_an_epoch_has_each_example_once(num_examples, seed, epoch, window):
    order = EpochOrder(num_examples=num_examples, seed=seed, shuffle=True, window=window)
    assert sorted(places(order, epoch)) == list(range(num_examples))


def test_orders_differ_by_epoch_and_seed_and_are_not_shared():
    unseeded, of_zero = (jzero.data.make_loader(Source(64), batch_size=8, shuffle=True, **x) for x in ({}, {"seed": 0}))
    jax.tree.map(np.testing.assert_array_equal, next(iter(unseeded)), next(iter(of_zero)))
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
        assert after.example < num_examples, "the end of an epoch is the start of the next"
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
