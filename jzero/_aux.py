"""What a loss returns: weighted sums, and auxiliary values with the way they are reduced over devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero._collectives import Wire, max_over, mean, sum_over
from jzero._tree import path_str

__all__ = ["PerExample", "Summed", "Synced", "Weighted", "aux_specs", "check_aux", "reduce_aux"]

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

    Attributes:
      value: The local sum, any shape and numeric dtype.

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
      value: `[local batch, ...]`; the result is `[global batch, ...]` in the order of the batch.

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


def check_aux(aux: PyTree, num_rows: int | None) -> None:
    """Raises a `TypeError` that names each auxiliary leaf which cannot be reduced as it is.

    Args:
      aux: The auxiliary values as shapes.
      num_rows: Examples that one call of the loss sees; `None` if the batch has no rows.
    """
    bad = []
    for path, x in jax.tree_util.tree_leaves_with_path(aux, is_leaf=_is_marked):
        if not _is_marked(x) and not jnp.issubdtype(x.dtype, jnp.inexact):
            bad.append(f"  aux[{path_str(path)!r}]: {x.dtype}{list(x.shape)}")
        if isinstance(x, PerExample) and x.value.shape[:1] != (num_rows,):
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
    """Reduces auxiliary values over devices and (stacked on dimension 0, if several) micro-batches."""
    stacked = num_micro_batches > 1

    def reduce(x: Any) -> jax.Array:
        if isinstance(x, PerExample):
            return x.value.reshape(-1, *x.value.shape[2:]) if stacked else x.value
        if isinstance(x, Summed):
            value = x.value.astype(jnp.int32) if x.value.dtype == jnp.bool_ else x.value
            return sum_over(value.sum(0) if stacked else value, wire)
        if isinstance(x, Synced):
            value = x.value[-1] if stacked else x.value
            return mean(value, wire) if jnp.issubdtype(value.dtype, jnp.inexact) else max_over(value, wire)
        return mean(x.mean(0) if stacked else x, wire)

    return jax.tree.map(reduce, aux, is_leaf=_is_marked)
