"""Adapters that PEFT wrote, as far as the decoder computes them."""

import pathlib
import re
from typing import Any

from decoder import Lora
from jzero.core.config.documents import parse
from jzero.core.config.settings import (
    ANY,
    FLAG,
    TEXT,
    Setting,
    block,
    check,
    integer,
    list_of,
    number,
    one_of,
    optional,
)
from jzero.weights.safetensors_files import find_tensors


def _modules(value: object) -> Any:
    if not isinstance(value, str):
        return optional(list_of(TEXT)).of(value)
    try:
        re.compile(value)
    except (re.error, RecursionError) as error:
        raise ValueError from error
    return value


def _in_peft(*choices: Any) -> Setting[Any]:
    """The values of a field that the decoder computes."""
    way_out = "(merge other adapters by PEFT's `merge_and_unload`, and pass the merged model as --model)"
    return one_of(*choices, says=f"{' or '.join(map(repr, choices))} here {way_out}")


OFF = _in_peft(None, False)
MODULES: Setting[Any] = Setting("a regular expression, a list of names or None", _modules)
FIELDS: dict[str, Setting[Any]] = {
    # Read. The tensors say where adapters are; `target_modules` and `exclude_modules` must agree.
    "peft_type": _in_peft("LORA"),
    "r": integer(1, most=2**16),
    "lora_alpha": number("a number above 0, up to 1e9", lambda x: 0 < x <= 1e9),
    "use_rslora": FLAG,
    "target_modules": MODULES,
    "exclude_modules": MODULES,
    "target_parameters": optional(list_of(TEXT)),
    # How training began. The other ways, such as "pissa", change the model's own weights, too.
    "init_lora_weights": _in_peft(False, True, "gaussian", "eva", "orthogonal", "mica"),
    **dict.fromkeys(("eva_config", "corda_config", "loftq_config", "lora_ga_config"), ANY),
    # What only training computes.
    **dict.fromkeys(("inference_mode", "lora_dropout", "velora_config"), ANY),
    # Names and origins; what PEFT does not read of linear layers, or not without another field.
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"), ANY),
    **dict.fromkeys(("runtime_config", "fan_in_fan_out", "megatron_core", "layers_pattern"), ANY),
    **dict.fromkeys(("qalora_group_size", "ensure_weight_tying"), ANY),
    # What the decoder does not compute: ranks and factors that differ, adapters of some layers, other tensors.
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _in_peft(None, {})),
    **dict.fromkeys(("layers_to_transform", "modules_to_save"), _in_peft(None, [])),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "lora_bias"), OFF),
    "bias": _in_peft("none"),
    # Other products than A B.
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens"), OFF),
    **dict.fromkeys(("kasa_config", "arrow_config", "monteclora_config", "megatron_config"), OFF),
}
"""The fields of `adapter_config.json`, with the values that the decoder computes. Of any other field, `OFF`."""
NAMES = {"w1": "gate", "w3": "up", "w2": "down", "base_layer": "gate_up", "experts": "down"}
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def read_lora(folder: pathlib.Path) -> Lora:
    """Returns the adapters of a PEFT folder: where they are, and how they are scaled.

    Raises:
      ValueError: A field says what the decoder does not compute, or has a value that none of PEFT's has; or
        `target_modules` leaves out some of the tensors, or they have another rank than `r`.
      jzero.CheckpointError: The tensors cannot be read.
    """
    file = folder / "adapter_config.json"
    said = parse(file.read_bytes(), file)
    check("", said, block({name: FIELDS.get(name, OFF) for name in said}), file=file)
    tensors, _ = find_tensors(folder / "adapter_model.safetensors")
    modules = {found[1] for name in tensors if (found := TENSOR.fullmatch(name))}
    of_experts = {name.rpartition(".")[2] for name in said.get("target_parameters") or ()}
    if of_experts not in (set(), {"gate_up_proj", "down_proj"}):
        raise ValueError(f"`target_parameters` in {file} must be those of gpt-oss's experts, both: got {of_experts}.")
    expected = {x for x in modules if not (of_experts and re.search(r"\.experts(\.base_layer)?$", x))}
    targets, excluded = said.get("target_modules"), said.get("exclude_modules")
    if ignored := sorted(x for x in expected if not _is_among(x, targets) or _is_among(x, excluded)):
        raise ValueError(
            f"`target_modules` {targets!r} and `exclude_modules` {excluded!r} in {file} leave out {ignored[0]} "
            f"({len(ignored)} modules in all), of which there are tensors: correct the fields, or take the tensors out."
        )
    rank, alpha = said.get("r", 8), said.get("lora_alpha", 8)
    names_of_a = {f"base_model.model.{module}.lora_A.weight" for module in expected} & tensors.keys()
    if wrong := sorted(name for name in names_of_a if tensors[name].shape[:1] != (rank,)):
        shape = tensors[wrong[0]].shape
        raise ValueError(f"`r` in {file} must be the rank of the adapters: got {rank}, but {wrong[0]} is {shape}.")
    if said.get("use_rslora"):
        alpha *= rank**0.5  # PEFT divides by the root of the rank, `Lora` by the rank
    last = {module.rpartition(".")[2] for module in modules}
    names = {NAMES.get(name, name.removesuffix("_proj")) for name in last}
    return Lora(rank=rank, alpha=alpha, modules="|".join(sorted(names)))


def _is_among(module: str, said: Any) -> bool:
    """Whether modules are meant: an expression over whole names, names or their ends, or all of linear layers."""
    if isinstance(said, str):
        return said == "all-linear" or re.fullmatch(said, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in said or ())
