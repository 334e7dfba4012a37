"""What a loss returns: weighted sums, and auxiliary values with the way they are reduced over devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jzero._collectives import Wire, max_over, mean, sum_over
from jzero._precision import wide_dtype, widen
from jzero._tree import path_str

__all__ = [
    "PerExample",
    "Summed",
    "Synced",
    "Weighted",
    "aux_specs",
    "check_aux",
    "holds",
    "marked_leaves",
    "reduce_aux",
]

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A loss as a weighted sum: the global loss is the sum of all `sum`s over the sum of all `weight`s.

    Gives the exact token-weighted mean over devices and micro-batches where a mean of local means
    would weight devices with few tokens too much. A total weight of zero skips the step.

    Attributes:
      sum: Scalar, the sum of the local losses; this is what is differentiated.
      weight: Scalar, the sum of the local weights, e.g. the number of tokens that count.

    Example:
      >>> def loss_fn(params, batch):
      ...     losses = jnp.square(batch["x"] @ params["w"] - batch["y"])
      ...     return jzero.Weighted((losses * batch["mask"]).sum(), batch["mask"].sum())
    """

    sum: jax.Array
    weight: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summed:
    """An auxiliary array that is summed over devices and micro-batches, such as a count of correct answers.

    Narrow dtypes come back wider, so that the sum fits: booleans and integers in 32 bits (signed or not, as they
    were), floating-point values in fp32 or wider.

    Attributes:
      value: The local sum, any shape and numeric dtype; or a tree of such, each of which is summed.

    Example:
      >>> int(jzero.Summed(jnp.array(3)).value)
      3
    """

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerExample:
    """An auxiliary array with one row per example, which comes back for the whole batch.

    Attributes:
      value: `[local batch, ...]`; the result is `[global batch, ...]` in the order of the batch. Or a tree of such.

    Example:
      >>> jzero.PerExample(jnp.zeros((4, 2))).value.shape
      (4, 2)
    """

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Synced:
    """State that the loss carries on (batch statistics, counters): averaged if floating, else equal on all devices.

    Attributes:
      value: The local value. With several micro-batches the last one counts.
    """

    value: jax.Array


def _is_marked(x: Any) -> bool:
    return isinstance(x, Summed | PerExample | Synced)


def marked_leaves(aux: PyTree) -> PyTree:
    """Returns `aux` with each mark around a tree around each of its leaves instead."""

    def spread(x: Any) -> Any:
        return jax.tree.map(type(x), x.value, is_leaf=_is_marked) if _is_marked(x) else x

    return jax.tree.map(spread, aux, is_leaf=_is_marked)


def holds(dtype: Any, value_dtype: Any) -> bool:
    """Whether state of a dtype can take a value of another one without loss of range or kind."""
    if dtype == value_dtype:
        return True
    try:
        return bool(jnp.promote_types(dtype, value_dtype) == dtype)
    except (TypeError, ValueError):  # random keys, 8-bit floats
        return False


def check_aux(aux: PyTree, num_rows: int | None) -> None:
    """Raises a `TypeError` that names each auxiliary leaf which cannot be reduced as it is.

    Args:
      aux: The auxiliary values as shapes.
      num_rows: Examples that one call of the loss sees; `None` if the batch has no rows.
    """
    bad = []
    for path, x in jax.tree_util.tree_leaves_with_path(aux, is_leaf=_is_marked):
        if not _is_marked(x):
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                bad.append(f"  aux[{path_str(path)!r}]: {x.dtype}{list(x.shape)}")
        elif _is_marked(x.value):
            bad.append(f"  aux[{path_str(path)!r}]: {type(x.value).__name__} inside of {type(x).__name__}")
        elif isinstance(x, Summed) and not jnp.issubdtype(x.value.dtype, jnp.number) and x.value.dtype != jnp.bool_:
            bad.append(f"  aux[{path_str(path)!r}]: Summed of {x.value.dtype}, which has no sum")
        elif isinstance(x, PerExample) and x.value.shape[:1] != (num_rows,):
            rows = f"{list(x.value.shape)}, but the local batch has {num_rows} rows"
            bad.append(f"  aux[{path_str(path)!r}]: PerExample of shape {rows}")
    if bad:
        raise TypeError(
            "Floating-point leaves of `aux` are averaged over devices; for others jzero cannot know what is meant:\n"
            + "\n".join(bad)
            + "\nWrap each in `jzero.Summed(x)` (sum over devices) or `jzero.PerExample(x)` (one row per example)."
        )


def aux_specs(aux: PyTree, batch_spec: PartitionSpec) -> PyTree:
    """Returns the spec of each reduced auxiliary leaf, in the structure of `reduce_aux`'s result."""
    return jax.tree.map(lambda x: batch_spec if isinstance(x, PerExample) else PartitionSpec(), aux, is_leaf=_is_marked)


def reduce_aux(aux: PyTree, wire: Wire, num_micro_batches: int) -> PyTree:
    """Reduces auxiliary values over devices and (stacked on dimension 0, if several) micro-batches.

    Sums are reckoned in fp32 or wider, and in 32-bit integers or wider; averages come back in the dtype that they had.
    """
    stacked = num_micro_batches > 1

    def reduce(x: Any) -> jax.Array:
        if isinstance(x, PerExample):
            return x.value.reshape(-1, *x.value.shape[2:]) if stacked else x.value
        if isinstance(x, Summed):
            value = x.value.astype(_sum_dtype(x.value.dtype))
            return sum_over(value.sum(0) if stacked else value, wire)
        if isinstance(x, Synced):
            value = x.value[-1] if stacked else x.value
            return average(value) if jnp.issubdtype(value.dtype, jnp.inexact) else max_over(value, wire)
        return average(x, stacked=stacked)

    def average(x: jax.Array, *, stacked: bool = False) -> jax.Array:
        wide = widen(x)
        if wide.dtype == x.dtype:
            return mean(x.mean(0) if stacked else x, wire)
        # Divided first, since bf16 holds numbers whose sum fp32 does not.
        wide = wide / (math.prod(map(lax.axis_size, wire.batch_axes)) * num_micro_batches**stacked)
        return sum_over(wide.sum(0) if stacked else wide, wire).astype(x.dtype)

    return jax.tree.map(reduce, aux, is_leaf=_is_marked)


def _sum_dtype(dtype: Any) -> Any:
    """Returns the dtype that values are summed in over devices, which holds more than theirs."""
    if dtype == jnp.bool_:
        return jnp.int32
    if not jnp.issubdtype(dtype, jnp.integer):
        return wide_dtype(dtype)
    least = jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32
    return least if jnp.iinfo(dtype).bits < 32 else dtype
