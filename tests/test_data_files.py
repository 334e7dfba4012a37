"""Many files as one source."""

import pathlib
import threading

import pytest

import jzero.data

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


class Reader:
    """Reads lines from the start of a file, and counts how often and how far."""

    def __init__(self):
        self.opened, self.read = [], 0

    def __call__(self, path):
        self.opened.append(pathlib.Path(path).name)
        for line in lines(path):
            self.read += 1
            yield line


def test_files_read_from_their_start_are_read_once(paths):
    reader = Reader()
    source = jzero.data.FileSource(paths, read=reader, interleave=2)
    assert (len(reader.opened), reader.read) == (5, 11), "counted"
    assert [source[i] for i in range(len(source))] == [0, 3, 1, 4, 2, 5, 8, 6, 9, 7, 10]
    assert (len(reader.opened), reader.read) == (5 + 4, 22), "and read, but for the empty one"
    assert source[10] == 10
    assert len(reader.opened) == 9, "the last one again costs nothing"
    assert [source[7], source[3]] == [6, 4], "going back starts the file again"
    assert reader.opened[9:] == ["2.txt", "2.txt"]


def test_files_are_opened_once_and_the_oldest_dropped(paths):
    opened = []

    def open_file(path):
        opened.append(pathlib.Path(path).stem)
        return lines(path)

    source = jzero.data.FileSource(paths, open_file=open_file, max_open_files=2)
    opened.clear()
    threads = [threading.Thread(target=lambda: [source[i] for i in (0, 4, 1, 5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(opened) == ["0", "2"]
    assert [source[8], source[0]] == [8, 0]
    assert opened[2:] == ["3", "0"]


def test_a_file_that_changed_is_named(paths):
    for how in ({"open_file": lines}, {"read": Reader()}):
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
