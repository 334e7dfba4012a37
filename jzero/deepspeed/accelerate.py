"""Accelerate's configuration files, as the DeepSpeed configuration that Accelerate makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.deepspeed.key import Block
from jzero.deepspeed.paths import AUTO, value_at, with_value

BLOCK = "deepspeed_config"
"""The block that only Accelerate's files have."""
FILE = "deepspeed_config_file"
KEYS = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
NOT_DEEPSPEEDS = frozenset(
    {
        *("deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_exclusion_filter"),
        *("deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names", "transformer_moe_cls_names"),
        *("zero3_init_flag", "enable_msamp", "msamp_opt_level"),
    }
)
"""Keys about starting processes and about torch modules, which Accelerate does not pass on either."""
DEFAULTS = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}


def from_accelerate(raw: Mapping[str, Any], file: Block | None) -> tuple[Block, int | None]:
    """Returns the configuration that Accelerate would hand to DeepSpeed, and the number of processes.

    Args:
      raw: What Accelerate's file holds.
      file: What `deepspeed_config_file` holds, if the block names one; it then decides all but the precision.

    Raises:
      ValueError: The block has keys that Accelerate does not know.
    """
    block = raw[BLOCK]
    if unknown := [name for name in block if name not in {*KEYS, *NOT_DEEPSPEEDS, FILE}]:
        raise ValueError(f"`{BLOCK}` has {unknown}, which Accelerate does not know: it has {sorted({*KEYS, FILE})}.")
    config = DEFAULTS if file is None else file
    for name, path in KEYS.items():
        if file is None and block.get(name) not in (None, *(("none",) if name.endswith("_path") else ())):
            config = with_value(config, path, block[name])
    for name in ("bf16", "fp16"):
        is_on = raw.get("mixed_precision") == name
        at = f"{name}.enabled"
        if value_at(config, at) == AUTO or (is_on and value_at(config, at) is None):
            config = with_value(config, at, is_on)
    processes = raw.get("num_processes")
    return config, processes if isinstance(processes, int) else None
