"""What processes exchange by collectives, with a stand-in for these."""

import numpy as np
from jax.experimental import multihost_utils

from jzero.core.processes import exchange


def test_texts_of_many_lengths_compile_few_programs(monkeypatch):
    gathered = []

    def twice(x):
        gathered.append(x.shape)
        return np.stack([x, x])

    monkeypatch.setattr(multihost_utils, "process_allgather", twice)
    monkeypatch.setattr(exchange.jax, "process_count", lambda: 2)
    for length in [0, 1, 7, 100, 1000, 1015, 1016, 1017, 1018, 5000, 70_000, *range(2000, 2100)]:
        text = "é" * length
        assert exchange.exchange(lambda text=text: text) == [text, text]
    assert len(set(gathered)) <= 8  # that of the lengths, and powers of two
