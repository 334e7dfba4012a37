"""Lookups in shards of tables: rows travel, not tables.

    look_up(shard, ids, lookup, cut, dtype, route) -> jax.Array
    add_rows(rows, ids, lookup, cut, dtype, route, sums) -> jax.Array

The first returns [B, D], from [V, D/N] or [V/N, D] and indices [B, 1]. The second is its transpose, summed over all
devices. All devices learn the indices of all, [N, B]. If the table is cut along its features, each device looks up its
own columns of all rows, and an all-to-all brings them together: it sends (N-1)/N B D elements. If it is cut along its
rows, each device looks up those that it has, and a reduce-scatter adds zeros to them: (N-1) B D elements. Gradients go
the other way, by an all-to-all or an all-gather, and are added to the shard. No device has the table, or its gradient,
whole.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jzero.core.base.types import DType
from jzero.core.config.precision import cast_dtype
from jzero.core.jaxpr.lookups import Lookup
from jzero.core.jaxpr.sizes import itemsize
from jzero.core.layout.casts import round_without_derivative
from jzero.core.layout.cut import Cut
from jzero.core.layout.route import Collective, Hop, Route, Sums


def hop_of_rows(cut: Cut, route: Route, *, reduces: bool) -> Hop | None:
    """Returns the one hop of a table's rows; `None` if they do not travel."""
    hops = [hop for hop in route.hops if (hop.size if reduces else hop.num_parts) > 1]
    if cut.flat or cut.blocks is not None or cut.other_axes or cut.parts > 1 or len(hops) != 1:
        return None
    return hops[0] if hops[0].sum in ("scatter", "slice") and hops[0].size == cut.num_shards else None


def row_collectives(cut: Cut, route: Route, num_rows: int, dtype: DType, *, reduces: bool) -> tuple[Collective, ...]:
    """Returns the collectives of rows that are looked up, or added."""
    hop = hop_of_rows(cut, route, reduces=reduces)
    assert hop is not None
    num, size = hop.size, num_rows * math.prod(cut.stored_shape[1:])  # [B, D]
    ids = Collective("all-gather", hop.axes, num, num * num_rows, jnp.dtype(jnp.int32))
    if cut.dim > 0:
        return ids, Collective("all-to-all", hop.axes, num, size, dtype)
    return ids, Collective("all-gather" if reduces else "reduce-scatter", hop.axes, num, num * size, dtype)


def look_up(shard: jax.Array, ids: jax.Array, lookup: Lookup, cut: Cut, dtype: DType, route: Route) -> jax.Array:
    """[V/N, D] or [V, D/N], and indices, [..., 1] -> [..., D]."""
    hop = hop_of_rows(cut, route, reduces=False)
    assert hop is not None
    own = lookup.indices(ids, cut.shape[0], clips=lookup.fill is None)  # [B]
    ids = lax.all_gather(own, hop.axis)  # [N, B]
    at = ids if cut.dim else ids - lax.axis_index(hop.axis) * len(shard)
    # Rows are rounded, not the shard, which may have many more.
    rows = round_without_derivative(shard[jnp.clip(at, 0, len(shard) - 1)], dtype)  # [N, B, ...]
    if cut.dim:
        rows = lax.all_to_all(rows, hop.axis, 0, cut.dim + 1, tiled=True)[0]  # [N, B, D/N] -> [B, D]
        rows = lax.slice_in_dim(rows, 0, cut.shape[cut.dim], axis=cut.dim)
    else:
        rows = _where((at >= 0) & (at < len(shard)) & (ids >= 0), rows, 0)  # zeros for the rows of others
        rows = lax.psum_scatter(rows, hop.axis, scatter_dimension=0, tiled=True)[0]  # [N, B, D] -> [B, D]
    if lookup.fill is not None:
        rows = _where(own >= 0, rows, lookup.fill)
    return _row_major(rows.reshape(*lookup.shape, *cut.shape[1:]))


def add_rows(  # noqa: PLR0913  # those of a reduction, and the indices
    rows: jax.Array, ids: jax.Array, lookup: Lookup, cut: Cut, dtype: DType, route: Route, sums: Sums
) -> jax.Array:
    """Gradients of rows, [..., D], and indices, [..., 1] -> the shard of the table's, [V/N, D] or [V, D/N]."""
    hop = hop_of_rows(cut, route, reduces=True)
    assert hop is not None
    clips = lookup.mode == jax.lax.GatherScatterMode.CLIP
    ids = lax.all_gather(lookup.indices(ids, cut.shape[0], clips=clips), hop.axis, tiled=True)  # [N B]
    rows, size = _row_major(rows).reshape(-1, *cut.shape[1:]), cut.shard_shape[0]
    rows = rows.astype(dtype_sent(rows.dtype, sums))
    at = ids if cut.dim else ids - lax.axis_index(hop.axis) * size
    if cut.dim:
        widths = [(0, n - m, 0) for n, m in zip((len(rows), *cut.stored_shape[1:]), rows.shape, strict=True)]
        rows = lax.pad(rows, jnp.zeros((), rows.dtype), widths)
        rows = lax.all_to_all(rows, hop.axis, cut.dim, 0, tiled=True)  # [B, D] -> [N B, D/N]
    else:
        rows = lax.all_gather(rows, hop.axis, tiled=True)  # [N B, D]
    rows = rows.astype(jnp.promote_types(dtype, rows.dtype))
    rows = rows if sums.predivide == 1 else rows / sums.predivide
    at = jnp.where((at >= 0) & (at < size) & (ids >= 0), at, size)  # beyond the shard, where nothing is added
    zeros = _row_major(jnp.zeros(cut.shard_shape, rows.dtype))
    return _row_major(zeros.at[at].add(_row_major(rows), mode="drop")).astype(dtype)


def dtype_sent(dtype: DType, sums: Sums) -> DType:
    """Returns the dtype in which gradients of rows travel: they are summed after it, so that it need not be wide."""
    asked = jnp.dtype(cast_dtype(dtype, sums.dtype))
    return asked if itemsize(asked) < itemsize(dtype) else jnp.dtype(dtype)


def _where(condition: jax.Array, rows: jax.Array, value: float) -> jax.Array:
    condition = condition.reshape(*condition.shape, *[1] * (rows.ndim - condition.ndim))
    return jnp.where(condition, rows, jnp.asarray(value, rows.dtype))


def _row_major(x: jax.Array) -> jax.Array:
    """Returns an array with one row behind the other: else layouts that collectives like reach loops and updates."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
