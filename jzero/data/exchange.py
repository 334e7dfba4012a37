"""Exchanges facts between processes before the first batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jzero.arrays.processes import gather_json, succeed_together


def exchange(attempt: Callable[[], Any]) -> list[Any]:
    """Returns the results of `attempt` from all processes; if it fails in one, raises in all. Each must call it.

    Args:
      attempt: Returns data for JSON.
    """
    return gather_json(succeed_together(attempt, (ValueError,)))


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
