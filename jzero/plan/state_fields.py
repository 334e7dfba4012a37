"""The fields of a train state: which hold arrays, and which of those hold parameters."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jzero._text import path_str
from jzero._types import PyTree, TrainStateLike

NEEDED = ("params", "opt_state", "tx", "replace", "apply_gradients")


def missing_fields(x: object) -> list[str]:
    """Returns what an object lacks to be a train state."""
    return [name for name in NEEDED if not hasattr(x, name)]


def other_fields(state: TrainStateLike) -> dict[str, PyTree]:
    """Returns the fields of a train state that hold arrays, other than params and opt_state, sorted by name."""
    return {
        f.name: getattr(state, f.name)
        for f in sorted(dataclasses.fields(state), key=lambda f: f.name)
        if f.metadata.get("pytree_node", True) and not f.metadata.get("static", False)
        if f.name not in ("params", "opt_state", "tx", "apply_fn")
    }


def frozen_fields(state: TrainStateLike) -> tuple[str, ...]:
    """Returns the names of the fields that hold parameters outside the optimizer, laid out like the others."""
    return tuple(f.name for f in dataclasses.fields(state) if f.metadata.get("holds_params", False))


def check_arrays(state: TrainStateLike) -> None:
    """Raises a `TypeError` that lists every leaf of a train state that is neither an array nor a number."""
    bad = []
    trees = {"params": state.params, "opt_state": state.opt_state, **other_fields(state)}
    for name, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            is_number = isinstance(x, bool | int | float | complex | np.generic)
            is_array = hasattr(x, "shape") and hasattr(x, "dtype") and x.dtype != np.dtype(object)
            if not is_number and not is_array:
                bad.append(f"  {path_str((jax.tree_util.GetAttrKey(name), *path))}: {type(x).__name__} {x!r:.60}")
    if bad:
        raise TypeError(
            "Every leaf of a train state must be an array or a number; these are not:\n"
            + "\n".join(bad)
            + "\nMake them static (`flax.struct.field(pytree_node=False)`) or turn them into arrays."
        )
