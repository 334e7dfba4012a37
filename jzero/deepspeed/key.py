"""One key of a DeepSpeed configuration, with its verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["honoured", "compiler", "ignored", "open", "refused"]
Kind: TypeAlias = Literal["bool", "int", "number", "string", "dtype", "pair", "rate", "block", "any"]

Block: TypeAlias = Mapping[str, object]
"""A block of a configuration, or all of it: values by name, some of them blocks."""

REQUIRED = "required"
"""The default of a key that has none."""

USUAL = frozenset({"betas", "eps", "weight_decay", "warmup_min_lr", "warmup_type", "gradient_clipping"})
"""For an "auto" of these, trainers fill in DeepSpeed's default unless told otherwise."""

PARAMS_ON_NVME = "for parameters on NVMe, which jzero keeps in the files of optimizer state"


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes:
      path: The names that lead to it, joined by dots.
      kind: The type of its value; a "pair" is two numbers, a "rate" one number, or one for each parameter group.
      default: DeepSpeed's default.
      verdict: The verdict on the value. One that turns nothing on (`default`, or in `off`) is never refused.
      note: The field or argument that takes it, why it is ignored, or what to do instead.
      off: Further values that turn nothing on.
      least: The smallest number that is allowed.
      choices: The strings that are allowed; all if there are none.
      old_names: Former and alternative names in the same block.
    """

    path: str
    kind: Kind
    default: Any
    verdict: Verdict
    note: str
    _: dataclasses.KW_ONLY
    off: tuple[object, ...] = ()
    least: float = 0
    choices: tuple[str, ...] = ()
    old_names: tuple[str, ...] = ()


def below(block: str, *keys: Key) -> tuple[Key, ...]:
    """Returns keys whose paths lack the name of their block, with it."""
    return tuple(dataclasses.replace(key, path=f"{block}.{key.path}") for key in keys)


def stage_3(*keys: Key) -> tuple[Key, ...]:
    """Returns keys that DeepSpeed also knows by their names with the prefix "stage3_"."""
    return tuple(dataclasses.replace(key, old_names=(f"stage3_{key.path}", *key.old_names)) for key in keys)
