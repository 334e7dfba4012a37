"""From a configuration of DeepSpeed to the fields of a `ZeroConfig` and a report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jzero.deepspeed.batch import BatchSizes, solve_batch
from jzero.deepspeed.fields import ConfigFields, config_fields
from jzero.deepspeed.optimizers import read_optimizer
from jzero.deepspeed.reading import read_source
from jzero.deepspeed.report import DeepSpeedReport
from jzero.deepspeed.scheduler_block import make_schedule
from jzero.deepspeed.settings import Settings, read_settings

__all__ = ["import_config"]

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CLIPPING = "gradient_clipping"


def import_config(
    source: str | os.PathLike[str] | Mapping[str, Any], num_devices: int | None
) -> tuple[ConfigFields, DeepSpeedReport]:
    """Returns what goes into a `ZeroConfig`, and the report; see `ZeroConfig.from_deepspeed`."""
    if num_devices is not None and (
        isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1
    ):
        raise ValueError(f"`num_devices` must be None or an integer >= 1: got {num_devices!r}.")
    settings = read_settings(read_source(source))
    optimizer = read_optimizer(settings)
    schedule = make_schedule(settings, optimizer.lr, has_betas=optimizer.has_betas)
    settings.raise_problems()
    given = BatchSizes(*(settings[name] for name in SIZES))
    sizes = solve_batch(given, num_devices, has_auto=any(name in settings.autos for name in SIZES))
    fields = config_fields(settings, num_devices)
    scheduled = schedule()
    made = optimizer.make(scheduled)
    settings.imply(CLIPPING, "honoured", "DeepSpeed's default, 1.0: `make_train_step(clip_norm=)`")
    _judge_sizes(settings, sizes)
    report = DeepSpeedReport(
        rows=tuple(settings.rows.values()),
        num_devices=num_devices,
        train_batch_size=sizes.train,
        micro_batch_size=sizes.micro,
        accumulate_steps=sizes.accumulate,
        clip_norm=settings[CLIPPING] or None,
        optimizer=made,
        schedule=scheduled.lr,
    )
    return fields, report


def _judge_sizes(settings: Settings, sizes: BatchSizes) -> None:
    """Says of an "auto" whether it followed from the others."""
    for name, size in zip(SIZES, sizes, strict=True):
        if name in settings.autos:
            settings.judge_auto(name, "not known" if size is None else f"{size}, which follows from the others")
