"""Types of values, as DeepSpeed takes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

STEPS_END = 2**31
"""No step reaches it: jax counts in 32 bits."""
NO_CAP = 2**63 - 1
"""What DeepSpeed writes for "no limit" (`sys.maxsize`)."""


class ValueKind(NamedTuple):
    """A type of values.

    Attributes:
      must: What must hold: in words, and as a function of the value.
      plain: Returns the value to keep.
      lacks: Returns why jzero refuses a value that DeepSpeed takes; `None` if it does not.
    """

    must: tuple[tuple[str, Callable[[Any], bool]], ...] = ()
    plain: Callable[[Any], Any] = lambda x: x
    lacks: Callable[[Any], str | None] = lambda x: None

    def problem(self, value: object) -> str | None:
        """Returns the requirement that a value misses, if any."""
        return next((words for words, holds in self.must if not holds(value)), None)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= sys.float_info.max  # a NaN is not


def _are_numbers(x: object) -> bool:
    return isinstance(x, Sequence) and bool(x) and all(map(_is_number, x))


def _plain(x: float) -> float:
    return x if abs(x) <= NO_CAP else float(x)  # jax takes no longer integers


def whole(least: int) -> ValueKind:
    """Whole numbers from `least`; 1e9 is one."""
    is_whole = ("a whole number", lambda x: _is_number(x) and x == int(x))
    in_range = ((f"at least {least}", lambda x: x >= least), ("at most 2^63 - 1", lambda x: x <= NO_CAP))
    return ValueKind((is_whole, *in_range), int)


def step_count(least: int) -> ValueKind:
    """Numbers of steps, from `least`."""
    return whole(least)._replace(lacks=lambda x: None if x < STEPS_END else "steps are counted up to 2^31 - 1")


def word_of(*choices: str) -> ValueKind:
    """Some words, in any case."""
    return ValueKind((*STRING.must, (f"one of {choices}", lambda x: x.lower() in choices)), str.lower)


ANY = ValueKind()
NESTED = ValueKind((("a block of keys", lambda x: isinstance(x, Mapping)),))
BOOL = ValueKind((("true or false", lambda x: isinstance(x, bool)),))
STRING = ValueKind((("a string", lambda x: isinstance(x, str)),))
WHOLE, FROM_1 = whole(0), whole(1)
ANY_NUMBER = ValueKind((("a number", _is_number),), float)
NUMBER = ValueKind((*ANY_NUMBER.must, ("at least 0", lambda x: x >= 0)), _plain)
PAIR = ValueKind(
    (
        ("two numbers", lambda x: _are_numbers(x) and len(x) == 2),
        ("from 0 to below 1", lambda x: all(0 <= y < 1 for y in x)),
    )
)
RATE = ValueKind(
    (
        ("a number, or a list of numbers", lambda x: _is_number(x) or _are_numbers(x)),
        ("at least 0", lambda x: min(x if isinstance(x, Sequence) else [x]) >= 0),
    ),
    lambda x: _plain(x[0] if isinstance(x, Sequence) else x),
    lambda x: "one for each parameter group: use `optax.multi_transform`" if _are_numbers(x) and len(x) > 1 else None,
)
"""One number, or one for each parameter group."""
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
}
FLOAT_DTYPE = ValueKind(
    (('"fp32", "fp16" or "bf16"', lambda x: isinstance(x, str) and x.lower() in _DTYPES),), lambda x: _DTYPES[x.lower()]
)
