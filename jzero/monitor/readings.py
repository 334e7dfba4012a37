"""Metrics as numbers by name: checks them, and fetches them to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.base.text import path_str
from jzero.core.step.metrics import STEP_METRICS

PREFIX = "perf/"
"""Prefix of the monitor's own values, and of what steps measure themselves."""


def scalars(metrics: Any) -> dict[str, Any]:
    """Returns the leaves of a tree of metrics by path, such as `aux/accuracy`, without waiting for them.

    Raises:
      TypeError: A leaf is not a real scalar; all of them are listed.
      ValueError: Two leaves have one path, or a path starts with `perf/`.
    """
    rows = [(path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(metrics)]
    bad = [f"  {path!r}: {_say(x)}" for path, x in rows if not _is_scalar(x)]
    if bad:
        raise TypeError(
            "Metrics must be real scalars; these are not:\n"
            + "\n".join(bad)
            + "\nTake their mean or another scalar of them in the step, or leave them out of what is logged."
        )
    names = [path for path, _ in rows]
    twice = sorted({path for path in names if names.count(path) > 1})
    if twice:
        raise ValueError(f"Each metric needs a name of its own: these are there more than once: {twice}.")
    reserved = [path for path in names if path.startswith(PREFIX) and path not in STEP_METRICS]
    if reserved:
        raise ValueError(f"Names that start with {PREFIX!r} are the monitor's own: got {reserved}. Rename them.")
    return dict(rows)


def _is_scalar(x: Any) -> bool:
    """Whether `x` is a real scalar; reads only its shape and dtype."""
    if isinstance(x, bool | int | float):
        return True
    dtype = getattr(x, "dtype", None)
    if dtype is None or getattr(x, "shape", None) != ():
        return False
    is_real = jnp.issubdtype(dtype, np.number) and not jnp.issubdtype(dtype, np.complexfloating)
    return bool(is_real or dtype == np.bool_)


def _say(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return f"{type(x).__name__} {x!r:.40}"


def fetch(readings: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns metrics as floats. Waits for the last of them, once."""
    return [{name: float(x) for name, x in values.items()} for values in jax.device_get(list(readings))]


def peak_device_bytes() -> int | None:
    """Returns the peak memory of this process's fullest device; `None` if devices do not report it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [int(x["peak_bytes_in_use"]) for x in stats if "peak_bytes_in_use" in x]
    return max(peaks, default=None)
