"""Checks the values of settings: fields of configurations and arguments of functions alike.

Checks look at a value's type first. A number may be a scalar of NumPy or jax, and is kept as Python's. No other array
is a setting: its truth value and its comparisons raise errors of their own, and its dtype is not a value that the user
meant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import jax
import numpy as np

from jzero.core.base.text import plain

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclasses.dataclass(frozen=True)
class Setting(Generic[T_co]):
    """The allowed values of a setting.

    Attributes:
      says: The allowed values, in the words of an error.
      of: Returns the value to keep; raises a `TypeError` or a `ValueError` if it is not allowed.
    """

    says: str
    of: Callable[[object], T_co]


def check(name: str, value: object, setting: Setting[T]) -> T:
    """Returns the value to keep; raises a `ValueError` that names the setting, the value and what is allowed."""
    try:
        return setting.of(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be {setting.says}: got {value!r:.200}.") from None


def check_fields(settings: object, allowed: Mapping[str, Setting[object]], *, prefix: str = "") -> None:
    """Checks the fields of a frozen dataclass, and replaces them by the results of `check`."""
    for name, setting in allowed.items():
        object.__setattr__(settings, name, check(prefix + name, getattr(settings, name), setting))


def one_of(*choices: T, says: str | None = None) -> Setting[T]:
    """One of some Python values; 1 is not True."""

    def convert(value: object) -> T:
        value = plain(value)
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
        raise ValueError

    return Setting(says or f"one of {choices}", convert)


def some_of(*choices: T) -> Setting[tuple[T, ...]]:
    """A sequence of some Python values, at least one."""
    one = one_of(*choices)

    def convert(values: object) -> tuple[T, ...]:
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise TypeError
        return tuple(map(one.of, values))

    return Setting(f"some of {choices}, at least one", convert)


def integer(least: int, says: str | None = None) -> Setting[int]:
    """An integer of at least `least`."""

    def convert(value: object) -> int:
        value = plain(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError
        return int(value)

    return Setting(says or f"an integer >= {least}", convert)


def number(says: str, holds: Callable[[float], bool]) -> Setting[float]:
    """A real number."""

    def convert(value: object) -> float:
        value = plain(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not holds(value):
            raise ValueError
        return value

    return Setting(says, convert)


def optional(setting: Setting[T]) -> Setting[T | None]:
    """A value that `setting` allows, or `None`."""
    return Setting(f"None or {setting.says}", lambda x: None if x is None else setting.of(x))


def _key(value: object, *, may_be_several: bool) -> object:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError
    is_typed = bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
    num_dims = len(shape) - (dtype == np.uint32)  # an old-style key is a vector of words
    if not (is_typed or dtype == np.uint32) or num_dims < 0 or (num_dims and not may_be_several):
        raise ValueError
    return value


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError
    names = tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError
    return names


ONE_KEY = Setting("a PRNG key, such as `jax.random.key(0)`", lambda x: _key(x, may_be_several=False))
KEYS = Setting("a PRNG key, such as `jax.random.key(0)`", lambda x: _key(x, may_be_several=True))
FLAG = one_of(True, False, says="True or False")
NAMES = Setting("a sequence of names, such as ('batch_stats',)", _names)
