"""Resolves the "auto" values that a configuration leaves to a trainer, and overrides others.

A value is named by its key in the file, or as Hugging Face's trainer names it; one such name may decide several keys.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from jzero.core.base.text import as_data
from jzero.core.config.precision import Precision
from jzero.core.config.settings import FLAG, check, integer, number, one_of, optional
from jzero.deepspeed.key import AUTO, Block
from jzero.deepspeed.schema import SCHEMA
from jzero.deepspeed.source import paths_of, value_at, with_value

_PARAMS = ("optimizer.params.", "scheduler.params.")
A_NUMBER = number("a number", math.isfinite)
OTHERS = {
    **dict.fromkeys(("bf16", "fp16"), FLAG),
    "warmup_ratio": number("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "hidden_size": integer(1, most=2**24),
}
"""The values of the trainer's arguments that are not any number."""
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
"""The arguments of Hugging Face's trainer, and the keys that they decide; `hidden_size` is the model's."""
FLOOR = "scheduler.params.warmup_min_lr"
"""What `learning_rate` decides only where it is "auto"."""
ENDLESS = ("WarmupLR", "LRRangeTest", "OneCycle")
"""Schedules that do not depend on the number of steps."""
_NAMES = {None: "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def trainer_name(path: str) -> str | None:
    """Returns the first argument of Hugging Face's trainer that decides a key; `None` if none does."""
    return next((name for name, paths in TRAINER.items() if SCHEMA.canonical(path) in paths), None)


def override(raw: Block, values: Block) -> Block:
    """Returns a configuration with values at their keys, added where they are missing.

    Args:
      raw: The configuration.
      values: By key, or as a trainer names them; such a name changes the keys that are there, or else adds them.

    Raises:
      ValueError: A name is neither a key nor an argument of the trainer.
    """
    present = {SCHEMA.canonical(path): path for path, _ in paths_of(raw)}
    autos = {path for path, written in present.items() if value_at(raw, written) == AUTO}
    of_trainer: dict[str, object] = {}
    by_key: dict[str, object] = {}
    for name, value in values.items():
        path = SCHEMA.canonical(name)
        if path in SCHEMA.keys or path.startswith(_PARAMS):
            by_key[path] = value
        elif name in TRAINER:
            decided = _of_trainer(name, value, {**_betas(raw), **values})
            is_there = not present.keys().isdisjoint(TRAINER[name])
            of_trainer |= {key: x for key, x in decided.items() if key in present and (key != FLOOR or key in autos)}
            has_no_end = name == "max_steps" and value_at(raw, "scheduler.type") in ENDLESS
            of_trainer |= {} if is_there or has_no_end else {key: decided[key] for key in TRAINER[name]}
        else:
            close = difflib.get_close_matches(name, [*SCHEMA.keys, *TRAINER, "optimizer.params.lr"], n=1, cutoff=0.5)
            raise ValueError(
                f"{name!r} is neither a key of DeepSpeed nor an argument of a trainer. Write keys with dots, such as "
                f"`optimizer.params.lr`.{f' Did you mean `{close[0]}`?' if close else ''}"
            )
    for path, value in {**of_trainer, **by_key}.items():
        raw = with_value(raw, present.get(path, path), value)
    return raw


def decide(
    raw: Block, *, auto: Mapping[str, Any] | None, batch_size: int | None, precision: str | Precision | None
) -> Block:
    """Returns a configuration with the values of arguments in place of "auto".

    Raises:
      ValueError: An argument contradicts the configuration, or decides nothing.
    """
    if auto is not None and not isinstance(auto, Mapping):
        raise ValueError(f'`auto` must be a dictionary from keys that are "auto" to values: got {auto!r:.200}.')
    for path, value in _by_path(raw, as_data(auto or {})).items():
        raw = with_value(raw, path, value)
    batch_size = check("batch_size", batch_size, optional(integer(1)))
    if batch_size is not None:
        written = raw.get("train_batch_size")
        if written not in (None, AUTO, batch_size):
            raise ValueError(f"`batch_size={batch_size}` contradicts `train_batch_size` ({written!r}): leave one out.")
        raw = with_value(raw, "train_batch_size", batch_size)
    return raw if precision is None else _with_precision(raw, precision)


def _by_path(raw: Block, auto: Mapping[str, Any]) -> dict[str, object]:
    """Returns the values of `auto` by their keys in the file."""
    present = {SCHEMA.canonical(path): value for path, value in paths_of(raw)}
    autos = [path for path, value in paths_of(raw) if isinstance(value, str) and value == AUTO]
    given = {SCHEMA.canonical(name) for name in auto}
    by_path: dict[str, object] = {}
    for name, value in auto.items():
        own = TRAINER.get(name, (SCHEMA.canonical(name),))
        is_there = not present.keys().isdisjoint(own)
        if name in TRAINER and not is_there:
            continue  # a trainer has it for other files
        values = _of_trainer(name, value, {**_betas(raw), **auto}) if name in TRAINER else {own[0]: value}
        decided = {path: values[key] for path in autos if (key := SCHEMA.canonical(path)) in values}
        if not decided and not (is_there and all(present.get(key, values[key]) == values[key] for key in own)):
            known = f"It stands for {list(values)}: change these" if name in TRAINER else f"A trainer has {[*TRAINER]}"
            raise ValueError(
                f'`auto` names {name!r}, which is not "auto" in the configuration: these are {autos}. {known}.'
            )
        taken = given - {SCHEMA.canonical(name)}
        by_path |= {path: x for path, x in decided.items() if SCHEMA.canonical(path) not in taken}
    return by_path


def _betas(raw: Block) -> dict[str, Any]:
    """Returns the decays of Adam that a configuration has, as a trainer names them."""
    betas = value_at(raw, "optimizer.params.betas")
    return dict(zip(("adam_beta1", "adam_beta2"), betas, strict=False)) if isinstance(betas, list) else {}


def _of_trainer(name: str, value: Any, auto: Mapping[str, Any]) -> dict[str, object]:
    """Returns the keys that an argument of Hugging Face's trainer decides, with their values."""
    if name in TRAINER:
        check(name, value, OTHERS.get(name, A_NUMBER))
    if name in ("adam_beta1", "adam_beta2"):
        return {"optimizer.params.betas": [auto.get("adam_beta1", 0.9), auto.get("adam_beta2", 0.999)]}
    if name == "learning_rate":
        return {**dict.fromkeys(TRAINER[name], value), FLOOR: 0}
    if name == "warmup_ratio":
        total = check("max_steps", auto.get("max_steps"), integer(1, "known where `warmup_ratio` is, >= 1"))
        return dict.fromkeys(TRAINER[name], math.ceil(total * value))
    if name == "hidden_size":  # in elements, by the trainer's rule
        sizes = (value * value, int(0.9 * value * value), 10 * value)
        return dict(zip(TRAINER[name], sizes, strict=True))
    other = {"bf16": "fp16.enabled", "fp16": "bf16.enabled"}.get(name)
    return {**dict.fromkeys(TRAINER.get(name, ()), value), **({other: False} if other and value is True else {})}


def _with_precision(raw: Block, precision: str | Precision) -> Block:
    if isinstance(precision, Precision):
        name = _NAMES[precision.compute_dtype]
    else:
        name = check(
            "precision", precision, one_of("fp32", "bf16", "fp16", says="'fp32', 'bf16', 'fp16' or a `Precision`")
        )
    for block in ("bf16", "fp16"):
        written = "bfloat16" if block == "bf16" and "bfloat16" in raw else block
        enabled = value_at(raw, f"{written}.enabled")
        if isinstance(enabled, bool) and enabled != (name == block):
            raise ValueError(
                f"`precision` ({name}) contradicts `{written}.enabled` ({enabled}) of the configuration: leave one out."
            )
        if enabled == AUTO or (enabled is None and name == block):
            raw = with_value(raw, f"{written}.enabled", name == block)
    return raw
