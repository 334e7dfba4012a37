"""The blocks `optimizer.params` and `scheduler.params`, checked against the keys of their type."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jzero.deepspeed.key import REQUIRED, USUAL, Key
from jzero.deepspeed.settings import Settings


@dataclasses.dataclass(frozen=True)
class Params:
    """Values of one block.

    Attributes:
      values: By name, with DeepSpeed's defaults.
      given: The names that the block sets.
      open: The names without a usable value: refused, or "auto" without a usual value.
    """

    values: Mapping[str, Any]
    explicit: frozenset[str]
    open: frozenset[str]

    def __getitem__(self, name: str) -> Any:
        """Returns a value by name."""
        return self.values[name]

    def is_complete(self, *, but_for: str | None = None) -> bool:
        """Whether all values are known, except perhaps one."""
        return self.open <= {but_for}

    def with_value(self, name: str, value: object) -> Params:
        """Returns the same with another value."""
        return dataclasses.replace(self, values={**self.values, name: value})


def read_params(settings: Settings, prefix: str, keys: tuple[Key, ...]) -> Params:
    """Returns the values of a block, with DeepSpeed's defaults; unknown names become problems of `settings`.

    Args:
      settings: Receives the verdicts.
      prefix: "optimizer.params" or "scheduler.params".
      keys: The keys of the block's type; their paths are names in the block.
    """
    block = settings.params.get(prefix, {})
    by_name = {key.path: key for key in keys}
    for name, value in block.items():
        if name in by_name:
            settings.read_key(by_name[name], f"{prefix}.{name}", f"{prefix}.{name}", value)
        else:
            close = difflib.get_close_matches(name, by_name, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else f" There are {', '.join(by_name)}."
            settings.problems.append(f"`{prefix}.{name}` is not known.{hint}")
    for key in keys:
        if key.default == REQUIRED and key.path not in block:
            settings.problems.append(f"`{prefix}.{key.path}` is missing: DeepSpeed has no default for it.")
    return _params(settings, prefix, by_name)


def _params(settings: Settings, prefix: str, by_name: Mapping[str, Key]) -> Params:
    values, open_names = {}, set()
    for name, key in by_name.items():
        path = f"{prefix}.{name}"
        value = settings.values.get(path, None if key.default == REQUIRED else key.default)
        if key.kind == "rate" and isinstance(value, list | tuple):
            if len(value) > 1:
                settings.judge(path, "refused", "one for each parameter group: use `optax.multi_transform`")
            value = value[0]
        values[name] = value
        is_refused = path in settings.rows and settings.rows[path].verdict == "refused"
        if is_refused or (path in settings.autos and name not in USUAL):
            open_names.add(name)
    explicit = frozenset(name for name in by_name if f"{prefix}.{name}" in settings.values)
    return Params(values, explicit, frozenset(open_names))
