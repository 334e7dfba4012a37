"""What processes raise together: one class, whatever failed where. The other process is a text that it would send."""

import json

import jax
import pytest

import jzero
from jzero.checkpoint.damage import DamageError
from jzero.core.disk.files import DiskError
from jzero.core.processes import agree, exchange


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
