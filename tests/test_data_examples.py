"""Examples that batches are made of, and files of them: transforms, order, what is alike, and errors that name them."""

import collections
import pathlib
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import jzero.data
from tests.data_examples import Source, examples, ids, make


def test_random_transforms_depend_on_seed_epoch_and_example_alone():
    def noise(**options):
        transform = lambda x, rng: {"id": x["id"], "noise": rng.random(dtype=np.float32)}
        loader = jzero.data.make_loader(Source(13), transform=transform, num_epochs=2, **options)
        found = collections.defaultdict(list)
        for batch in loader:
            for i, x, weight in zip(*map(np.asarray, (batch["id"], batch["noise"], batch["weights"])), strict=True):
                if weight:
                    found[int(i)].append(float(x))
        return found

    expected = noise(batch_size=8, shuffle=True, seed=1)
    assert len({x for pair in expected.values() for x in pair}) == 26
    assert noise(batch_size=8, seed=1, prefetch=0) == expected, "not on the order"
    assert noise(batch_size=3, seed=1, shuffle=True, mesh=jzero.make_mesh(devices=jax.devices()[:3])) == expected
    assert noise(batch_size=8, seed=2) != expected != noise(batch_size=8, seed=1 + 2**40)


def test_grain_datasets_count_on_in_later_epochs():
    dataset = grain.MapDataset.range(10).seed(0).shuffle()
    dataset = dataset.random_map(lambda i, rng: {"id": i, "noise": rng.integers(1 << 30)})
    loader = jzero.data.make_loader(dataset, batch_size=8, num_epochs=2)
    found = [x for batch in loader for x in zip(ids(batch), np.asarray(batch["noise"]).tolist(), strict=False)]
    assert found == [(dataset[i]["id"], dataset[i]["noise"]) for i in range(20)]
    assert [i for i, _ in found[:10]] != [i for i, _ in found[10:]]


def test_files_read_from_their_start_are_read_in_order(tmp_path):
    for i, count in enumerate((9, 14, 3)):
        (tmp_path / f"{i}").write_bytes(bytes(range(20 * i, 20 * i + count)))
    yielded = collections.Counter()

    def read(path):
        for x in pathlib.Path(path).read_bytes():
            yielded[x] += 1
            time.sleep(1e-3)  # so that several threads would get in each other's way
            yield {"id": x}

    source = jzero.data.FileSource(sorted(tmp_path.iterdir()), read=read)
    yielded.clear()
    loader = jzero.data.make_loader(source, batch_size=8, prefetch=4)
    expected = [20 * i + j for i, count in enumerate((9, 14, 3)) for j in range(count)]
    assert [i for batch in loader for i in ids(batch)] == expected
    assert yielded == collections.Counter(expected), "once, by several batches ahead"
    with pytest.raises(ValueError, match="cannot be shuffled by example"):
        jzero.data.make_loader(source, batch_size=8, shuffle=True)
    with pytest.raises(ValueError, match="`num_workers=2`"):
        jzero.data.make_loader(source, batch_size=8, num_workers=2)


def test_an_example_that_raises_stop_iteration_does_not_end_the_data():
    source = Source(16)
    batches = iter(jzero.data.make_loader(source, batch_size=8))
    source.broken = {3: StopIteration()}
    with pytest.raises(RuntimeError, match="Example 3 of epoch 0"):
        next(batches)


