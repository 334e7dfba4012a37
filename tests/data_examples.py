"""Data sets of numbered examples, and loaders of them."""

import collections
import pathlib
import time

import numpy as np

import jzero
import jzero.data


def examples(num_examples):
    rng = np.random.default_rng(0)
    return [
        {"id": i, "x": rng.normal(size=3).astype(np.float32), "y": {"z": rng.normal(size=()).astype(np.float32)}}
        for i in range(num_examples)
    ]


class Source:
    """Numbered examples that take a while, some longer than others; tells what was read."""

    def __init__(self, num_examples, seconds=0.0):
        self.read, self.seconds, self.num_examples = collections.Counter(), seconds, num_examples
        self.broken = {}

    def __len__(self):
        return self.num_examples

    def __getitem__(self, index):
        self.read[index] += 1
        if index in self.broken:
            raise self.broken[index]
        time.sleep(self.seconds * (index % 7))
        return {"id": index}


def ids(batch):
    """The numbers of the examples of a batch, without padding."""
    return np.asarray(batch["id"])[np.asarray(batch["weights"]) == 1].tolist()


def make(source, batch_size=8, **options):
    return jzero.data.make_loader(source, batch_size=batch_size, **options)


def whole_lines(path):
    """Reads a file of numbers; here, as is the next one, since processes that load data import little with it."""
    return [{"id": int(line)} for line in pathlib.Path(path).read_text().split()]


def with_noise(example, rng):
    if example["id"] == 26:
        raise KeyError("no such record")
    return {**example, "noise": rng.random(dtype=np.float32)}
