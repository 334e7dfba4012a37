"""What a configuration says by several of its keys: batch sizes, dtype, where optimizer and parameters live."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from jzero.deepspeed.key import Parsed

ZERO = "zero_optimization"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OLD_NAMES = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
"""Blocks, and the switches that they once were."""


class BatchSizes(NamedTuple):
    """Rows of a step, rows of a device's micro-batch, micro-batches of a step; `None` if unknown."""

    train: int | None
    micro: int | None
    accumulate: int | None


def solve_batch(sizes: BatchSizes, num_devices: int | None, *, has_auto: bool = False) -> BatchSizes:
    """Returns the sizes, the missing ones derived as DeepSpeed does: train = micro × accumulate × devices.

    Two sizes give the third. With one of `train` and `micro` alone there is one micro-batch.

    Args:
      sizes: Those of the file.
      num_devices: Devices that the batch is split over; `None` leaves sizes that depend on it unknown.
      has_auto: A trainer decides one of them. Then missing ones have no default.

    Raises:
      ValueError: The sizes contradict each other or `num_devices`.
    """
    train, micro, steps = sizes
    if steps is None and not has_auto and (train is None or micro is None):
        steps = 1
    names = (f"`{BATCH_KEYS[1]}`", f"`{BATCH_KEYS[2]}`", "the number of devices")
    factors = {name: size or 1 for name, size in zip(names, (micro, steps, num_devices), strict=True)}
    product = math.prod(factors.values())
    if train is not None and train % product:
        known = " × ".join(f"{name} ({size})" for name, size in factors.items() if size != 1)
        raise ValueError(f"`train_batch_size` ({train}) must be a multiple of {known}: change one of them.")
    if num_devices is None or (train, micro, steps).count(None) > 1:
        return BatchSizes(train, micro, steps)
    if None not in (train, micro, steps) and train != product:
        raise ValueError(
            f"`train_batch_size` must be `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × the number "
            f"of devices: got {train} for {micro} × {steps} × {num_devices}. Leave one of them out."
        )
    rest = product if train is None else train // product
    return BatchSizes(train or rest, micro or rest, steps or rest)


def sizes(c: Parsed) -> BatchSizes:
    """Returns the batch sizes."""
    has_auto = not c.has_batch_size and any(map(c.is_auto, BATCH_KEYS))
    return solve_batch(BatchSizes(*(c[name] for name in BATCH_KEYS)), c.num_devices, has_auto=has_auto)


def stage(c: Parsed) -> int:
    """Returns the stage."""
    return c[f"{ZERO}.stage"]


def compute_dtype(c: Parsed) -> str:
    """Returns the dtype of parameters in the loss."""
    return "float16" if c["fp16.enabled"] else "bfloat16" if c["bf16.enabled"] else "float32"


def optimizer_home(c: Parsed) -> str:
    """Returns where the optimizer's state is asked to live: "host", "disk" or "none" (on the devices)."""
    return _home(c, "offload_optimizer")


def asked_params_home(c: Parsed) -> str:
    """Returns where parameters are asked to live."""
    return _home(c, "offload_param")


def _home(c: Parsed, block: str) -> str:
    switch = f"{ZERO}.{OLD_NAMES[block]}"
    device = ("cpu" if c[switch] else "none") if c.sets(switch) else c[f"{ZERO}.{block}.device"]
    return {"nvme": "disk", "cpu": "host"}.get(device, "none")


def is_alone_on_disk(c: Parsed) -> bool:
    """Whether parameters are asked to live on a disk where the optimizer's state does not."""
    return asked_params_home(c) == "disk" != optimizer_home(c)


def params_home(c: Parsed) -> str:
    """Returns where parameters live."""
    return "none" if stage(c) < 3 or is_alone_on_disk(c) else asked_params_home(c)


def is_on_disk(c: Parsed) -> bool:
    """Whether the optimizer's state lives on a disk."""
    return stage(c) > 0 and optimizer_home(c) == "disk"


def contradictions(c: Parsed) -> Iterator[str]:
    """Yields a sentence for each two keys that contradict each other, or the number of devices."""
    compute, declared = compute_dtype(c), c["data_types.param_dtype"]
    if c["fp16.enabled"] and c["bf16.enabled"]:
        yield "`fp16.enabled` and `bf16.enabled` are both true: turn one of them off."
    if declared not in (None, compute):
        yield (
            f"`data_types.param_dtype` is {declared!r}, but by `fp16.enabled` and `bf16.enabled` parameters are "
            f"{compute!r}: let them agree."
        )
    for path, least in ((f"{ZERO}.mics_shard_size", 1), (f"{ZERO}.zero_hpz_partition_size", 2)):
        if stage(c) == 3 and c.num_devices is not None and c[path] >= least and c.num_devices % c[path]:
            yield f"`{path}` ({c[path]}) must divide the number of devices: got {c.num_devices}."
    for block, old in OLD_NAMES.items():
        if c.sets(f"{ZERO}.{old}") and any(path.startswith(f"{ZERO}.{block}") for path in c.entries):
            yield f"`{ZERO}.{old}` is the old name of `{block}`: got both, keep `{ZERO}.{block}`."
    block = f"{ZERO}.offload_optimizer"
    if stage(c) and optimizer_home(c) != "none" and (ratio := c[f"{block}.ratio"]) > 1:
        yield f"`{block}.ratio` must be from 0 to 1: got {ratio!r}."
    if is_on_disk(c) and not c[f"{block}.nvme_path"]:
        yield f"`{block}.device` is nvme, which needs a folder on a local disk: set `{block}.nvme_path`."
