"""`from_deepspeed`: a configuration of DeepSpeed becomes a `ZeroConfig` and a report.

[Note: Verdicts]
A verdict is a function of the parsed configuration and nothing else. It is what the first rule says that says anything,
of those of the blocks around the key, from the outside in, and then of its own; or else what its row of the schema
says. A key whose row stands, or whose rule says "honoured", gives jzero its value. A rule can only say that an "auto"
is ignored, since otherwise nothing is known of its value.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from typing import Any, Literal

import optax

from jzero.core.base.guard import warn
from jzero.core.config.offload import Offload, ZenFlow
from jzero.core.config.precision import DynamicLossScale, Precision
from jzero.core.config.settings import check, integer, optional
from jzero.core.config.zero import Quantization, ZeroConfig
from jzero.deepspeed.auto_values import decide
from jzero.deepspeed.facts import contradictions, sizes
from jzero.deepspeed.key import NOT_SET, Block, KeyVerdict, Parsed, Ruling
from jzero.deepspeed.optimizers import optimizer_of
from jzero.deepspeed.parsing import AUTO_NOTE, parse
from jzero.deepspeed.report import DeepSpeedReport
from jzero.deepspeed.schedules import problems, scheduled
from jzero.deepspeed.schema import SCHEMA
from jzero.deepspeed.source import read_source


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
    num_devices = check("num_devices", num_devices, optional(integer(1)))
    if optimizer is not None and not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(f"`optimizer` must be an optax transformation: got {optimizer!r:.200}.")
    raw, processes, name = read_source(source)
    c = parse(
        decide(raw, auto=auto, batch_size=batch_size, precision=precision),
        SCHEMA,
        num_devices=processes if num_devices is None else num_devices,
        has_batch_size=batch_size is not None,
        has_optimizer=optimizer is not None,
    )
    if found := [*c.problems, *problems(c)]:
        listed = "\n".join(f"  {problem}" for problem in found)
        raise ValueError(f"{name} cannot be read:\n{listed}")
    train, micro, accumulate = sizes(c)
    for message in contradictions(c):
        raise ValueError(message)
    try:
        config = _zero_config(c, precision)
    except ValueError as error:
        raise ValueError(_in_keys(str(error), c)) from error
    report = DeepSpeedReport(
        rows=verdicts(c),
        num_devices=c.num_devices,
        train_batch_size=train,
        micro_batch_size=micro,
        accumulate_steps=accumulate,
        clip_norm=c["gradient_clipping"] or None,
        optimizer=optimizer_of(c) if optimizer is None else optimizer,
        schedule=scheduled(c).lr if optimizer is None else None,
    )
    _warn(report)
    return config, report


def _warn(report: DeepSpeedReport) -> None:
    if report.refused:
        warn(
            f"jzero does not honour {_names(report.refused)} of this DeepSpeed configuration. `print(report)` tells "
            "why, and what to do instead."
        )
    if report.open:
        warn(
            f"Nothing decides {_names(report.open)} of this DeepSpeed configuration, "
            'which are "auto" for a trainer to fill in: pass `auto={...}`.'
        )


def _names(rows: tuple[KeyVerdict, ...]) -> str:
    return ", ".join(f"`{row.key}`" for row in rows)


def _in_keys(text: str, c: Parsed) -> str:
    """Returns a message with the keys of the file in place of the arguments that they become."""
    for path, key in c.keys.items():
        if not path.endswith(key.target.partition(".")[2]):
            text = text.replace(f"`{key.target}`", f"`{path}`")
    return text


def _zero_config(c: Parsed, precision: object) -> ZeroConfig:
    found = arguments(c)
    if scale := found["DynamicLossScale"]:
        found["Precision"]["loss_scale"] = DynamicLossScale(**scale)
    if flow := found["ZenFlow"]:
        found["Offload"] |= {"compute": "host", "zenflow": ZenFlow(**flow)}
    in_file = Precision(**found["Precision"])
    return ZeroConfig(
        **found["ZeroConfig"],
        precision=precision if isinstance(precision, Precision) else in_file,
        quantization=Quantization(**found["Quantization"]),
        offload=Offload(**found["Offload"]),
    )


def exception(c: Parsed, path: str) -> Ruling | None:
    """Returns what a rule says about a key, see [Note: Verdicts]; `None` if its row of the schema holds."""
    outer = [path[:i] for i, letter in enumerate(path) if letter == "."]
    own = c.keys[path].rules if path in c.keys else ()
    rules = (*(rule for block in outer for rule in c.blocks.get(block, ())), *own)
    return next((ruling for rule in rules if (ruling := rule(c, path)) is not None), None)


def verdicts(c: Parsed) -> tuple[KeyVerdict, ...]:
    """Returns the verdict on each key of a configuration, and on missing ones whose defaults change the numbers."""
    there = [_verdict(c, path, entry.row) for path, entry in c.entries.items()]
    implied = {path: key.implied(c, path) for path, key in c.keys.items() if key.implied and path not in c.entries}
    missing = {path: exception(c, path) or ruling for path, ruling in implied.items() if ruling is not None}
    return (*there, *(KeyVerdict(path, NOT_SET, *ruling) for path, ruling in missing.items()))


def _verdict(c: Parsed, path: str, row: KeyVerdict) -> KeyVerdict:
    ruling = exception(c, path)
    if c.is_auto(path):
        decided = c.keys[path].decided if path in c.keys else None
        if decided and (value := decided(c, path)) is not None and (ruling is None or ruling.verdict == "honoured"):
            ruling = Ruling("ignored", f"{AUTO_NOTE}; here: {value}")
        ruling = ruling if ruling is not None and ruling.verdict == "ignored" else None
    return row if ruling is None else KeyVerdict(row.key, row.value, *ruling)


def arguments(c: Parsed) -> dict[str, dict[str, Any]]:
    """Returns the arguments that the keys become, by class."""
    found: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for path, key in c.keys.items():
        owner, _, name = key.target.partition(".")
        ruling = exception(c, path) if owner else None
        if owner and (ruling is None or ruling.verdict == "honoured"):
            value = key.value(c, path)
            found[owner] |= value if isinstance(value, Mapping) else {} if value is None else {name: value}
    return found
