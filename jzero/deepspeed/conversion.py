"""`from_deepspeed`: a configuration of DeepSpeed becomes a `ZeroConfig` and a report."""

from __future__ import annotations

import os
import warnings
from typing import Literal

import optax

from jzero.config.offload import Offload
from jzero.config.precision import Precision
from jzero.config.settings import check, integer, optional
from jzero.config.zero import ZeroConfig
from jzero.deepspeed.auto_values import decide
from jzero.deepspeed.batch import BatchSizes, solve_batch
from jzero.deepspeed.fields import ConfigFields, config_fields
from jzero.deepspeed.key import Block
from jzero.deepspeed.optimizers import read_optimizer
from jzero.deepspeed.report import DeepSpeedReport
from jzero.deepspeed.scheduler_block import make_schedule
from jzero.deepspeed.settings import Settings, read_settings
from jzero.deepspeed.source import read_source

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CLIPPING = "gradient_clipping"


def from_deepspeed(
    source: str | os.PathLike[str] | Block,
    *,
    num_devices: int | None = None,
    batch_size: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    precision: Precision | Literal["fp32", "bf16", "fp16"] | None = None,
    auto: Block | None = None,
) -> tuple[ZeroConfig, DeepSpeedReport]:
    """Reads a DeepSpeed configuration (`ds_config.json`).

    The report holds batch sizes, clipping, optimizer and schedule: pass `step_arguments()` to `make_train_step`,
    and `optimizer` to the train state. If jzero cannot honour a value, it drops it and warns with its key.
    Arguments decide the values that are "auto", which a trainer of another library would fill in. The others are in
    `report.undecided`. Those that change the numbers of a run are *open*: a warning names them, the report lists
    them at its head, and `report.verify()` raises.

    Args:
      source: A path to JSON (or to Hjson, if the package `hjson` is installed), or the dictionary itself.
      num_devices: Devices over which the batch is split: all mesh axes that shard it. `None` leaves values open
        that depend on it.
      batch_size: Rows of a step, if `train_batch_size` is "auto" or missing.
      optimizer: An optax transformation that replaces the file's optimizer and schedule.
      precision: As for `ZeroConfig`, if `bf16.enabled` and `fp16.enabled` are "auto" or missing.
      auto: Values for what is "auto": by key, such as `{"gradient_clipping": 1.0}`, or by the name that Hugging
        Face's trainer has for them, such as `{"learning_rate": 2e-4, "bf16": True}`: also `weight_decay`,
        `adam_beta1`, `adam_beta2`, `adam_epsilon`, `max_grad_norm`, `max_steps`, `warmup_steps`, `warmup_ratio`,
        `per_device_train_batch_size`, `gradient_accumulation_steps`, `fp16`, and the model's `hidden_size`. They
        decide what they do there: `learning_rate` also the rates of a warm-up, for example.

    Returns:
      `(config, report)`. The report has a verdict on each key (honoured, left to the compiler, ignored, open or
      refused), with the reason. `report.verify()` raises if anything is refused or open.

    Raises:
      ValueError: The file cannot be read: a key of `zero_optimization`, `fp16`, `bf16`, or of the parameters of an
        optimizer or a schedule is unknown, has a value of the wrong kind or occurs twice, or batch sizes contradict
        each other; the message names all such keys. Or an argument contradicts the file.
      TypeError: `optimizer` is not an optax transformation.
      OSError: There is no such file.

    Example:
      >>> config, report = jzero.from_deepspeed(
      ...     {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, num_devices=8
      ... )
      >>> config.stage, config.policy.compute_dtype, report.micro_batch_size
      (2, 'bfloat16', 8)

    References:
      DeepSpeed 0.19's configuration. Missing keys have its defaults; for example, gradients are clipped to a norm
      of 1.
    """
    fields, report = _convert(
        source, num_devices, batch_size=batch_size, optimizer=optimizer, precision=precision, auto=auto
    )
    if report.refused:
        warnings.warn(
            f"jzero does not honour {', '.join(f'`{row.key}`' for row in report.refused)} of this DeepSpeed "
            "configuration. `print(report)` tells why, and what to do instead.",
            stacklevel=2,
        )
    if report.open:
        warnings.warn(
            f"Nothing decides {', '.join(f'`{row.key}`' for row in report.open)} of this DeepSpeed configuration, "
            'which are "auto" for a trainer to fill in: pass `auto={...}`.',
            stacklevel=2,
        )
    return ZeroConfig(**fields.config, offload=Offload(**fields.offload)), report


def _convert(
    source: str | os.PathLike[str] | Block,
    num_devices: int | None,
    *,
    batch_size: int | None,
    optimizer: optax.GradientTransformation | None,
    precision: str | Precision | None,
    auto: Block | None,
) -> tuple[ConfigFields, DeepSpeedReport]:
    """Returns what goes into a `ZeroConfig`, and the report."""
    check("num_devices", num_devices, optional(integer(1)))
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
    tx = block.make(scheduled)
    settings.imply(CLIPPING, "honoured", "DeepSpeed's default, 1.0: `make_train_step(clip_norm=)`")
    _judge_sizes(settings, sizes)
    if optimizer is not None:
        for prefix in ("optimizer.", "scheduler."):
            settings.replace_all(prefix, "`optimizer=` was given in its place")
        tx, scheduled = optimizer, scheduled._replace(lr=None)
    report = DeepSpeedReport(
        rows=tuple(settings.rows.values()),
        num_devices=num_devices,
        train_batch_size=sizes.train,
        micro_batch_size=sizes.micro,
        accumulate_steps=sizes.accumulate,
        clip_norm=settings[CLIPPING] or None,
        optimizer=tx,
        schedule=scheduled.lr,
    )
    return fields, report


def _judge_sizes(settings: Settings, sizes: BatchSizes) -> None:
    """Marks each "auto" size that follows from the others."""
    for name, size in zip(SIZES, sizes, strict=True):
        if name in settings.autos and size is not None:
            settings.judge_auto(name, f"{size}, which follows from the others")
