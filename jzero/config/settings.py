"""Checks the values of settings: fields of configurations and arguments of functions alike.

Checks look at a value's type first. An array is never a setting: its truth value and its comparisons raise errors of
their own, and its dtype is not a value that the user meant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Setting:
    """The allowed values of a setting.

    Attributes:
      says: The allowed values, in the words of an error.
      of: Returns the value to keep; raises a `TypeError` or a `ValueError` if it is not allowed.
    """

    says: str
    of: Callable[[Any], Any]


def check(name: str, value: Any, setting: Setting) -> Any:
    """Returns the value to keep; raises a `ValueError` that names the setting, the value and what is allowed."""
    try:
        return setting.of(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be {setting.says}: got {value!r:.200}.") from None


def check_fields(settings: Any, allowed: Mapping[str, Setting], *, prefix: str = "") -> None:
    """Checks the fields of a frozen dataclass, and replaces them by the results of `check`."""
    for name, setting in allowed.items():
        object.__setattr__(settings, name, check(prefix + name, getattr(settings, name), setting))


def _require(condition: bool, value: Any) -> Any:
    if not condition:
        raise ValueError
    return value


def one_of(*choices: Any, says: str | None = None) -> Setting:
    """One of some Python values; 1 is not True."""

    def convert(value: Any) -> Any:
        found = [x for x in choices if type(x) is type(value) and x == value]
        return _require(bool(found), value)

    return Setting(says or f"one of {choices}", convert)


def some_of(*choices: Any) -> Setting:
    """A sequence of some Python values, at least one."""
    one = one_of(*choices)

    def convert(values: Any) -> tuple[Any, ...]:
        is_some = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
        return tuple(map(one.of, _require(is_some, values)))

    return Setting(f"some of {choices}, at least one", convert)


def whole(least: int, says: str | None = None) -> Setting:
    """An integer of at least `least`."""

    def convert(value: Any) -> int:
        return int(_require(isinstance(value, int) and not isinstance(value, bool) and value >= least, value))

    return Setting(says or f"an integer >= {least}", convert)


def number(says: str, holds: Callable[[float], bool]) -> Setting:
    """A real number: a Python number, or a scalar of NumPy or jax, which is kept as a float."""

    def convert(value: Any) -> Any:
        if isinstance(value, int | float):
            return _require(not isinstance(value, bool) and holds(value), value)
        dtype = getattr(value, "dtype", None)
        is_real = getattr(value, "shape", None) == () and np.dtype(dtype).kind in "iuf"
        return _require(is_real and holds(float(value)), float(value) if is_real else value)

    return Setting(says, convert)


def optional(setting: Setting) -> Setting:
    """A value that `setting` allows, or `None`."""
    return Setting(f"None or {setting.says}", lambda x: x if x is None else setting.of(x))


def _is_key(value: Any, *, one: bool) -> bool:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return False
    is_typed = bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
    words = len(shape) - (dtype == np.uint32)  # an old-style key is a vector of words
    return (is_typed or dtype == np.uint32) and (words == 0 if one else words >= 0)


ONE_KEY = Setting("a PRNG key, such as `jax.random.key(0)`", lambda x: _require(_is_key(x, one=True), x))
KEYS = Setting("a PRNG key, such as `jax.random.key(0)`", lambda x: _require(_is_key(x, one=False), x))
FLAG = Setting("True or False", lambda x: bool(_require(isinstance(x, bool | np.bool_), x)))
NAMES = Setting(
    "a sequence of names, such as ('batch_stats',)",
    lambda x: tuple(_require(isinstance(name, str), name) for name in _require(not isinstance(x, str | bytes), x)),
)
