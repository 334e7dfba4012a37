"""XLA options for one step's program alone; nothing global is touched.

[Note: Recommended options]
Found by compiling GPTs of 124M, 1.4B and 7B parameters for 8 H200, scanned and recomputed, 4096 tokens per device (the
figures are in `benchmarks/README.md`): at stage 3 the compiler for GPUs starts a layer's gather where the layer begins,
and waits. Told to pipeline gathers, it carries the next layer's gathered parameters through the loop, for 1 to 5 % more
memory. Loops that gather ahead by themselves, see [Note: Gathering one layer ahead], do better, and worse with the
option on top (7B: 284.8 and 296.4 ms as modelled), so it is for those that do not: with `reshard_after_forward=False`
or `prefetch_bytes=0`. For TPUs nothing is known that helps.

On CPUs with jax 0.12 a bf16 step of a scanned GPT (`benchmarks.cpu_steps`) takes 1.7 to 1.9 times as long as with the
option of `_compat.plain_products`, on one device 1.3 times. fp32 steps, and all steps of jax 0.10, are up to 1.5 times
slower with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from jzero import _compat
from jzero._mesh import mesh_platform
from jzero._plan import ZeroPlan

__all__ = ["CompilerOptions", "check_compiler_options", "compiler_options"]

CompilerOptions: TypeAlias = Mapping[str, Any] | Literal["recommended"]

BUCKETS = {
    "all_gather_bucket_bytes": "xla_gpu_all_gather_combine_threshold_bytes",
    "reduce_bucket_bytes": "xla_gpu_reduce_scatter_combine_threshold_bytes",
}


def check_compiler_options(given: Any) -> None:
    """Raises unless these are options that a step can have."""
    if given is None or given == "recommended" or isinstance(given, Mapping):
        return
    raise ValueError(f"`compiler_options` must be None, 'recommended' or a dictionary of XLA options: got {given!r}.")


def compiler_options(plan: ZeroPlan, given: CompilerOptions | None) -> dict[str, Any] | None:
    """Returns the options that a step's program is compiled with.

    Args:
      plan: The plan of the state, whose `config` may ask for buckets.
      given: What the step was made with; its own entries go before everything else.
    """
    platform = mesh_platform(plan.mesh)
    asked = {name: value for name in BUCKETS if (value := getattr(plan.config, name)) is not None}
    found: dict[str, Any] = {}
    if platform == "gpu":
        found = {BUCKETS[name]: value for name, value in asked.items()}
        loops_wait = plan.config.prefetch_bytes == 0 or not plan.config.reshard_after_forward
        if given == "recommended" and plan.config.stage == 3 and loops_wait:
            found |= _compat.pipelined_gathers()
    elif platform == "cpu" and given == "recommended" and plan.config.policy.compute == jnp.bfloat16:
        found = _compat.plain_products()
    if asked and platform not in ("gpu", None):
        warnings.warn(
            f"`ZeroConfig` has {', '.join(asked)}, but only the compiler for GPUs can be told how much to combine into "
            f"one collective; that for {platform} goes by rules of its own.",
            stacklevel=2,
        )
    if isinstance(given, Mapping):
        found |= given
    return found or None
