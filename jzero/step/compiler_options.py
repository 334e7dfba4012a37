"""XLA options for one step's program alone; nothing global is touched.

[Note: Recommended options]
Found by compiling GPTs of 124M, 1.4B and 7B parameters for 8 H200, scanned and recomputed, 4096 tokens per device (the
figures are in `benchmarks/README.md`): at stage 3 the compiler for GPUs starts a layer's gather where the layer begins,
and waits. Told to pipeline gathers, it carries the next layer's gathered parameters through the loop, for 1 to 5 % more
memory. Loops that gather ahead by themselves, see [Note: Gathering one turn ahead], do better, and worse with the
option on top (7B: 284.8 and 296.4 ms as modelled), so it is for those that do not: with `reshard_after_forward=False`
or `prefetch_bytes=0`. For TPUs nothing is known that helps.

On CPUs with jax 0.12 a bf16 step of a scanned GPT (`benchmarks.cpu_steps`) takes 1.7 to 1.9 times as long as with the
option of `_compat.plain_products`, and one of plain `jax.jit` 1.8 times. fp32 steps, and all steps of jax 0.10, are up
to 1.5 times slower with it.

[Note: Buckets of gradients]
XLA for GPUs combines reduce-scatters up to 30 MiB *of a shard*: on 8 devices 240 MiB of gradients, on 512 15 GiB. All
layers of an unrolled model are then reduced at once, when nothing is left to compute beside it. By default jzero asks
for 16 MiB of gradients, about a layer of the smallest models that are trained on several GPUs; larger gradients travel
by themselves. On many devices it is 256 KiB for each: a ring sends pieces of that size from one to the next, and
smaller ones would take less time than their latency. As modelled on 8 H200, GPTs unrolled: 350M 32.2 -> 31.0 ms, 33 ->
6 % of communication exposed; recomputed 35.4 -> 33.6 ms, 53 -> 13 %; at stage 2 35.5 -> 34.4 ms, 70 -> 35 %, for 8 %
more memory; on 64 H200, stage 3, 36.9 -> 34.6 ms, also for 8 %. Of 18 programs none takes 0.5 % longer, even if each
collective takes 15 us more than by the model of the machine, which has no latency.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from jzero import _compat
from jzero.plan.mesh import axis_size, mesh_platform
from jzero.plan.plan import ZeroPlan

__all__ = ["CompilerOptions", "check_compiler_options", "compiler_options"]

CompilerOptions: TypeAlias = Mapping[str, Any] | Literal["recommended"]

GATHER_BUCKET = "xla_gpu_all_gather_combine_threshold_bytes"
"""Counts what is gathered, whole."""
REDUCE_BUCKET = "xla_gpu_reduce_scatter_combine_threshold_bytes"
"""Counts what is left of what is reduced: shards."""


def check_compiler_options(given: Any) -> None:
    """Raises unless these are options that a step can have."""
    if given is None or isinstance(given, Mapping) or (isinstance(given, str) and given == "recommended"):
        return
    raise ValueError(f"`compiler_options` must be None, 'recommended' or a dictionary of XLA options: got {given!r}.")


def compiler_options(plan: ZeroPlan, given: CompilerOptions | None) -> dict[str, Any] | None:
    """Returns the options that a step's program is compiled with.

    Args:
      plan: The plan of the state, whose `config` may ask for buckets.
      given: What the step was made with; its own entries go before everything else.
    """
    platform = mesh_platform(plan.mesh)
    config = plan.config
    found: dict[str, Any] = {}
    if platform == "gpu":
        count = axis_size(plan.mesh, config)
        reduced = max(2**24, 2**18 * count) if config.reduce_bucket_bytes is None else config.reduce_bucket_bytes
        found[REDUCE_BUCKET] = -(-reduced // count)
        if config.all_gather_bucket_bytes is not None:
            found[GATHER_BUCKET] = config.all_gather_bucket_bytes
        loops_wait = config.prefetch_bytes == 0 or not config.reshard_after_forward
        if given == "recommended" and config.stage == 3 and loops_wait:
            found |= _compat.pipelined_gathers()
    elif platform is not None:
        asked = [x for x in ("all_gather_bucket_bytes", "reduce_bucket_bytes") if getattr(config, x) is not None]
        if asked:
            warnings.warn(
                f"`ZeroConfig` has {', '.join(asked)}, but only the compiler for GPUs can be told how much to combine "
                f"into one collective; that for {platform} goes by rules of its own.",
                stacklevel=2,
            )
        if platform == "cpu" and given == "recommended" and config.policy.compute == jnp.bfloat16:
            found = _compat.plain_products()
    if isinstance(given, Mapping):
        found |= given
    return found or None
