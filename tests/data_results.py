"""What processes of `data_worker` must have read, and others that go on from where they stopped."""

import itertools

from tests import data_worker

EXAMPLES = list(range(sum(data_worker.COUNTS)))


def together(batches_of_each):
    """The examples of each batch, over all processes, in the order of the rows; each has as many batches."""
    return [list(itertools.chain(*parts)) for parts in zip(*batches_of_each, strict=True)]


def assert_files_are_shared(first):
    assert_finish_an_epoch_together(first)
    assert_read_the_files_of_their_rows(first)
    assert_know_what_one_alone_knows(first)


def assert_others_go_on(first, rest):
    for name in ("in order", "shuffled"):
        before, after = (
            list(itertools.chain(*together(process[name] for process in processes))) for processes in (first, rest)
        )
        assert len(before) == data_worker.STEPS_BEFORE * data_worker.BATCH_SIZE
        remaining = len(EXAMPLES) - len(before)
        assert sorted(before + after[:remaining]) == EXAMPLES, "each once in the epoch that was interrupted"
        assert sorted(after[remaining:]) == EXAMPLES, "and in the next"
        assert (before + after[:remaining] == after[remaining:]) == (name == "in order")


def assert_finish_an_epoch_together(first):
    batches = together(process["epoch"] for process in first)
    assert [len(batch) for batch in batches] == [12, 12, 12, 6]
    assert sorted(itertools.chain(*batches)) == EXAMPLES
    assert [len(process["epoch"][-1]) for process in first] == [6, 0], "padding alone in the last process"


def assert_read_the_files_of_their_rows(first):
    names = [f"{i}.txt" for i in range(len(data_worker.COUNTS))]
    assert sorted(name for process in first for name in process["counted"]) == names, "each by one process"
    for process in first:
        assert process["together"] == list(data_worker.COUNTS)
        assert process["opened for the first example"] == ["0.txt"]
    # Two rows for each process; as many lanes for seven files, of which one is empty.
    starts = [0, 11, 14, 22]
    assert together(process["first rounds"] for process in first) == [[x + turn for x in starts] for turn in range(3)]
    opened = [process["opened for them"] for process in first]
    assert opened == [["1.txt"], ["2.txt", "4.txt"]], "file 0 is open from the first example on"


def assert_know_what_one_alone_knows(first):
    for process, results in enumerate(first):
        assert "do not agree about the data" in results["disagree"]
        assert "\n  ".join(f"process {i}: seed={i}" for i in range(len(first))) in results["disagree"]
        assert "batch_size" not in results["disagree"], "only what differs"
        assert "missing.txt' could not be counted" in results["missing"]
        assert results["empty in one"].startswith("`source` is empty" if process == 0 else "Other processes failed")
        assert "`source` is empty" in results["empty in one"]
