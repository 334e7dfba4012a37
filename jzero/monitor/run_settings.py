"""The settings of a run as plain data, for sinks that keep them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jzero.plan.plan import ZeroPlan
from jzero.plan.table import plan_summary


def as_data(value: Any) -> Any:
    """Returns settings as nested dictionaries and lists of numbers and text.

    A plan becomes its summary, a dataclass (such as a `ZeroConfig`) a dictionary of its fields; of anything else that
    is no number, text, list or dictionary, its `repr`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, ZeroPlan):
        return {**plan_summary(value), "config": as_data(value.config)}
    if isinstance(value, Mapping):
        return {str(name): as_data(x) for name, x in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(x) for x in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.generic) or getattr(value, "shape", None) == ():
        return np.asarray(value).item() if np.asarray(value).dtype.kind in "biuf" else repr(value)
    return repr(value)
