"""Exchanges results and failures between processes, all of which are known to come, by collectives."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.core.processes.agree import others_failed

T = TypeVar("T")


def exchange(attempt: Callable[[], Any]) -> list[Any]:
    """Returns the results of `attempt` of all processes; if it fails in any, raises in all. Each process must call it.

    What all do next depends on the class of the error, so all raise the same: the nearest that covers all failures.

    Args:
      attempt: Returns data for JSON. Is called once.
    """
    if jax.process_count() == 1:
        return [attempt()]
    error: BaseException | None = None
    name = ""
    try:
        result = attempt()
        text = "" if result is None else json.dumps([name, result])
    except BaseException as e:
        error, name = e, f"{type(e).__module__}:{type(e).__qualname__}"
        text = json.dumps([name, f"{type(e).__name__}: {e}"])
    answers: list[tuple[str, Any]] = [json.loads(answer) if answer else ("", None) for answer in _gather(text)]
    kinds = [_error_class(kind) for kind, _ in answers if kind]
    if not kinds:
        return [result for _, result in answers]
    joint = next(kind for kind in kinds[0].__mro__ if all(issubclass(other, kind) for other in kinds))
    joint = RuntimeError if joint is Exception else joint
    if error is not None and _error_class(name) is joint:
        raise error
    failures = [f"process {i}: {why}" for i, (kind, why) in enumerate(answers) if kind]
    raise joint(others_failed(failures)) from error


def _error_class(name: str) -> type[Exception]:
    """Returns the class of an error for all processes; `RuntimeError` if it is no such class, or takes no text."""
    module, _, qualname = name.partition(":")
    kind = getattr(sys.modules.get(module), qualname, None)
    try:
        return kind if kind is not None and isinstance(kind("a text"), Exception) else RuntimeError
    except Exception:  # it takes other arguments
        return RuntimeError


def succeed_together(attempt: Callable[[], T]) -> T:
    """Returns this process's result of `attempt`, of any type; else as `exchange`."""
    results: list[T] = []
    exchange(lambda: results.append(attempt()))
    return results[0]


def _gather(text: str) -> list[str]:
    """Returns the texts of all processes: by one collective if all are empty, else by two."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(len(data), np.int32))).reshape(-1)
    if not sizes.any():
        return [""] * len(sizes)
    buffer = np.zeros(1 << max(10, int(sizes.max() - 1).bit_length()), np.uint8)  # few sizes: each compiles a program
    buffer[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(buffer)).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
