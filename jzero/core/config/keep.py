"""What a step keeps between its forward and its backward pass."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Literal

from jzero.core.config.settings import Setting, check_fields, integer


def _patterns(value: object) -> str | tuple[str, ...]:
    if value == "all":
        return "all"
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Sequence):
        raise TypeError
    try:
        return tuple(str(re.compile(x).pattern) for x in patterns)
    except re.error as error:
        raise ValueError from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """The option `remat` of a step that spends memory on speed: some values stay between the passes.

    At stage 3 parameters can be gathered again for the backward pass, and cheap activations recomputed. What stays here
    needs neither. A training step chooses a `Keep` by itself if its `remat` is `None`; `fill_memory` chooses one with
    the compiler's help. `step.plan(state, batch)` says what it takes.

    Attributes:
      params: Parameters that stay whole from their first to their last use: "all", or regular expressions over whole
        paths such as `"decoder/.*/kernel"`, one or several.
      blocks: How many repeated blocks (layers) of an unrolled model compute no product twice, since they keep operands
        and results: the last ones, since their recomputation would come when most is in memory. A loop over layers with
        attention counts as one; it keeps attention's operands, and no scores. On TPUs blocks keep all that
        differentiation saves, and loops do not count.
      remat: What is recomputed apart from these blocks, as for `make_train_step`: "cheap", "as_written", True or False.

    Raises:
      ValueError: A field has an impossible value.

    Example:
      >>> keep = jzero.Keep(params="head/.*", blocks=5)
      >>> keep.keeps("head/kernel"), keep.keeps("embed/embedding")
      (True, False)
    """

    params: str | Sequence[str] | Literal["all"] = ()
    blocks: int = 0
    remat: bool | Literal["cheap", "as_written"] = "cheap"

    def __post_init__(self) -> None:
        allowed = {
            "params": Setting("'all', or regular expressions over paths of parameters", _patterns),
            "blocks": integer(0),
        }
        check_fields(self, allowed, prefix="Keep.")
        if self.blocks and self.remat != "cheap":
            raise ValueError(
                f"`Keep.blocks={self.blocks}` says which blocks 'cheap' does not recompute, but `Keep.remat` is "
                f"{self.remat!r}: drop one of the two."
            )

    def keeps(self, path: str) -> bool:
        """Whether the parameter of a path stays whole."""
        return self.params == "all" or any(x.fullmatch(path) for x in self._patterns)

    @functools.cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return list(map(re.compile, self.params))  # `re` itself remembers too few for many parameters
