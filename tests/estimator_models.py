"""What the documentation of DeepSpeed prints, and models whose parameters are counted."""

from __future__ import annotations

import jzero

ZERO2_LIVE = jzero.estimate_zero2_model_states_mem_needs_all_live
ZERO3 = jzero.estimate_zero3_model_states_mem_needs
ZERO3_COLD = jzero.estimate_zero3_model_states_mem_needs_all_cold
ZERO3_LIVE = jzero.estimate_zero3_model_states_mem_needs_all_live


# What DeepSpeed's documentation prints.

HEAD = (
    "Estimated memory needed for params, optim states and gradients for a:\nHW: Setup with 1 node, 8 GPUs per node.\n"
)
ZERO3_T5_3B_COLD = f"""{HEAD}\
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
ZERO2_T5_3B_COLD = f"""{HEAD}\
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu
  127.45GB |  15.93GB | offload_optimizer=none
"""
