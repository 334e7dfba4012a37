"""What goes into a jitted step: checked, on the mesh, or as shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero._placement import place_array
from jzero._plan import StateLeaf, ZeroPlan
from jzero._state import map_state
from jzero.engine.trace import check_batch

__all__ = [
    "InputKind",
    "abstract_inputs",
    "are_like",
    "check_stored",
    "in_trace",
    "kinds_of",
    "optional_rng",
    "place_inputs",
]

PyTree = Any

InputKind: TypeAlias = tuple[Any, Any]
"""Type and sharding of an array. Of another shape `jax.jit` traces again, and the trace looks at it."""


def optional_rng(rng: Any) -> dict[str, Any]:
    """Leaves `rng` out where there is none, so that a compiled step is called as it was lowered."""
    return {} if rng is None else {"rng": rng}


def in_trace(leaves: Sequence[Any]) -> bool:
    """Whether any of these is traced."""
    return any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves)))


def check_stored(state: Any, plan: ZeroPlan) -> None:
    """Raises if the state's arrays do not have the shapes that the plan stores."""
    bad: list[str] = []

    def check(x: Any, leaf: StateLeaf) -> Any:
        if tuple(x.shape) != leaf.stored_shape:
            bad.append(f"  {leaf.path}: shape {tuple(x.shape)}, but the plan stores {leaf.stored_shape}")
        elif leaf in params and x.dtype != leaf.dtype:
            bad.append(f"  {leaf.path}: {x.dtype}, but the plan stores {leaf.dtype}")
        return x

    params = {leaf.param for leaf in plan.leaves}
    map_state(check, plan, state)
    if bad:
        raise ValueError(
            "These leaves are not as the plan stores them:\n"
            + "\n".join(bad)
            + "\nEdit parameters with `jzero.update_params`, or shard the new state: `jzero.shard_train_state`."
        )


def kinds_of(inputs: Sequence[jax.Array]) -> list[InputKind]:
    """Returns what arrays are like."""
    return [(type(x), x.sharding) for x in inputs]


def are_like(inputs: Sequence[Any], kinds: Sequence[InputKind]) -> bool:
    """Whether there are as many inputs as kinds, each of its kind."""
    if len(inputs) != len(kinds):
        return False
    for x, (kind, sharding) in zip(inputs, kinds, strict=True):
        if type(x) is not kind or (x.sharding is not sharding and x.sharding != sharding):
            return False
    return True


def place_inputs(plan: ZeroPlan, batch: PyTree, rng: Any, accumulate_steps: int) -> tuple[PyTree, Any, bool]:
    """Puts batch and rng on the mesh; arrays that are there already stay. Returns them, and whether all did."""
    leaves = check_batch(batch, plan, accumulate_steps)
    split, whole = plan.batch_sharding, plan.whole_sharding
    placed = [_placed(x, split if x.ndim else whole) for x in leaves]
    in_place = all(map(operator.is_, placed, leaves))
    if not in_place:
        batch = jax.tree.unflatten(jax.tree.structure(batch), placed)
    key = None if rng is None else _placed(rng, whole)
    return batch, key, in_place and key is rng


def _placed(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and (not x.is_fully_addressable or sharding.is_fully_addressable):
        return x if x.sharding == sharding else jax.device_put(x, sharding)
    return place_array(x, jax.dtypes.canonicalize_dtype(x.dtype) if isinstance(x, np.ndarray) else x.dtype, sharding)


def abstract_inputs(plan: ZeroPlan, state: Any, batch: PyTree, rng: Any) -> tuple[Any, PyTree, Any]:
    """The arguments as shapes with the shardings that a call would give them."""

    def shape(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        dtype = (
            x.dtype if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(x.dtype)
        )
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

    split, whole = plan.batch_sharding, plan.whole_sharding
    check_batch(batch, plan)
    state = map_state(lambda x, leaf: shape(x, plan.sharding(leaf)), plan, state)
    batch = jax.tree.map(lambda x: shape(x, split if x.ndim else whole), batch)
    return state, batch, None if rng is None else shape(rng, whole)
