"""The fields of a train state: which hold arrays, and which of those hold parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree, TrainStateLike

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


def check_optimizer(tx: object) -> None:
    """Raises a `TypeError` unless `tx` is an optax transformation."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"`tx` must be an optax transformation, such as `optax.adamw(1e-3)`: got {type(tx).__name__}. For "
            "parameters that nobody trains pass `optax.set_to_zero()`."
        )


def check_state_fields(state: TrainStateLike) -> None:
    """Raises an error if a field that training needs is missing, leaves are no numbers, or two have the same path."""
    for name in ("step", "params"):
        if getattr(state, name, 0) is None:
            raise TypeError(
                f"`{name}` of a train state must not be None. Make the state by its class's `create`, or set "
                f"`{name}={'0' if name == 'step' else '...'}`."
            )
    check_optimizer(state.tx)
    if shape := np.shape(getattr(state, "step", 0)):
        raise ValueError(
            f"`step` of a train state must be one number: it has shape {shape}. If the state holds a copy for each "
            "device, as `flax.jax_utils.replicate` makes it for `jax.pmap`, pass one, "
            "`flax.jax_utils.unreplicate(state)` or `jax.tree.map(lambda x: x[0], state)`."
        )
    fields = {"params": state.params, "opt_state": state.opt_state, **other_fields(state)}
    check_leaves(fields)
    shared, seen = [], dict[str, str]()
    for path, name, _ in _leaves(fields):
        if seen.setdefault(path, name) != name:
            shared.append(f"  {path}: `{seen[path]}` and `{name}`")
    if shared:
        raise ValueError(
            "Each leaf of a train state needs a path of its own, its keys joined by '/'; these share theirs:\n"
            + "\n".join(shared)
            + "\nRename one of each two."
        )


def check_leaves(fields: Mapping[str, PyTree]) -> None:
    """Raises a `TypeError` that lists the leaves of fields that are no numbers."""
    bad = [f"  {path}: {type(x).__name__} {x!r:.60}" for path, _, x in _leaves(fields) if not _holds_numbers(x)]
    if bad:
        raise TypeError(
            "Every leaf of a train state must be an array or a number; these are not:\n"
            + "\n".join(bad)
            + "\nMake arrays of them, make a field static (`flax.struct.field(pytree_node=False)`), or leave them out: "
            "of an Equinox model pass the arrays, `params, static = eqx.partition(model, eqx.is_array)`, and "
            "let the loss call `eqx.combine(params, static)`; `eqx.filter(model, eqx.is_array)` drops the rest."
        )


def _leaves(fields: Mapping[str, PyTree]) -> Iterator[tuple[str, str, Any]]:
    """Yields the leaves of fields: their paths, how Python gets at them, and the leaves."""
    for name, tree in fields.items():
        for keys, x in jax.tree_util.tree_leaves_with_path(tree):
            yield path_str((jax.tree_util.GetAttrKey(name), *keys)), f"{name}{jax.tree_util.keystr(keys)}", x


def _holds_numbers(x: object) -> bool:
    """Whether a leaf is a number, an array of numbers or of random keys, or the shape of one."""
    if isinstance(x, bool | int | float | complex):
        return True
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape") or isinstance(x, jax.Ref):
        return False
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.prng_key))
