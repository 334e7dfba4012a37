"""From a configuration of DeepSpeed to the fields of a `ZeroConfig` and a report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jzero.config.precision import Precision
from jzero.config.settings import check, optional, whole
from jzero.deepspeed.auto_values import decide
from jzero.deepspeed.batch import BatchSizes, solve_batch
from jzero.deepspeed.fields import ConfigFields, config_fields
from jzero.deepspeed.optimizers import read_optimizer
from jzero.deepspeed.report import DeepSpeedReport
from jzero.deepspeed.scheduler_block import make_schedule
from jzero.deepspeed.settings import Settings, read_settings
from jzero.deepspeed.source import read_source

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CLIPPING = "gradient_clipping"


def import_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    num_devices: int | None,
    *,
    batch_size: int | None = None,
    optimizer: Any = None,
    precision: str | Precision | None = None,
    auto: Mapping[str, Any] | None = None,
) -> tuple[ConfigFields, DeepSpeedReport]:
    """Returns what goes into a `ZeroConfig`, and the report; see `ZeroConfig.from_deepspeed`."""
    check("num_devices", num_devices, optional(whole(1)))
    if optimizer is not None and not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(f"`optimizer` must be an optax transformation: got {optimizer!r:.200}.")
    raw, processes = read_source(source)
    num_devices = processes if num_devices is None else num_devices
    settings = read_settings(decide(raw, auto=auto, batch_size=batch_size, precision=precision))
    block = read_optimizer(settings)
    schedule = make_schedule(settings, block.lr, has_betas=block.has_betas)
    settings.raise_problems()
    asked = BatchSizes(*(settings[name] for name in SIZES))
    sizes = solve_batch(asked, num_devices, has_auto=batch_size is None and any(x in settings.autos for x in SIZES))
    fields = config_fields(settings, num_devices)
    if isinstance(precision, Precision):
        fields.config["precision"] = precision
    scheduled = schedule()
    made = block.make(scheduled)
    settings.imply(CLIPPING, "honoured", "DeepSpeed's default, 1.0: `make_train_step(clip_norm=)`")
    _judge_sizes(settings, sizes)
    if optimizer is not None:
        for prefix in ("optimizer.", "scheduler."):
            settings.replace_all(prefix, "`optimizer=` was given in its place")
        made, scheduled = optimizer, scheduled._replace(lr=None)
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
        if name in settings.autos and size is not None:
            settings.judge_auto(name, f"{size}, which follows from the others")
