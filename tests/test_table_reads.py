"""What a program reads of its tables, whatever calls the lookup: rows of it, how many, or more."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jzero.core.jaxpr.lookups import TableReads, table_reads

ROWS = jnp.arange(4)
look_up = lambda table: table[ROWS].sum()
twice = lambda fn: lambda table: lax.scan(lambda x, _: (x + fn(table), None), 0.0, None, length=2)[0]


def carried(table):
    """Looks up in what a loop hands on."""
    return look_up(lax.scan(lambda x, _: (x / 2, None), table, None, length=2)[0])


READS = {
    "nothing": (lambda table: jnp.ones(()), (0, 0, False)),
    "rows": (look_up, (4, 2, False)),
    "rows of a cast": (lambda table: look_up(table.astype(jnp.bfloat16)), (4, 2, False)),
    "in a call": (jax.jit(jax.jit(look_up)), (4, 2, False)),
    "in a checkpoint": (jax.checkpoint(look_up), (4, 2, False)),
    "in a loop": (twice(look_up), (8, 2, False)),
    "in calls of loops": (jax.jit(twice(jax.jit(twice(look_up)))), (16, 2, False)),
    "in two places": (lambda table: look_up(table) + twice(look_up)(table), (12, 2, False)),
    "all of it": (lambda table: table.sum(), (0, 0, True)),
    "rows and all of it": (lambda table: look_up(table) + table.mean(), (4, 2, True)),
    "all of it in a loop": (twice(jnp.sum), (0, 0, True)),
    "what a loop carries": (carried, (0, 0, True)),
    "what a loop scans": (lambda table: lax.scan(lambda x, row: (x + row.sum(), None), 0.0, table)[0], (0, 0, True)),
    "as places": (lambda table: jnp.ones((7, 3))[table[:, 0].astype(jnp.int32)].sum(), (0, 0, True)),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_of_a_table(name):
    fn, (num_rows, ndim, otherwise) = READS[name]
    program = jax.make_jaxpr(fn)(jnp.ones((6, 5)))
    assert table_reads(program, 1) == [TableReads(num_rows, ndim, otherwise)]
