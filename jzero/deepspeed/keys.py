"""Every key of a DeepSpeed configuration that is known, by path."""

from __future__ import annotations

from jzero.deepspeed.other_keys import AIO, BATCH, GRADIENTS, OPTIMIZER, PRECISION, REST
from jzero.deepspeed.zero_keys import OFFLOAD, ZENFLOW, ZERO

KEYS = {key.path: key for key in (*BATCH, *ZERO, *ZENFLOW, *OFFLOAD, *PRECISION, *GRADIENTS, *OPTIMIZER, *AIO, *REST)}

LOOKED_INTO = (
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "zero_optimization.zenflow",
    "fp16",
    "bf16",
    "data_types",
    "aio",
    "optimizer",
    "scheduler",
)
"""Blocks whose keys have verdicts of their own. Any other block has one."""

PARAMS = ("optimizer.params", "scheduler.params")
"""Blocks whose keys depend on the type of optimizer or schedule."""

STRICT = ("zero_optimization", "fp16", "bf16")
"""Blocks in which, and below which, an unknown key is an error. Elsewhere DeepSpeed lets it pass."""
