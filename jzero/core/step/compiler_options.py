"""XLA options for one step's program; no global option changes.

[Note: Recommended options]
These come from GPTs with 124M, 1.4B and 7B parameters, scanned and recomputed, with 4096 tokens per device, compiled
for 8 H200 (figures in `benchmarks/README.md`). At stage 3 the compiler for GPUs starts a layer's gather when the layer
begins, and waits for it. With pipelined gathers, it carries the next layer's gathered parameters through the loop, for
1 to 5 % more memory. Loops that gather ahead by themselves, see [Note: Gathering one turn ahead], do better, and the
option makes them slower (7B: 284.8 and 296.4 ms as modelled). So the option is for the other loops: with
`prefetch_bytes=0`. For TPUs, no helpful option is known.

[Note: Buckets of gradients]
XLA for GPUs combines reduce-scatters up to 30 MiB *of a shard*: on 8 devices 240 MiB of gradients, on 512 15 GiB. It
then reduces all layers of an unrolled model at once, when no computation is left to overlap with. By default jzero asks
for 16 MiB of gradients, about a layer of the smallest models that are trained on several GPUs; larger gradients travel
by themselves. With many devices the bucket is 256 KiB for each device: a ring sends pieces of that size from one device
to the next, and smaller pieces would take less time than their latency. As modelled on 8 H200, unrolled GPTs: 350M 32.2
-> 31.0 ms, 33 -> 6 % of communication exposed; recomputed 35.4 -> 33.6 ms, 53 -> 13 %; at stage 2 35.5 -> 34.4 ms,
70 -> 35 %, for 8 % more memory; on 64 H200, stage 3, 36.9 -> 34.6 ms, also for 8 %. None of 18 programs takes 0.5 %
longer, even with 15 us more per collective than in the model of the machine, which has no latency.

Where loops reduce between nodes, the bucket is 8 MiB for each device, so that the hops that an iteration runs at once,
those of the one before, are one collective beside its products. As modelled on 2 x 8 H200 at 50, 25 and 6.25 GB/s
per port, a scanned GPT of 419M with secondary parameters: 14.9 -> 14.5, 17.1 -> 15.9 and 30.3 -> 26.0 ms; unrolled,
no slower. Without such hops it would take 3 % longer: there are none with `secondary_grads`, and integers are not
combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from jzero.core.base import compat
from jzero.core.base.guard import warn
from jzero.core.layout.mesh import axis_size, mesh_platform
from jzero.core.plan.plan import ZeroPlan

Options: TypeAlias = dict[str, bool | int | float | str]
"""XLA options of one program, by name."""
CompilerOptions: TypeAlias = Mapping[str, bool | int | float | str] | Literal["recommended"]

GATHER_BUCKET = "xla_gpu_all_gather_combine_threshold_bytes"
"""Counts the results of gathers: whole arrays."""
REDUCE_BUCKET = "xla_gpu_reduce_scatter_combine_threshold_bytes"
"""Counts the results of reductions: shards."""


def check_compiler_options(asked: object) -> None:
    """Raises unless a step can have these options."""
    if asked is None or isinstance(asked, Mapping) or (isinstance(asked, str) and asked == "recommended"):
        return
    raise ValueError(f"`compiler_options` must be None, 'recommended' or a dictionary of XLA options: got {asked!r}.")


def compiler_options(plan: ZeroPlan, asked: CompilerOptions | None) -> Options | None:
    """Returns the compiler options of a step's program.

    Args:
      plan: The plan of the state, whose `config` may set buckets.
      asked: The option of the step; its entries override all others.
    """
    platform = mesh_platform(plan.mesh)
    config = plan.config
    options: Options = {}
    if platform == "gpu":
        count = axis_size(plan.mesh, config)
        exact = config.quantization.reduce == "none" and not config.secondary_grads
        least = 2**23 * count if exact and len(plan.route.levels) > 1 else max(2**24, 2**18 * count)
        reduced = least if config.reduce_bucket_bytes is None else config.reduce_bucket_bytes
        options[REDUCE_BUCKET] = -(-reduced // count)
        if config.all_gather_bucket_bytes is not None:
            options[GATHER_BUCKET] = config.all_gather_bucket_bytes
        if asked == "recommended" and config.stage == 3 and config.prefetch_bytes == 0:
            options |= compat.pipelined_gathers()
    elif platform is not None:
        ignored = [x for x in ("all_gather_bucket_bytes", "reduce_bucket_bytes") if getattr(config, x) is not None]
        if ignored:
            warn(
                f"`ZeroConfig` has {', '.join(ignored)}, but only the compiler for GPUs can be told how much to "
                f"combine into one collective; that for {platform} goes by rules of its own."
            )
    if isinstance(asked, Mapping):
        options |= asked
    return options or None
