"""Arguments that decide what a configuration leaves to a trainer, "auto".

A value is named by its key in the file, or as Hugging Face's trainer names it; one such name may decide several keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jzero.config.precision import Precision
from jzero.config.settings import check, number, one_of, optional, whole

AUTO = "auto"
A_NUMBER = number("a number", math.isfinite)
TRAINER = {
    "learning_rate": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "weight_decay": ("optimizer.params.weight_decay",),
    "adam_beta1": ("optimizer.params.betas",),
    "adam_beta2": ("optimizer.params.betas",),
    "adam_epsilon": ("optimizer.params.eps",),
    "max_grad_norm": ("gradient_clipping",),
    "max_steps": ("scheduler.params.total_num_steps",),
    "warmup_steps": ("scheduler.params.warmup_num_steps",),
    "warmup_ratio": ("scheduler.params.warmup_num_steps",),
    "per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "bf16": ("bf16.enabled",),
    "fp16": ("fp16.enabled",),
    "hidden_size": (
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.prefetch_bucket_size",
        "zero_optimization.param_persistence_threshold",
    ),
}
"""The arguments of Hugging Face's trainer, and what they decide; `hidden_size` is the model's."""
NAMES = {None: "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def decide(
    raw: Mapping[str, Any], *, auto: Mapping[str, Any] | None, batch_size: int | None, precision: str | Precision | None
) -> Mapping[str, Any]:
    """Returns a configuration with values in the place of "auto", where arguments have them.

    Raises:
      ValueError: An argument contradicts what the configuration says itself, or decides nothing.
    """
    if auto is not None and not isinstance(auto, Mapping):
        raise ValueError(f'`auto` must be a dictionary from keys that are "auto" to values: got {auto!r:.200}.')
    for path, value in _by_path(raw, auto or {}).items():
        raw = _with(raw, tuple(path.split(".")), value)
    if check("batch_size", batch_size, optional(whole(1))) is not None:
        given = raw.get("train_batch_size")
        if given not in (None, AUTO, batch_size):
            raise ValueError(f"`batch_size={batch_size}` contradicts `train_batch_size` ({given!r}): leave one out.")
        raw = _with(raw, ("train_batch_size",), batch_size)
    return raw if precision is None else _with_precision(raw, precision)


def _by_path(raw: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of `auto` by their keys in the file."""
    autos = [".".join(names) for names in _autos(raw)]
    found: dict[str, Any] = {}
    for name, value in auto.items():
        own = {name: value} if name in autos else _of_trainer(name, value, auto)
        decided = {path: own[key] for path in autos for key in (path, _plain(path)) if key in own}
        if not decided:
            meant = f" It stands for {list(own)}." if own else f" Of a trainer's there are {list(TRAINER)}."
            raise ValueError(
                f'`auto` names {name!r}, which is not "auto" in the configuration: these are {autos}.{meant}'
            )
        found |= {path: x for path, x in decided.items() if path not in auto or path == name}
    return found


def _plain(path: str) -> str:
    """Returns a key without the prefix, and under the name, that are optional."""
    return path.replace(".stage3_", ".").replace("bfloat16.", "bf16.")


def _of_trainer(name: str, value: Any, auto: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that an argument of Hugging Face's trainer decides, with their values."""
    if name in TRAINER and not isinstance(value, bool):
        check(f"auto[{name!r}]", value, A_NUMBER)
    if name in ("adam_beta1", "adam_beta2"):
        return {"optimizer.params.betas": [auto.get("adam_beta1", 0.9), auto.get("adam_beta2", 0.999)]}
    if name == "learning_rate":
        return {**dict.fromkeys(TRAINER[name], value), "scheduler.params.warmup_min_lr": 0}
    if name == "warmup_ratio":
        total = check("auto['max_steps']", auto.get("max_steps"), whole(1, "known where `warmup_ratio` is, >= 1"))
        return dict.fromkeys(TRAINER[name], math.ceil(total * value))
    if name == "hidden_size":  # in elements, as the trainer reckons them
        zero = (value * value, int(0.9 * value * value), 10 * value)
        return dict(zip(TRAINER[name], zero, strict=True))
    other = {"bf16": "fp16.enabled", "fp16": "bf16.enabled"}.get(name)
    return {**dict.fromkeys(TRAINER.get(name, ()), value), **({other: False} if other and value is True else {})}


def _with_precision(raw: Mapping[str, Any], precision: str | Precision) -> Mapping[str, Any]:
    if isinstance(precision, Precision):
        name = NAMES[precision.compute_dtype]
    else:
        name = check(
            "precision", precision, one_of("fp32", "bf16", "fp16", says="'fp32', 'bf16', 'fp16' or a `Precision`")
        )
    for block in ("bf16", "fp16"):
        written = "bfloat16" if block == "bf16" and "bfloat16" in raw else block
        found = raw.get(written)
        given = found.get("enabled") if isinstance(found, Mapping) else None
        if isinstance(given, bool) and given != (name == block):
            raise ValueError(
                f"`precision` ({name}) contradicts `{written}.enabled` ({given}) of the configuration: leave one out."
            )
        if given == AUTO or (given is None and name == block):
            raw = _with(raw, (written, "enabled"), name == block)
    return raw


def _autos(block: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of what is "auto", as the configuration writes them."""
    found: list[tuple[str, ...]] = []
    for name, value in block.items():
        if isinstance(value, Mapping):
            found += _autos(value, (*prefix, str(name)))
        elif isinstance(value, str) and value == AUTO:
            found.append((*prefix, str(name)))
    return found


def _with(raw: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns a copy with another value at a path."""
    name, *rest = path
    inner = raw.get(name)
    return {**raw, name: _with(inner if isinstance(inner, Mapping) else {}, tuple(rest), value) if rest else value}
