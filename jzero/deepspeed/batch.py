"""The three batch sizes: `train_batch_size = micro_batch_size × accumulate_steps × num_devices`."""

from __future__ import annotations

from typing import NamedTuple


class BatchSizes(NamedTuple):
    """Rows of a step, rows of a device's micro-batch, micro-batches of a step; `None` if unknown."""

    train: int | None
    micro: int | None
    accumulate: int | None


def solve_batch(sizes: BatchSizes, num_devices: int | None, *, has_auto: bool = False) -> BatchSizes:
    """Returns the sizes, the missing ones derived as DeepSpeed does.

    Two sizes give the third. With one of `train` and `micro` alone there is one micro-batch.

    Args:
      sizes: Those of the file.
      num_devices: Devices that the batch is split over; `None` leaves sizes that depend on it unknown.
      has_auto: A trainer decides one of them. Then missing ones have no default.

    Raises:
      ValueError: The sizes contradict each other or `num_devices`.
    """
    train, micro, accumulate = sizes
    if accumulate is None and not has_auto and (train is None or micro is None):
        accumulate = 1
    if num_devices is None:
        _check_divides(BatchSizes(train, micro, accumulate), 1)
        return BatchSizes(train, micro, accumulate)
    _check_divides(BatchSizes(train, micro, accumulate), num_devices)
    if train is None and micro is not None and accumulate is not None:
        train = micro * accumulate * num_devices
    elif train is not None and micro is None and accumulate is not None:
        micro = train // (accumulate * num_devices)
    elif train is not None and micro is not None and accumulate is None:
        accumulate = train // (micro * num_devices)
    if None not in (train, micro, accumulate) and train != micro * accumulate * num_devices:  # type: ignore[operator]  # none is None
        raise ValueError(
            f"`train_batch_size` must be `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × the number "
            f"of devices: got {train} for {micro} × {accumulate} × {num_devices}. Leave one of them out."
        )
    return BatchSizes(train, micro, accumulate)


def _check_divides(sizes: BatchSizes, num_devices: int) -> None:
    """Raises if the given sizes cannot be completed."""
    factors = {
        "`train_micro_batch_size_per_gpu`": sizes.micro,
        "`gradient_accumulation_steps`": sizes.accumulate,
        "the number of devices": num_devices,
    }
    set_sizes = {name: size for name, size in factors.items() if size not in (None, 1)}
    product = 1
    for size in set_sizes.values():
        product *= size
    if sizes.train is not None and sizes.train % product:
        names = " × ".join(f"{name} ({size})" for name, size in set_sizes.items())
        raise ValueError(f"`train_batch_size` ({sizes.train}) must be a multiple of {names}: change one of them.")
