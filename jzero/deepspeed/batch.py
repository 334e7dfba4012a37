"""The three batch sizes: `train_batch_size = micro_batch_size × accumulate_steps × num_devices`."""

from __future__ import annotations

from typing import NamedTuple


class BatchSizes(NamedTuple):
    """Rows of a step, rows of a device's micro-batch, micro-batches of a step; `None` where it is not known."""

    train: int | None
    micro: int | None
    accumulate: int | None


def solve_batch(given: BatchSizes, num_devices: int | None, *, has_auto: bool = False) -> BatchSizes:
    """Returns the sizes with what follows from those that are given, as DeepSpeed derives it.

    Two sizes give the third. With one of `train` and `micro` alone there is one micro-batch.

    Args:
      given: The sizes of the file.
      num_devices: Devices that the batch is split over. `None` leaves open what follows from it.
      has_auto: One is left to a trainer. Then nothing is assumed about those that are missing.

    Raises:
      ValueError: The sizes contradict each other or `num_devices`.
    """
    train, micro, accumulate = given
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
    """Raises if no number for what is missing could be right."""
    factors = {
        "`train_micro_batch_size_per_gpu`": sizes.micro,
        "`gradient_accumulation_steps`": sizes.accumulate,
        "the number of devices": num_devices,
    }
    known = {name: size for name, size in factors.items() if size not in (None, 1)}
    product = 1
    for size in known.values():
        product *= size
    if sizes.train is not None and sizes.train % product:
        names = " × ".join(f"{name} ({size})" for name, size in known.items())
        raise ValueError(f"`train_batch_size` ({sizes.train}) must be a multiple of {names}: change one of them.")
