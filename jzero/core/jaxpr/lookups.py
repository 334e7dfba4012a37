"""Lookups of rows in programs: which equations look up rows of a table, and what else reads it.

    b:f32[8,64] = gather[slice_sizes=(1, 64) ...] table i            # 8 rows of table:f32[V,64]
    g:f32[V,64] = scatter-add[...] zeros i c                         # its transpose

    table_reads(jaxpr, number) -> list[TableReads]

says of the first inputs of a program how many of their rows it looks up, in calls and loops, too, and whether it reads
them otherwise. Casts and slices of a table are that table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import CALLS, REMAT, called_jaxpr
from jzero.core.jaxpr.sizes import itemsize

KEEPS_ROWS = frozenset(
    "convert_element_type copy dynamic_slice reshard sharding_constraint slice squeeze stop_gradient".split()
)
"""Equations whose result has whole rows of their first operand."""


MODES = (GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS)
"""What may become of indices out of range."""


class Lookup(NamedTuple):
    """The rows that an equation looks up, or adds to.

    Attributes:
      shape: The shape of the indices, without the last dimension, of one.
      mode: What becomes of indices out of range.
      fill: The value of rows out of range; `None` if they are clipped.
    """

    shape: tuple[int, ...]
    mode: GatherScatterMode
    fill: float | None = None

    def __str__(self) -> str:
        return f"{self.num_rows}"

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return math.prod(self.shape)

    def indices(self, ids: jax.Array, size: int, *, clips: bool) -> jax.Array:
        """Returns indices as int32, [B], -1 if they are out of range."""
        ids = ids.reshape(-1)
        ids = ids.astype(jnp.int32) if jnp.iinfo(ids.dtype).bits < 32 else ids
        ids = jnp.clip(ids, 0, size - 1) if clips else ids
        return jnp.where((ids >= 0) & (ids < size), ids, -1).astype(jnp.int32)


def lookup_of(eqn: JaxprEqn) -> Lookup | None:
    """Returns what a `gather` of rows looks up, or a `scatter-add` to rows adds to; `None` for any other equation."""
    params, adds = eqn.params, eqn.primitive.name == "scatter-add"
    if eqn.primitive.name not in ("gather", "scatter-add"):
        return None
    table, ids, rows = map(compat.type_of, (*eqn.invars[:2], eqn.invars[2] if adds else eqn.outvars[0]))
    numbers, window = params["dimension_numbers"], tuple(range(ids.ndim - 1, ids.ndim + table.ndim - 2))
    if adds:
        dims = numbers.update_window_dims, numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    else:
        dims = numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map
    are_rows = tuple(map(tuple, dims)) == (window, (0,), (0,)) and not numbers.operand_batching_dims
    are_whole = rows.shape == (*ids.shape[:-1], *table.shape[1:]) and ids.shape[-1] == 1
    is_number = jnp.issubdtype(table.dtype, jnp.floating) and itemsize(table.dtype) > 1
    mode = GatherScatterMode.from_any(params["mode"])
    if not (table.ndim > 1 and ids.size and are_rows and are_whole and is_number and mode in MODES):
        return None
    fill = params.get("fill_value")
    value = (math.nan if fill is None else float(fill)) if mode == GatherScatterMode.FILL_OR_DROP else None
    return Lookup(tuple(ids.shape[:-1]), mode, value)


@dataclasses.dataclass
class TableReads:
    """What a program reads of an input.

    Attributes:
      num_rows: How many rows it looks up, in all.
      ndim: The dimensions of the table that it looks them up in: fewer than those of a stack of tables.
      otherwise: Whether it reads it otherwise, too.
    """

    num_rows: int = 0
    ndim: int = 0
    otherwise: bool = False

    def add(self, num_rows: int, ndim: int) -> None:
        """Counts a lookup."""
        self.otherwise |= self.ndim not in (0, ndim)
        self.num_rows, self.ndim = self.num_rows + num_rows, ndim


Tables = Sequence[TableReads | None]


def table_reads(jaxpr: AnyJaxpr, number: int) -> list[TableReads]:
    """Returns what a program reads of its first `number` inputs.

    Example:
      >>> from jzero.core.jaxpr.lookups import table_reads
      >>> program = jax.make_jaxpr(lambda t, w, i: t.astype(jnp.bfloat16)[i] @ w)
      >>> table_reads(program(jnp.ones((64, 8)), jnp.ones((8, 8), jnp.bfloat16), jnp.arange(4)), 2)
      [TableReads(num_rows=4, ndim=2, otherwise=False), TableReads(num_rows=0, ndim=0, otherwise=True)]
    """

    def visit(jaxpr: AnyJaxpr, inputs: Tables, times: int) -> list[TableReads | None]:
        def apply(eqn: JaxprEqn, tables: list[TableReads | None]) -> Tables:
            name, results, others = eqn.primitive.name, [None] * len(eqn.outvars), tables
            if not any(tables):
                return results
            if name in CALLS | REMAT:
                return visit(called_jaxpr(eqn), tables, times)
            if name in KEEPS_ROWS:
                return [tables[0], *results[1:]]
            if name == "scan":
                first, carried = compat.scan_groups(eqn)
                others = tables[first : first + carried]
                inside = [*tables[:first], *[None] * carried, *tables[first + carried :]]
                others += visit(called_jaxpr(eqn), inside, times * int(eqn.params["length"]))
            elif tables[0] and name == "gather" and (lookup := lookup_of(eqn)):
                tables[0].add(times * lookup.num_rows, compat.type_of(eqn.invars[0]).ndim)
                others = tables[1:]
            for x in filter(None, others):
                x.otherwise = True
            return results

        program, _ = compat.open_jaxpr(jaxpr)
        constants = [None] * len(program.constvars)
        return propagate(program, [*constants, *inputs], apply, lambda literal: None)

    found = [TableReads() for _ in range(number)]
    rest = len(compat.open_jaxpr(jaxpr)[0].invars) - number
    for x in filter(None, visit(jaxpr, [*found, *[None] * rest], 1)):
        x.otherwise = True
    return found