@pytest.mark.parametrize(
    ("attempt", "kind", "message"),
    [
        (lambda: make(examples(9), 12), ValueError, r"multiple of the 8 parts .* got 12. The nearest are 8 or 16"),
        (lambda: make(examples(9), 7), ValueError, r"got 7. The nearest are 8\.$"),
        (lambda: make(examples(9), 0), ValueError, "`batch_size` must be an integer >= 1: got 0"),
        (lambda: make(examples(9), seed=-1), ValueError, "`seed` must be an integer >= 0: got -1"),
        (lambda: make(examples(9), prefetch=1.5), ValueError, "`prefetch` must be .* got 1.5"),
        (lambda: make(examples(9), num_workers=-1), ValueError, "`num_workers` must be .* got -1"),
        (lambda: make(examples(9), num_epochs=0), ValueError, "`num_epochs` must be .* got 0"),
        (lambda: make(examples(9), shuffle_window=4), ValueError, "means nothing without `shuffle=True`"),
        (lambda: make(examples(9), axis="fsdp"), ValueError, "`axis` must name an axis of the mesh: got 'fsdp'"),
        (lambda: make([]), ValueError, "`source` is empty"),
        (lambda: make(examples(7), drop_remainder=True), ValueError, "would leave out all 7 examples"),
        (lambda: make(grain.MapDataset.source(examples(7)).repeat()), ValueError, "leave `.repeat\\(\\)` out"),
        (lambda: make(range(2**32), shuffle=True), ValueError, "Grain shuffles up to 4294967295 examples"),
        (lambda: make([np.zeros(3)] * 9), TypeError, "Examples must be dicts .* got ndarray"),
        (lambda: make([{"weights": 1.0}] * 9), ValueError, "Examples have a key 'weights'"),
        (lambda: make([{}] * 9), ValueError, "Examples have no leaves"),
        (lambda: make([{"a": {"text": "hi"}, "x": 1}] * 9), TypeError, r"(?s)a/text: <U2\nTokenize"),
        (lambda: make([{"a": b"hi"}] * 9), TypeError, "a: |S2"),
        (lambda: make([{"a": object()}] * 9), TypeError, "a: object"),
        (lambda: make([None] * 9), ValueError, "Example 0 is None: a source that filters cannot be counted"),
    ],
)
def test_mistakes_are_named_before_the_first_batch(attempt, kind, message):
    with pytest.raises(kind, match=message):
        attempt()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"x": np.zeros(4)}, r"(?s)Example 11 cannot be stacked.*x: float64\[4\], but example 0 has float64\[3\]"),
        ({"x": np.zeros(3, np.float32)}, r"x: float32\[3\], but example 0 has float64\[3\]"),
        ({"y": np.zeros(3)}, "Example 11 has the structure"),
    ],
)
def test_examples_that_are_not_alike_are_named(odd, message):
    batches = iter(make([{"x": np.zeros(3)}] * 11 + [odd]))
    next(batches)
    with pytest.raises(ValueError, match=message):
        next(batches)


def test_numbers_that_do_not_fit_are_named():
    batches = iter(make([{"x": np.array([i, 2**31 - 1 + (i == 13)])} for i in range(16)]))
    assert next(batches)["x"].dtype == jnp.int32
    with pytest.raises(ValueError, match="'x' of example 13 holds a int64"):
        next(batches)


# Many files as one source.

COUNTS = (3, 0, 5, 1, 2)


@pytest.fixture
def paths(tmp_path):
    """Files of unequal counts; the examples are numbered through."""
    first = 0
    for i, count in enumerate(COUNTS):
        (tmp_path / f"{i}.txt").write_text("".join(f"{first + j}\n" for j in range(count)))
        first += count
    return sorted(tmp_path.glob("*.txt"))


def lines(path):
    return [int(line) for line in pathlib.Path(path).read_text().split()]


def one_by_one(path):
    yield from lines(path)


def test_a_file_that_changed_is_named(paths):
    for how in ({"open_file": lines}, {"read": one_by_one}):
        source = jzero.data.FileSource(paths, **how)
        paths[2].write_text("3\n4\n")
        with pytest.raises(ValueError, match=r"2.txt' had 5 examples.*example 3"):
            source[6]
        paths[2].write_text("3\n4\n5\n6\n7\n")
        if source.sequential:
            assert source[7] == 7, "mended, and read from the start again"


def test_an_error_in_a_file_names_the_file(paths):
    source = jzero.data.FileSource(paths, open_file=lines)
    paths[0].write_text("what\n0\n1\n")
    with pytest.raises(ValueError, match="what") as caught:
        source[1]
    assert "example 1 of" in caught.value.__notes__[0]
    assert "0.txt" in caught.value.__notes__[0]


def test_impossible_arguments(paths, tmp_path):
    source = jzero.data.FileSource
    with pytest.raises(ValueError, match="either `open_file`"):
        source(paths)
    with pytest.raises(ValueError, match="either `open_file`"):
        source(paths, open_file=lines, read=lines)
    with pytest.raises(ValueError, match=r"`interleave` .*: got 0"):
        source(paths, open_file=lines, interleave=0)
    with pytest.raises(ValueError, match="`max_open_files` must be"):
        source(paths, open_file=lines, max_open_files=True)
    with pytest.raises(ValueError, match="`paths` is empty"):
        source([], open_file=lines)
    with pytest.raises(ValueError, match=r"names '.*/0.txt' twice"):
        source([*paths, paths[0]], open_file=lines)
    with pytest.raises(ValueError, match="The 1 files hold no examples"):
        source([paths[1]], open_file=lines)
    with pytest.raises(ValueError, match=r"missing' .*: FileNotFoundError"):
        source([tmp_path / "missing"], open_file=lines)
