"""Checks the values of settings: fields of configurations and of files, and arguments of functions alike.

Checks look at a value's type first. A number may be a scalar of NumPy or jax, and is kept as Python's. No other array
is a setting: its truth value and its comparisons raise errors of their own, and its dtype is not a value that the user
meant.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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


class _FieldError(Exception):
    """The value of a field, of a field of that one, and so on, is not allowed."""

    def __init__(self, name: str, value: object, says: str) -> None:
        self.name, self.value, self.says = name, value, says


def _of(name: str, value: object, setting: Setting[T]) -> T:
    try:
        return setting.of(value)
    except _FieldError as error:
        raise _FieldError(f"{name}.{error.name}".lstrip("."), error.value, error.says) from None
    except (TypeError, ValueError, OverflowError):
        raise _FieldError(name, value, setting.says) from None


def check(name: str, value: object, setting: Setting[T], *, file: object = None) -> T:
    """Returns the value to keep; raises a `ValueError` that names the setting, the value and what is allowed.

    Args:
      name: The setting; "" for the outermost block of a file, whose fields have names.
      value: Its value.
      setting: The allowed values.
      file: Where the value is from, for errors.
    """
    try:
        return _of(name, value, setting)
    except _FieldError as error:
        where = "" if file is None else f" in {file}"
        raise ValueError(f"`{error.name:.200}`{where} must be {error.says}: got {shown(error.value)}.") from None


def shown(value: object) -> str:
    """Returns a value as text, cut; also one that Python refuses to print."""
    try:
        return f"{value!r:.200}"
    except (ValueError, RecursionError):  # of too many digits, too deep
        return f"a value of type {type(value).__name__}"


def check_fields(settings: object, allowed: Mapping[str, Setting[object]] | None = None, *, prefix: str = "") -> None:
    """Checks the fields of a frozen dataclass, and replaces them by the results of `check`.

    Args:
      settings: The dataclass.
      allowed: What its fields allow. A field whose type lists all its values, such as `Literal["none", "host"]`, needs
        no entry.
      prefix: Of the names of fields in errors.
    """
    for name, setting in {**_listed(type(settings)), **(allowed or {})}.items():  # type: ignore[arg-type]
        object.__setattr__(settings, name, check(prefix + name, getattr(settings, name), setting))


@functools.cache
def _listed(cls: type) -> dict[str, Setting[object]]:
    """Returns the settings of the fields whose types list their values."""
    hints = typing.get_type_hints(cls)
    found = {name: one_of(*values) for name, hint in hints.items() if (values := _values(hint))}
    return found | {name: FLAG for name, hint in hints.items() if hint is bool}


def _values(hint: object) -> tuple[object, ...]:
    """Returns all values of a type; none if it does not list them."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Literal:
        return parts
    if kind in (typing.Union, types.UnionType):
        of_parts = list(map(_values, parts))
        return tuple(itertools.chain(*of_parts)) if all(of_parts) else ()
    return (True, False) if hint is bool else (None,) if hint is types.NoneType else ()


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


def integer(least: int, says: str | None = None, *, most: int | None = None) -> Setting[int]:
    """An integer of at least `least`, and at most `most`."""

    def convert(value: object) -> int:
        value = plain(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError
        if most is not None and value > most:
            raise ValueError
        return int(value)

    return Setting(
        says or (f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"), convert
    )


def number(says: str, holds: Callable[[float], bool]) -> Setting[float]:
    """A real number."""

    def convert(value: object) -> float:
        value = plain(value)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError
        if not holds(float(value)):  # beyond floats an `OverflowError`
            raise ValueError
        return value if abs(value) < 2**63 else float(value)  # jax takes no longer integers

    return Setting(says, convert)


def optional(setting: Setting[T]) -> Setting[T | None]:
    """A value that `setting` allows, or `None`."""
    return Setting(f"None or {setting.says}", lambda x: None if x is None else setting.of(x))


def block(table: Mapping[str, Setting[object]], *, required: Iterable[str] = ()) -> Setting[dict[str, Any]]:
    """Fields by name. Those of a table have its values; others, which a later version may have added, have any."""

    def convert(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        there = {name: value.get(name) for name in table if name in value or name in required}
        return {**value, **{name: _of(name, x, table[name]) for name, x in there.items()}}

    return Setting("a block of keys", convert)


def block_of(setting: Setting[T]) -> Setting[dict[str, T]]:
    """Values of one kind by name."""

    def convert(value: object) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise TypeError
        return {name: _of(name, x, setting) for name, x in value.items()}

    return Setting(f"a block of names, each with {setting.says}", convert)


def list_of(setting: Setting[T]) -> Setting[list[T]]:
    """A list of values of one kind."""

    def convert(value: object) -> list[T]:
        if not isinstance(value, list):
            raise TypeError
        return [_of(str(i), x, setting) for i, x in enumerate(value)]

    return Setting(f"a list, each of it {setting.says}", convert)


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


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


ANY: Setting[Any] = Setting("anything", lambda x: x)
ONE_KEY = Setting("a PRNG key, such as `jax.random.key(0)`", lambda x: _key(x, may_be_several=False))
KEYS = Setting("a PRNG key, such as `jax.random.key(0)`", lambda x: _key(x, may_be_several=True))
FLAG = one_of(True, False, says="True or False")
NAMES = Setting("a sequence of names, such as ('batch_stats',)", _names)
TEXT = Setting("text", _text)
