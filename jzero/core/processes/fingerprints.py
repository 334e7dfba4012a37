"""Describes values that must be equal on all processes, as texts that are equal exactly if the values are.

[Note: Fingerprints]
jzero lays out the 64-bit words of a value in rows of a prime length, sums each column, and hashes the sums. That runs
on the host at the speed of memory, since values pass through it to the devices anyway, and any changed word changes the
hash. The text of a program is its StableHLO, constants included, which names neither files nor addresses. Long strings
in its custom calls hold code from other compilers and may name both, so they are left out.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import jax
import numpy as np

from jzero._version import __version__
from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree
from jzero.core.plan.plan import ZeroPlan

COLUMNS = 1021
"""Words in a row: a prime, so that equal parts of an array do not line up, and few enough for an L1 cache."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
OPAQUE = re.compile(r'"[^"]{256,}"')


def describe_plan(plan: ZeroPlan) -> str:
    """Describes the properties of a state that must agree before any leaf is placed."""
    lines = [
        f"config: {plan.config}",
        f"mesh: {dict(plan.mesh.shape)} of devices {[device.id for device in plan.mesh.devices.flat]}",
        f"versions: jax {jax.__version__}, jzero {__version__}",
    ]
    for leaf in plan.leaves:
        lines.append(f"params/{leaf.path}: {leaf.param.dtype}{list(leaf.param.shape)}")
    for other in (*plan.opt_leaves, *plan.other_leaves):
        lines.append(f"{other.path}: {other.dtype}{list(other.shape)}")
    return ADDRESS.sub("", "\n".join(lines))


def describe_inputs(batch: PyTree, rng: object) -> str:
    """Describes a batch and a key: shapes, dtypes, and the values that every device stores whole."""
    lines = [
        _describe(f"batch[{path_str(path)!r}]", x, has_value=getattr(x, "shape", None) == ())
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
    ]
    return "\n".join([*lines, "rng: None" if rng is None else _describe("rng", rng, has_value=True)])


def _describe(name: str, x: Any, *, has_value: bool) -> str:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return f"{name}: {type(x).__name__}"
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    dtype = x.dtype if is_key else jax.dtypes.canonicalize_dtype(x.dtype)
    kind = f"{dtype}{list(x.shape)}"
    if not has_value or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return f"{name}: {kind}"
    value = np.asarray(jax.random.key_data(x)) if is_key else np.asarray(x, dtype)
    return f"{describe_value(name, value)} ({kind})"


def describe_value(path: str, value: np.ndarray) -> str:
    """Describes a value that every process supplies, by its checksum and first numbers."""
    numbers = f", {value.reshape(-1)[:3].tolist()} ..." if value.size else ""
    return f"{path}: values with checksum {_checksum(value)}{numbers}"


def _checksum(value: np.ndarray) -> str:
    """See [Note: Fingerprints]."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    row = COLUMNS * 8
    of_rows = len(data) // row * row
    sums = data[:of_rows].view(np.uint64).reshape(-1, COLUMNS).sum(axis=0, dtype=np.uint64)
    return hashlib.sha256(sums.tobytes() + data[of_rows:].tobytes()).hexdigest()[:16]


def describe_program(lowered: jax.stages.Lowered) -> str:
    """Describes a lowered program by its text."""
    lines = lowered.as_text().splitlines()
    return "\n".join(OPAQUE.sub('"..."', line) if "custom_call" in line else line for line in lines)


def function_name(function: object) -> str:
    """Returns a function's qualified name, or the type's name of a callable without one."""
    return getattr(function, "__qualname__", type(function).__name__)
