"""A configuration as a dictionary: DeepSpeed's own, or the one that Accelerate makes of its YAML."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from jzero.core.base.text import as_data
from jzero.core.config.documents import check_size, parse, unique
from jzero.core.config.settings import TEXT, block, check, integer, one_of, optional
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
OF_ACCELERATE = {
    ACCELERATE_BLOCK: block({FILE: optional(TEXT)}),
    "num_processes": optional(integer(1)),
    "mixed_precision": one_of(None, False, "no", "fp16", "bf16"),  # YAML reads a bare no as false
}
"""What is read of Accelerate's files beside `ACCELERATE_KEYS`."""
OWN = "The DeepSpeed configuration"


class RawConfig(NamedTuple):
    """A configuration, the devices that Accelerate's file names, `None` if nothing does, and what errors call it."""

    values: Block
    num_devices: int | None = None
    name: str = OWN


def read_source(source: str | os.PathLike[str] | Block) -> RawConfig:
    """Returns the configuration that a file or a dictionary holds.

    Raises:
      ValueError: The file cannot be parsed, holds no dictionary or a key twice, or is nested too deeply.
      TypeError: `source` is neither a path nor a dictionary.
    """
    raw = _read(source)
    name = OWN if isinstance(source, Mapping) else repr(os.fspath(source))
    if ACCELERATE_BLOCK not in raw:
        return RawConfig(raw, name=name)
    path = check("", raw, block(OF_ACCELERATE), file=name)[ACCELERATE_BLOCK].get(FILE)
    file = None if path is None else _read(path)
    if file is not None and ACCELERATE_BLOCK in file:
        raise ValueError(f"`{FILE}` in {name} must name a configuration of DeepSpeed: {path!r} is one of Accelerate.")
    return RawConfig(*_from_accelerate(raw, file), name)


def _read(source: object) -> Block:
    """Returns what a file or a dictionary holds."""
    if isinstance(source, Mapping):
        check_size(source, OWN)
        own: Block = as_data(source)
        return own
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"A DeepSpeed configuration is a path or a dictionary: got {type(source).__name__}.")
    path = os.fspath(source)
    with open(path, "rb") as file:
        data = file.read()
    if not path.endswith((".yaml", ".yml")):
        return _parse(data, repr(path))
    yaml = _optional("yaml")
    if yaml is None:
        raise ValueError(f"{path!r} is YAML, which needs PyYAML: `pip install pyyaml`.")
    raw = parse(data, repr(path), functools.partial(_load_yaml, yaml), "must be YAML")
    if ACCELERATE_BLOCK not in raw:
        other = raw.get("deepspeed")
        raise ValueError(
            f"{path!r} must be a configuration of Accelerate with a block `{ACCELERATE_BLOCK}`: "
            + (f"its `deepspeed` names {other!r}, so pass that file." if other else f"got {list(raw)!r:.200}.")
        )
    return raw


def _load_yaml(yaml: Any, text: str, object_pairs_hook: object) -> object:
    """Returns what YAML says, of which a few lines of aliases and merged blocks may be billions of values."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        check_size(root, "it", _inside_node)
        return loader.construct_document(root)
    except (yaml.YAMLError, LookupError, TypeError, AttributeError, ArithmeticError) as error:  # of wrong tags, too
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _inside_node(node: Any) -> Sequence[object]:
    """Returns what lies in a node of YAML; raises a `ValueError` if a block has a key twice."""
    inner = node.value if isinstance(node.value, list) else []
    pairs = [x for x in inner if isinstance(x, tuple)]
    unique([(key.value, None) for key, _ in pairs if isinstance(key.value, str)])
    return [x for pair in pairs for x in pair] or inner


def _parse(data: bytes, name: str) -> Block:
    try:
        return parse(data, name)
    except ValueError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        # DeepSpeed reads Hjson, which has comments and trailing commas. Few files make use of that.
        hjson = _optional("hjson")
        if hjson is None:
            raise ValueError(
                f"{name} is not plain JSON: {error.__cause__}. If it is Hjson (comments, trailing commas), which "
                "DeepSpeed reads, `pip install hjson`, or hand in a dictionary."
            ) from error
    return parse(data, name, hjson.loads, "is neither JSON nor Hjson")


def _optional(name: str) -> ModuleType | None:
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


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
    return config, raw.get("num_processes")


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
