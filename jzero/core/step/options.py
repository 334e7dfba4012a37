"""What a user asks of a step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jzero.core.config.keep import Keep
from jzero.core.config.settings import FLAG, NAMES, Setting, check, integer, number, one_of, optional
from jzero.core.engine.gradients import MicroBatches
from jzero.core.engine.merge import MERGES
from jzero.core.engine.recompute import Remat
from jzero.core.step.compiler_options import CompilerOptions, check_compiler_options

_WORDS: Setting[Any] = one_of(None, True, False, "cheap", "offload", "as_written")
REMAT = Setting(
    "None, True, False, 'cheap', 'offload', 'as_written' or a `Keep`",
    lambda value: value if isinstance(value, Keep) else _WORDS.of(value),
)


def _merges(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {str(re.compile(pattern).pattern): one_of(*MERGES).of(word) for pattern, word in value.items()}


MERGE = Setting(f"a dictionary from regular expressions over names of variables to one of {tuple(MERGES)}", _merges)

KINDS: dict[str, Setting[Any]] = {
    "accumulate_steps": integer(1),
    "reduce": one_of("each", "last"),
    "merge": MERGE,
    "has_aux": FLAG,
    "mutable": NAMES,
    "remat": REMAT,
    "clip_norm": optional(number("a number > 0", lambda x: x > 0)),
    "check_rows": FLAG,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a step, checked; see `make_train_step`."""

    accumulate_steps: int = 1
    reduce: Literal["each", "last"] = "each"
    merge: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_aux: bool = False
    mutable: Sequence[str] = ()
    remat: Remat | None = None
    compiler_options: CompilerOptions | None = None
    clip_norm: float | None = None
    check_processes: bool | float = True
    check_rows: bool = True

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            object.__setattr__(self, name, check(name, getattr(self, name), kind))
        if self.mutable and not self.has_aux:
            raise ValueError(
                f"`mutable={self.mutable}` needs `has_aux=True`: the loss returns the new values in `aux`, by name."
            )
        check_compiler_options(self.compiler_options)

    @property
    def micro(self) -> MicroBatches:
        """How a batch is divided."""
        return MicroBatches(self.accumulate_steps, reduce_last=self.reduce == "last")
