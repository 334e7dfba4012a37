"""A configuration as a dictionary: DeepSpeed's own, or the one that Accelerate makes of its YAML."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from jzero.core.base.text import as_data
from jzero.deepspeed.key import AUTO, Block

ACCELERATE_BLOCK = "deepspeed_config"
"""The block that only Accelerate's files have."""
FILE = "deepspeed_config_file"
ACCELERATE_KEYS = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
NOT_DEEPSPEEDS = (
    "deepspeed_hostfile deepspeed_multinode_launcher deepspeed_exclusion_filter deepspeed_inclusion_filter "
    "deepspeed_moe_layer_cls_names transformer_moe_cls_names zero3_init_flag enable_msamp msamp_opt_level"
).split()
"""Keys about starting processes and about torch modules, which Accelerate does not pass on either."""
DEFAULTS = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}
MAX_DEPTH = 50
"""Levels of blocks; DeepSpeed's own have four."""


class RawConfig(NamedTuple):
    """A configuration, and the devices that Accelerate's file names; `None` if nothing does."""

    values: Block
    num_devices: int | None = None


def read_source(source: str | os.PathLike[str] | Block) -> RawConfig:
    """Returns the configuration that a file or a dictionary holds.

    Raises:
      ValueError: The file cannot be parsed, holds no dictionary or a key twice, or is nested too deeply.
      TypeError: `source` is neither a path nor a dictionary.
    """
    raw = source if isinstance(source, Mapping) else _read_file(source)
    _check_depth(raw, "The DeepSpeed configuration" if isinstance(source, Mapping) else repr(os.fspath(source)))
    raw = as_data(raw)
    if ACCELERATE_BLOCK not in raw:
        return RawConfig(raw)
    block = raw[ACCELERATE_BLOCK]
    if not isinstance(block, Mapping):
        raise ValueError(f"`{ACCELERATE_BLOCK}` must be a block of keys: got {block!r}.")
    path = block.get(FILE)
    return RawConfig(*_from_accelerate(raw, None if path is None else read_source(path).values))


def _read_file(source: object) -> Block:
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"A DeepSpeed configuration is a path or a dictionary: got {type(source).__name__}.")
    path = os.fspath(source)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    is_yaml = path.endswith((".yaml", ".yml"))
    try:
        raw = _parse_yaml(text, path) if is_yaml else _parse(text, path)
    except RecursionError:
        raise ValueError(_too_deep(repr(path))) from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path!r} must hold a dictionary: got {type(raw).__name__}.")
    if is_yaml and ACCELERATE_BLOCK not in raw:
        other = raw.get("deepspeed")
        raise ValueError(
            f"{path!r} must be a configuration of Accelerate with a block `{ACCELERATE_BLOCK}`: "
            + (f"its `deepspeed` names {other!r}, so pass that file." if other else f"got {list(raw)!r:.200}.")
        )
    return raw


def _check_depth(value: object, name: str) -> None:
    """Raises if blocks lie inside each other deeper than Python can follow, or inside themselves."""
    stack = [(value, 0)]
    while stack:
        inner, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise ValueError(_too_deep(name))
        if isinstance(inner, Mapping):
            stack += [(x, depth + 1) for x in inner.values()]
        elif isinstance(inner, list | tuple):
            stack += [(x, depth + 1) for x in inner]


def _too_deep(name: str) -> str:
    return f"{name} is nested deeper than {MAX_DEPTH} levels; DeepSpeed configurations are not: check its braces."


def _parse_yaml(text: str, path: str) -> object:
    yaml = _optional("yaml")
    if yaml is None:
        raise ValueError(f"{path!r} is YAML, which needs PyYAML: `pip install pyyaml`.")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path!r} must be YAML: {error}.") from error


def _parse(text: str, path: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        # DeepSpeed reads Hjson, which has comments and trailing commas. Few files make use of that.
        hjson = _optional("hjson")
        if hjson is None:
            raise ValueError(
                f"{path!r} is not plain JSON: {error}. If it is Hjson (comments, trailing commas), which DeepSpeed "
                "reads, `pip install hjson`, or hand in a dictionary."
            ) from error
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except hjson.HjsonDecodeError as error:
        raise ValueError(f"{path!r} is neither JSON nor Hjson: {error}.") from error


def _optional(name: str) -> ModuleType | None:
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    counts = collections.Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"A DeepSpeed configuration must have each key once: got {twice} more than once in one block.")
    return dict(pairs)


def _from_accelerate(raw: Mapping[str, Any], file: Block | None) -> tuple[Block, int | None]:
    """Returns the configuration that Accelerate would hand to DeepSpeed, and the number of processes.

    Args:
      raw: What Accelerate's file holds.
      file: What `deepspeed_config_file` holds, if the block names one; it then decides all but the precision.

    Raises:
      ValueError: The block has keys that Accelerate does not know.
    """
    block = raw[ACCELERATE_BLOCK]
    if unknown := [name for name in block if name not in {*ACCELERATE_KEYS, *NOT_DEEPSPEEDS, FILE}]:
        known = sorted({*ACCELERATE_KEYS, FILE})
        raise ValueError(f"`{ACCELERATE_BLOCK}` has {unknown}, which Accelerate does not know: it has {known}.")
    config = DEFAULTS if file is None else file
    for name, path in ACCELERATE_KEYS.items():
        if file is None and block.get(name) not in (None, *(("none",) if name.endswith("_path") else ())):
            config = with_value(config, path, block[name])
    for name in ("bf16", "fp16"):
        is_on = raw.get("mixed_precision") == name
        at = f"{name}.enabled"
        if value_at(config, at) == AUTO or (is_on and value_at(config, at) is None):
            config = with_value(config, at, is_on)
    processes = raw.get("num_processes")
    return config, processes if isinstance(processes, int) else None


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
