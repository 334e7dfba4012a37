"""The values that a loss returns: weighted sums, and auxiliary values marked with their reduction over devices.

    reduce_aux(aux, sums, num_micro_batches) -> PyTree

It makes `aux` of the whole batch from those of each device's rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jzero.core.arrays.collectives import extreme, mean, sum_over
from jzero.core.base.text import path_str
from jzero.core.base.types import DType, PyTree
from jzero.core.config.precision import wide_dtype, widen
from jzero.core.layout.route import Sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A loss as a weighted sum: the global loss is the sum of all `sum`s over the sum of all `weight`s.

    This is the exact token-weighted mean over devices and micro-batches. A mean of local means would give devices with
    few tokens too much weight. A total weight of zero skips the step.

    Attributes:
      sum: Scalar, the sum of the local losses; jzero differentiates this.
      weight: Scalar, the sum of the local weights, e.g. the number of tokens that count.

    Example:
      >>> def loss_fn(params, batch):
      ...     losses = jnp.square(batch["x"] @ params["w"] - batch["y"])
      ...     return jzero.Weighted((losses * batch["mask"]).sum(), batch["mask"].sum())
    """

    sum: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class Marked:
    """An auxiliary array that is not averaged, or a tree of them: its class says how they are reduced.

    Attributes:
      value: The array or the tree.
    """

    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summed(Marked):
    """An auxiliary array that is summed over devices and micro-batches, such as a count of correct answers.

    Narrow dtypes come back wider, so that the sum fits: booleans and integers in 32 bits (signed or not, as they
    were), floating-point values in fp32 or wider.

    Attributes:
      value: The local sum, of any shape and numeric dtype; or a tree of such arrays, each of which is summed.

    Example:
      >>> int(jzero.Summed(jnp.array(3)).value)
      3
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max(Marked):
    """An auxiliary array of which the step returns the largest value over devices and micro-batches, as `jnp.max` does.

    Each element is compared by itself, and comes back in its own dtype. If any is not a number, the largest is not.

    Attributes:
      value: The local maximum, of any shape and real dtype (of booleans: whether any is true), or a tree of such
        arrays.

    Example:
      >>> eval_step = jzero.make_eval_step(lambda params, batch: {"largest": jzero.Max(batch.max())})
      >>> float(eval_step(state, jnp.arange(8.0 * 512).reshape(8, 512))["largest"])
      4095.0
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Min(Marked):
    """An auxiliary array of which the step returns the smallest value over devices and micro-batches, see `Max`.

    Attributes:
      value: The local minimum, of any shape and real dtype (of booleans: whether all are true), or a tree of such
        arrays.

    Example:
      >>> int(jzero.Min(jnp.array([3, 1]).min()).value)
      1
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerExample(Marked):
    """An auxiliary array with one row per example; the step returns the rows of the whole batch.

    Attributes:
      value: `[local batch, ...]`, or a tree of such arrays; the result is `[global batch, ...]` in batch order.

    Example:
      >>> jzero.PerExample(jnp.zeros((4, 2))).value.shape
      (4, 2)
    """


REAL = (jnp.integer, jnp.floating)
TAKES: Mapping[type[Marked], tuple[DTypeLike, ...]] = {
    Summed: (jnp.number, jnp.bool_),
    Max: (*REAL, jnp.bool_),
    Min: (*REAL, jnp.bool_),
    PerExample: (np.generic,),
}
"""The kinds of dtypes that each mark can reduce."""


def _is_marked(x: object) -> TypeGuard[Marked]:
    return isinstance(x, Marked)


def spread_marks(aux: PyTree) -> PyTree:
    """Returns `aux` with each mark around a tree moved to the leaves of the tree."""

    def spread(x: PyTree) -> PyTree:
        # Summed({a, b}) -> {Summed(a), Summed(b)}
        return jax.tree.map(type(x), x.value, is_leaf=_is_marked) if _is_marked(x) else x

    return jax.tree.map(spread, aux, is_leaf=_is_marked)


def check_aux(aux: PyTree, num_rows: int | None, constants: Collection[str] = ()) -> None:
    """Raises a `TypeError` that names each auxiliary leaf that cannot be reduced.

    Args:
      aux: The auxiliary values as shapes.
      num_rows: Examples in one call of the loss; `None` if the batch has no rows.
      constants: The leaves that are the same for all rows, as `aux['layers']`.
    """
    bad = []
    for path, x in jax.tree_util.tree_leaves_with_path(aux, is_leaf=_is_marked):
        name, kind = f"aux[{path_str(path)!r}]", type(x).__name__
        if not _is_marked(x):
            if not jnp.issubdtype(x.dtype, jnp.inexact) and name not in constants:
                bad.append(f"  {name}: {x.dtype}{list(x.shape)}")
        elif _is_marked(x.value):
            bad.append(f"  {name}: {type(x.value).__name__} inside of {kind}")
        elif not any(jnp.issubdtype(x.value.dtype, dtype) for dtype in TAKES[type(x)]):
            bad.append(f"  {name}: {kind} of {x.value.dtype}, which has no {'sum' if kind == 'Summed' else 'order'}")
        elif isinstance(x, PerExample) and x.value.shape[:1] != (num_rows,):  # not [B, ...]
            bad.append(f"  {name}: {kind} of shape {list(x.value.shape)}, but the local batch has {num_rows} rows")
    if bad:
        raise TypeError(
            "Floating-point leaves of `aux` are averaged over devices; for others jzero cannot know what is meant, "
            "unless they are constants, for any number of rows:\n"
            + "\n".join(bad)
            + "\nWrap each in `jzero.Summed(x)` (sum over devices), `jzero.Max(x)`, `jzero.Min(x)` (extremes over "
            "devices) or `jzero.PerExample(x)` (one row per example)."
        )


def aux_specs(aux: PyTree, batch_spec: PartitionSpec) -> PyTree:
    """Returns the spec of each reduced auxiliary leaf, in the structure of `reduce_aux`'s result."""
    return jax.tree.map(lambda x: batch_spec if isinstance(x, PerExample) else PartitionSpec(), aux, is_leaf=_is_marked)


