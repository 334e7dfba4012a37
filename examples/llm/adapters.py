"""Adapters that PEFT wrote, as far as the decoder computes them."""

import json
import pathlib
import re
from typing import Any

from safetensors import safe_open

from decoder import Lora

ANY = object()
OFF = (None, False)
FIELDS: dict[str, Any] = {
    # Read. The tensors say where adapters are; `target_modules` and `exclude_modules` must agree.
    "peft_type": ("LORA",),
    "r": ANY,
    "lora_alpha": ANY,
    "use_rslora": (False, True),
    "target_modules": ANY,
    "exclude_modules": ANY,
    # How training began. The other ways, such as "pissa", change the model's own weights, too.
    "init_lora_weights": (False, True, "gaussian", "eva", "orthogonal", "mica"),
    **dict.fromkeys(("eva_config", "corda_config", "loftq_config", "lora_ga_config"), ANY),
    # What only training computes.
    **dict.fromkeys(("inference_mode", "lora_dropout", "velora_config"), ANY),
    # Names and origins; what PEFT does not read of linear layers, or not without another field.
    **dict.fromkeys(("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"), ANY),
    **dict.fromkeys(("runtime_config", "fan_in_fan_out", "megatron_core", "layers_pattern"), ANY),
    **dict.fromkeys(("qalora_group_size", "ensure_weight_tying"), ANY),
    # What the decoder does not compute: ranks and factors that differ, adapters of some layers, other tensors.
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": OFF,
    "modules_to_save": (None, []),
    "trainable_token_indices": OFF,
    "target_parameters": ANY,
    "bias": ("none",),
    "lora_bias": OFF,
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
      ValueError: A field says what the decoder does not compute, or `target_modules` leaves out some of the tensors.
    """
    file = folder / "adapter_config.json"
    said = json.loads(file.read_text())
    for name, value in said.items():
        allowed = FIELDS.get(name, OFF)
        if allowed is not ANY and value not in allowed:
            raise ValueError(
                f"`{name}` in {file} is {value!r}, but must be {' or '.join(map(repr, allowed))} here: merge such "
                "adapters by PEFT's `merge_and_unload`, and pass the folder of the merged model as --model."
            )
    with safe_open(folder / "adapter_model.safetensors", "np") as tensors:
        modules = {found[1] for name in tensors.keys() if (found := TENSOR.fullmatch(name))}  # noqa: SIM118
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
