"""What processes exchange by collectives, with a stand-in for these."""

import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import jzero
from jzero.core.processes import agree, exchange
from jzero.core.step import agreement
from tests import shared


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


def test_of_many_failures_three_are_told():
    _, *told, more = agree.others_failed([f"process {i}: {'x' * 1000}" for i in range(5)]).splitlines()
    assert [line[: len("process 0:")] for line in told] == ["process 0:", "process 1:", "process 2:"]
    assert max(map(len, told)) == agree.MAX_COLUMNS
    assert more == "and 2 more"


def test_a_program_is_compared_once(monkeypatch):
    """Before it first runs; another shape of the batch is another program."""
    compared = []

    def compare(where, mesh, attempt, parts, *, wait_s):
        compared.append(parts(result := attempt()))
        return result

    monkeypatch.setattr(agreement, "are_several", lambda mesh: True)
    monkeypatch.setattr(agreement, "least", lambda *args, **kwargs: 0)
    monkeypatch.setattr(agreement, "agree", compare)
    state = jzero.TrainState.create(params={"w": np.ones((16, 8), np.float32)}, tx=shared.sgd(0.1))
    state = jzero.shard_train_state(state, stage=3)
    step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
    for rows in (8, 8, 16, 8):
        state, _ = step(state, np.ones((rows, 16), np.float32))
    assert len(compared) == 2
    step.clear_cache()
    step(state, np.ones((8, 16), np.float32))
    assert len(compared) == 3
