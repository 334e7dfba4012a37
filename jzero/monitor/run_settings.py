"""The settings of a run as plain data, for sinks that keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.core.base import text
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.table import plan_summary


def settings_as_data(value: Any) -> Any:
    """Returns settings as nested dictionaries and lists of numbers and text.

    A plan becomes its summary, a dataclass (such as a `ZeroConfig`) a dictionary of its fields; of anything else that
    is no number, text, list or dictionary, its text.
    """
    if isinstance(value, ZeroPlan):
        return {**plan_summary(value), "config": text.as_data(value.config)}
    if isinstance(value, Mapping):
        return {str(name): settings_as_data(x) for name, x in value.items()}
    return text.as_data(value)
