"""What a process says at its end, and that it hears of being given up, without other processes."""

import os
import threading

import jax
import pytest

from jzero.core.base import compat
from jzero.core.processes import presence


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


@pytest.mark.parametrize(("in_fork", "closed", "ended"), [(False, False, [1]), (True, False, []), (False, True, [])])
def test_the_end_of_a_process_is_neither_that_of_its_fork_nor_of_another_connection(in_fork, closed, ended, client):
    mine, thread = (Client() if closed else client), threading.Thread()
    thread.start()
    presence._end(mine, 1, os.getpid() + in_fork, threading.Event(), thread)
    assert presence.ended(mine, [0, 1]) == ended
