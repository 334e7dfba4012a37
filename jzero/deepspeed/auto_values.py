"""Arguments that decide what a configuration leaves to a trainer, "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.config.precision import Precision
from jzero.config.settings import check, one_of, optional, whole

__all__ = ["AUTO", "decide"]

AUTO = "auto"
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
    for path, value in (auto or {}).items():
        autos = [".".join(names) for names in _autos(raw)]
        if path not in autos:
            raise ValueError(f'`auto` names {path!r}, which is not "auto" in the configuration: these are {autos}.')
        raw = _with(raw, tuple(path.split(".")), value)
    if check("batch_size", batch_size, optional(whole(1))) is not None:
        given = raw.get("train_batch_size")
        if given not in (None, AUTO, batch_size):
            raise ValueError(f"`batch_size={batch_size}` contradicts `train_batch_size` ({given!r}): leave one out.")
        raw = _with(raw, ("train_batch_size",), batch_size)
    return raw if precision is None else _with_precision(raw, precision)


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
