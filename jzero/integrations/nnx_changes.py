"""Finds the changes of a loss to an NNX model, and rejects those that a compiled step cannot keep.

A step runs the Python code of a loss once, when it is traced, and keeps the variables that the model was sharded with.
So it keeps the values of these variables, but not new variables, new shapes or Python attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.tree_util import SequenceKey

from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree
from jzero.core.engine.written_variables import WrittenShape, WrittenVariable, by_path, pair_written


def python_attributes(model: nnx.Module) -> dict[str, Any]:
    """Returns the Python attributes of a model, by path: those that neither are nor contain variables or arrays."""
    in_state = {path for path, _ in nnx.to_flat_state(nnx.state(model))}
    return {
        "/".join(map(str, path)): x
        for path, x in nnx.iter_graph(model)
        if path and path not in in_state and not str(path[-1]).startswith(("_pytree__", "__"))  # which are Flax's own
        if not isinstance(x, nnx.Variable) and not nnx.graph.is_node(x)
    }


def check_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names each Python attribute that the loss changed."""
    names = sorted({*before, *after})
    changed = [name for name in names if not _same(before.get(name), after.get(name))]
    if changed:
        listed = "\n".join(f"  {name}: {before.get(name)!r:.60}, then {after.get(name)!r:.60}" for name in changed[:10])
        raise ValueError(
            "The loss changes Python attributes of the model. A compiled step runs Python once, when it is traced, so "
            f"it would not keep them:\n{listed}\nHold what changes in an `nnx.Variable` (a counter: "
            "`nnx.Variable(jnp.zeros((), jnp.int32))`), or set attributes outside of the loss, as `model.train()` does."
        )


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    try:
        return type(x) is type(y) and bool(x == y)
    except (TypeError, ValueError):  # not comparable, or compared by elements
        return False


def find_written(
    before: Mapping[str, Mapping[str, jax.Array]],
    after: Mapping[str, PyTree],
    dtypes: Mapping[str, Mapping[str, Any]],
    written_shape: WrittenShape,
) -> dict[str, dict[str, WrittenVariable]]:
    """Returns the variables that the loss may have written, by field and path.

    The loss can read what it appends to a tuple, as `sow` does, but the state does not keep it.

    Args:
      before: The variables of each field, as arrays by path, before the loss.
      after: The trees of the same after the loss.
      dtypes: The dtype in which the state keeps each variable, by field and path.
      written_shape: The shape that one device writes to a variable.

    Raises:
      ValueError: Variables were added or deleted, or changed shape or dtype; the message names them.
    """
    bad: list[str] = []
    written: dict[str, dict[str, WrittenVariable]] = {}
    for field, old in before.items():
        appended = {path_str(p) for p, _ in jax.tree_util.tree_leaves_with_path(after[field]) if _in_tuple(p)}
        new = {path: x for path, x in by_path(after[field]).items() if path in old or path not in appended}
        written[field], wrong = pair_written(old, new, dtypes[field], written_shape)
        bad += wrong
    if bad:
        raise ValueError(
            "The loss changes which variables the model has, or their shape or dtype. A step keeps the values of the "
            "variables that the model was sharded with, and no others:\n"
            + "\n".join(sorted(bad)[:10])
            + "\nAdd and delete variables before `shard_train_state`, and write values of the same shape and dtype. "
            "What the loss adds for its own use it can take out again: `nnx.pop(model, nnx.Intermediate)`."
        )
    return written


def _in_tuple(path: tuple[Any, ...]) -> bool:
    return any(isinstance(key, SequenceKey) for key in path)
