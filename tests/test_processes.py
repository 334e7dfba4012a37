"""What processes tell each other, with stand-ins for the others: texts, the end of one, errors of one class."""

import json
import os
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import multihost_utils

import jzero
from jzero.checkpoint.damage import DamageError
from jzero.core.base import compat
from jzero.core.disk.files import DiskError
from jzero.core.processes import agree, exchange, presence
from jzero.core.processes.fingerprints import COLUMNS, describe_value
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


ROW = 8 * COLUMNS  # bytes


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("size", [8, ROW - 8, ROW, ROW + 8, 5 * ROW + 24])
def test_any_changed_bit_changes_the_text(dtype, size):
    """Texts of values that processes compare are equal exactly if the values are."""
    data = np.random.default_rng(size).integers(0, 64, size, np.uint8)  # no NaN
    text = describe_value("x", data.view(dtype))
    assert text == describe_value("x", data.copy().view(dtype))
    for place in {0, size // 2, size - 1, size - ROW // 2} & set(range(size)):
        changed = data.copy()
        changed[place] ^= 1
        assert describe_value("x", changed.view(dtype)) != text
    assert describe_value("x", np.roll(data, dtype(0).itemsize).view(dtype)) != text


class Client:
    """Keeps texts by key, as the client of `jax.distributed` does."""

    def __init__(self):
        self.texts = {}

    def key_value_set(self, key, text, *, allow_overwrite):
        assert allow_overwrite
        self.texts[key] = text

    def key_value_try_get(self, key):
        if key not in self.texts:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.texts[key]


@pytest.fixture
def client(monkeypatch):
    client = Client()
    monkeypatch.setattr(compat, "distributed_client", lambda: client)
    monkeypatch.setattr(presence, "LISTEN_S", 0.01)
    return client


def test_a_process_that_was_given_up_says_so_once(client, caplog):
    presence.give_up(client, [1, 2], "It is late.")
    presence._listen(client, 1, threading.Event())
    (said,) = caplog.messages
    assert said.startswith("Others do not wait for process 1 any more")
    assert said.endswith("It is late.")


def test_whoever_is_late_is_waited_for_together_with_the_others(client, monkeypatch):
    waits = []

    def get(client, key, wait_s=0.0):
        if not key.startswith("jzero/ended"):
            waits.append(wait_s)

    monkeypatch.setattr(presence, "get", get)
    monkeypatch.setattr(agree, "_history", agree._History(client))
    comparison = agree._Comparison("here", (0, 1, 2, 3), 0.1)
    assert comparison._fetch({i: f"entry/{i}" for i in (1, 2, 3)}, time.monotonic() + 0.1) == {}
    first, *others = (waits[i::3] for i in range(3))
    assert 0 < first[0] <= 0.1
    assert {x for turn in others for x in turn} == {0.0}


@pytest.mark.parametrize(("in_fork", "closed", "ended"), [(False, False, [1]), (True, False, []), (False, True, [])])
def test_the_end_of_a_process_is_neither_that_of_its_fork_nor_of_another_connection(in_fork, closed, ended, client):
    mine, thread = (Client() if closed else client), threading.Thread()
    thread.start()
    presence._end(mine, 1, os.getpid() + in_fork, threading.Event(), thread)
    assert presence.ended(mine, [0, 1]) == ended


class TwoTextsError(ValueError):
    def __init__(self, first, second):
        super().__init__(first, second)


def sent(error):
    """What a process sends that fails so."""
    name = "" if error is None else f"{type(error).__module__}:{type(error).__qualname__}"
    return json.dumps([name, f"{type(error).__name__}: {error}"])


def fails(error):
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("here", "there", "raised"),
    [
        (None, DamageError("there"), DamageError),
        (None, jzero.CheckpointError("there"), jzero.CheckpointError),
        (DamageError("here"), jzero.CheckpointError("there"), jzero.CheckpointError),
        (jzero.CheckpointError("here"), DamageError("there"), jzero.CheckpointError),
        (DamageError("here"), DiskError("there"), RuntimeError),
        (DamageError("here"), ValueError("there"), RuntimeError),
        (None, DiskError("there"), DiskError),
        (None, FileNotFoundError("there"), FileNotFoundError),
        (None, TwoTextsError("there", ""), RuntimeError),
        (None, KeyboardInterrupt("there"), RuntimeError),
        (DamageError("here"), KeyboardInterrupt("there"), RuntimeError),
    ],
)
def test_one_class_in_all_processes(here, there, raised, monkeypatch):
    """Whatever failed where. The other process is a text that it would send."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(exchange, "_gather", lambda text: [text, sent(there)])
    with pytest.raises(raised) as caught:
        exchange.succeed_together(lambda: fails(here))
    assert type(caught.value) is raised
    assert caught.value is here or f"process 1: {type(there).__name__}: " in str(caught.value)


@pytest.mark.parametrize("error", [TwoTextsError("here", ""), KeyboardInterrupt("here"), ValueError("here")])
def test_the_process_that_failed_raises_its_own_error(error, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(exchange, "_gather", lambda text: [text, ""])
    with pytest.raises(type(error)) as caught:
        exchange.succeed_together(lambda: fails(error))
    assert caught.value is error


def test_lines_of_programs_that_only_some_have():
    """Numbers of values do not count, since one more value changes those of all that follow."""
    rows = [["a %1", "b %2", "b %3"], ["a %1", "new %2", "b %3"], ["a %7", "b %8"]]
    assert agree._own_lines(rows) == [["b %3"], ["new %2"], []]
