"""Exchanges facts between processes before the first batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jzero.arrays.processes import gather_texts


def exchange(attempt: Callable[[], Any]) -> list[Any]:
    """Returns the results of `attempt` from all processes; if it fails in one, raises in all. Each must call it.

    Args:
      attempt: Returns data for JSON.
    """
    if jax.process_count() == 1:
        return [attempt()]
    result, failure = None, None
    try:
        result = attempt()
    except Exception as error:
        failure = error
    told = gather_texts(json.dumps({"result": result, "error": failure and f"{type(failure).__name__}: {failure}"}))
    if failure is not None:
        raise failure
    answers = [json.loads(text) for text in told]
    failed = [f"  process {i}: {answer['error']}" for i, answer in enumerate(answers) if answer["error"]]
    if failed:
        raise ValueError("Other processes failed, so this one does not go on either:\n" + "\n".join(failed[:3]))
    return [answer["result"] for answer in answers]


def check_agreement(descriptions: list[Mapping[str, Any]]) -> None:
    """Raises if processes differ where they must agree; lists the differences, by process."""
    names = [name for name in descriptions[0] if any(other[name] != descriptions[0][name] for other in descriptions)]
    if names:
        rows = [f"  process {i}: {name}={other[name]!r}" for name in names for i, other in enumerate(descriptions)]
        raise ValueError(
            "The processes do not agree about the data, so they would train on different batches or wait for ever:\n"
            + "\n".join(rows[:20])
            + "\nGive each process the same source and the same arguments."
        )
