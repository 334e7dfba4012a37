"""Values of a configuration by path: names joined by dots, such as `optimizer.params.lr`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jzero.deepspeed.key import Block
from jzero.deepspeed.keys import KEYS

AUTO = "auto"
OLD_NAMES = {f"{path.rpartition('.')[0]}.{old}": path for path, key in KEYS.items() for old in key.old_names}


def canonical(path: str) -> str:
    """Returns the path of a key by its current name, without the prefixes that are optional."""
    path = "bf16" + path.removeprefix("bfloat16") if path.partition(".")[0] == "bfloat16" else path
    return OLD_NAMES.get(path, path)


def paths_of(block: Block, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the paths of all values that are not blocks, as the configuration writes them, with the values."""
    for name, value in block.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from paths_of(value, f"{path}.")
        else:
            yield path, value


def value_at(raw: Block, path: str) -> object:
    """Returns the value at a path; `None` if there is none."""
    name, _, rest = path.partition(".")
    value = raw.get(name)
    if not rest:
        return value
    return value_at(value, rest) if isinstance(value, Mapping) else None


def with_value(raw: Block, path: str, value: object) -> Block:
    """Returns a copy with another value at a path."""
    name, _, rest = path.partition(".")
    if not rest:
        return {**raw, name: value}
    block = raw.get(name)
    return {**raw, name: with_value(block if isinstance(block, Mapping) else {}, rest, value)}