def reduce_aux(aux: PyTree, sums: Sums, num_micro_batches: int) -> PyTree:
    """Reduces auxiliary values over devices and micro-batches; several micro-batches are stacked on dimension 0.

    Sums are computed in fp32 or wider, and in 32-bit integers or wider; averages keep their dtype. Integers without a
    mark are the same for all rows.
    """
    stacked = num_micro_batches > 1

    def reduce(x: jax.Array | Marked) -> jax.Array:
        if not isinstance(x, Marked):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                return average(x, sums, num_micro_batches)
            return x[-1] if stacked else x
        value = x.value
        if isinstance(x, PerExample):
            return value.reshape(-1, *value.shape[2:]) if stacked else value  # [steps * B, ...]
        if isinstance(x, Summed):
            value = value.astype(sum_dtype(value.dtype))  # first: a sum of booleans is a count
            return sum_over(value.sum(0) if stacked else value, sums)
        along, over_devices = (jnp.max, lax.pmax) if isinstance(x, Max) else (jnp.min, lax.pmin)
        return extreme(along(widen(value), 0).astype(value.dtype) if stacked else value, sums, over_devices)

    return jax.tree.map(reduce, aux, is_leaf=_is_marked)


def average(x: jax.Array, sums: Sums, num_micro_batches: int = 1) -> jax.Array:
    """Averages a value over devices, and over micro-batches if it has several: computed in fp32 or wider."""
    stacked = num_micro_batches > 1  # on dimension 0
    wide = widen(x)
    if wide.dtype == x.dtype:
        return mean(x.mean(0) if stacked else x, sums)
    # Divide first: the sum of large bf16 numbers can overflow fp32.
    wide = wide / (math.prod(map(lax.axis_size, sums.axes)) * num_micro_batches)
    return sum_over(wide.sum(0) if stacked else wide, sums).astype(x.dtype)


def sum_dtype(dtype: DType) -> DType:
    """Returns the dtype in which to sum values of `dtype` over devices: one with room for the sum."""
    if dtype == jnp.bool_:
        return jnp.int32
    if not jnp.issubdtype(dtype, jnp.integer):
        return wide_dtype(dtype)
    least = jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32
    return least if jnp.iinfo(dtype).bits < 32 else dtype
