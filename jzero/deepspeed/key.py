"""What is known about one key of a DeepSpeed configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["honoured", "compiler", "ignored", "open", "refused"]
Kind: TypeAlias = Literal["bool", "int", "number", "string", "dtype", "pair", "rate", "block", "any"]

REQUIRED = "required"
"""The default of a key that has none."""

USUAL = frozenset({"betas", "eps", "weight_decay", "warmup_min_lr", "warmup_type", "gradient_clipping"})
"""Where it is "auto", a trainer fills in DeepSpeed's default unless it is told otherwise."""

PARAMS_ON_NVME = "for parameters on NVMe, which jzero keeps in the files of optimizer state"


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a configuration.

    Attributes:
      path: The names that lead to it, joined by dots.
      kind: What its value must be; a "pair" is two numbers, a "rate" one number, or one for each parameter group.
      default: DeepSpeed's value where the file has none.
      verdict: What becomes of a value. One that asks for nothing (`default`, or in `off`) is never refused.
      note: Which field or argument takes it; or why it is ignored; or what to do instead.
      off: Further values that ask for nothing.
      least: The smallest number that is allowed.
      choices: The strings that are allowed; all if there are none.
      old_names: Names that it had, or has as well, in the same block.
    """

    path: str
    kind: Kind
    default: Any
    verdict: Verdict
    note: str
    _: dataclasses.KW_ONLY
    off: tuple[Any, ...] = ()
    least: float = 0
    choices: tuple[str, ...] = ()
    old_names: tuple[str, ...] = ()
