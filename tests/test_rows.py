"""How values depend on the rows of a batch: which differ between devices, and which dimensions hold rows."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jzero.core.jaxpr.growth import growth
from jzero.core.jaxpr.rows import row_facts

ROWS, TIME, WIDTH = 6, 4, 5
AXES = {"data": 4, "replica": 2}
HEADS = {"w": jnp.ones((WIDTH, 3)), "queue": jnp.ones((20, WIDTH)), "at": jnp.zeros((), jnp.int32)}


def facts(fn, *, axes=("data",), rows=ROWS):
    """Returns the facts of the results of `fn(params, x, t, n, key)`: x [B, D], t [B, T, D]; n is a number."""

    def trace(rows):
        batch = (jnp.ones((rows, WIDTH)), jnp.ones((rows, TIME, WIDTH)), jnp.ones(()))
        return jax.make_jaxpr(fn, axis_env=list(AXES.items()))(HEADS, *batch, jax.random.key(0))

    jaxpr, sizes = trace(rows), (len(HEADS), 3, 1)
    flags = lambda which: [i == which for i, size in enumerate(sizes) for _ in range(size)]
    found = row_facts(jaxpr, batch=flags(1), keys=flags(2), axes=axes)
    return [x._replace(growth=power) for x, power in zip(found, growth(jaxpr, trace(2 * rows)), strict=True)]


DIFFERING = {
    "parameters": (lambda p, x, t, n, key: p["w"], False),
    "shapes": (lambda p, x, t, n, key: p["at"] + len(x), False),
    "a number of the batch": (lambda p, x, t, n, key: n, False),
    "rows": (lambda p, x, t, n, key: x, True),
    "a key": (lambda p, x, t, n, key: jax.random.normal(key, (3,)), True),
    "the device": (lambda p, x, t, n, key: lax.axis_index("data"), True),
    "a callback": (lambda p, x, t, n, key: jax.experimental.io_callback(lambda: 1.0, jnp.ones(())), True),
    "psum": (lambda p, x, t, n, key: lax.psum(x.sum(0), "data"), False),
    "pmean": (lambda p, x, t, n, key: lax.pmean(x.mean(0), "data"), False),
    "pmax": (lambda p, x, t, n, key: lax.pmax(x.max(), "data"), False),
    "all_gather": (lambda p, x, t, n, key: lax.all_gather(x, "data", tiled=True), False),
    "psum_scatter": (lambda p, x, t, n, key: lax.psum_scatter(jnp.ones(4), "data"), True),
    "ppermute": (lambda p, x, t, n, key: lax.ppermute(x, "data", [(0, 1), (1, 0)]), True),
    "groups": (lambda p, x, t, n, key: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]), True),
    "another axis": (lambda p, x, t, n, key: lax.pmean(x, "replica"), True),
    "later added": (lambda p, x, t, n, key: lax.pmean(x.sum(), "data") + x.sum(), True),
    "a loop's passes": (lambda p, x, t, n, key: lax.while_loop(lambda c: c < x.sum(), lambda c: c + 1, 0.0), True),
    "where to cut": (lambda p, x, t, n, key: lax.dynamic_slice(p["w"], (x[0, 0].astype(int), 0), (1, 3)), True),
    "what to pad with": (lambda p, x, t, n, key: lax.pad(p["w"], x[0, 0], [(0, 1, 0), (0, 0, 0)]), True),
    "a branch": (lambda p, x, t, n, key: lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0), True),
    "a carried value": (lambda p, x, t, n, key: lax.scan(lambda c, x: (c + x.sum(), None), 0.0, x)[0], True),
    "remat": (lambda p, x, t, n, key: jax.checkpoint(lambda x: lax.pmean(x.mean(), "data"))(x), False),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_values_differ_between_devices_unless_reduced_over_all_axes(name):
    fn, expected = DIFFERING[name]
    assert facts(fn)[0].differs == expected


def test_a_reduction_over_some_axes_of_the_batch_does_not_make_values_equal():
    both = lambda p, x, t, n, key: (lax.pmean(x, "data"), lax.pmean(x, ("replica", "data")))
    assert [x.differs for x in facts(both, axes=("replica", "data"))] == [True, False]


def test_what_a_loop_moves_on_by_one_place_in_each_pass_is_followed():
    def delayed(p, x, t, n, key):
        step = lambda c, _: ((x.sum(), *c[:-1]), c[-1])
        carry, last = lax.scan(step, (0.0,) * 20, length=30)
        return carry[-1], last, lax.fori_loop(0, 30, lambda i, c: step(c, i)[0], (0.0,) * 20)[-1]

    assert all(found.differs and found.is_sum for found in facts(delayed))


HOLDING = {
    "a layer": (lambda p, x, t, n, key: x @ p["w"], {0}),
    "transposed": (lambda p, x, t, n, key: jnp.moveaxis(t, 0, 1), {1}),
    "a mean over rows": (lambda p, x, t, n, key: x.mean(0), set()),
    "centered": (lambda p, x, t, n, key: x - x.mean(0, keepdims=True), {0}),
    "normalized": (lambda p, x, t, n, key: jax.nn.standardize(x, axis=0), {0}),
    "scores": (lambda p, x, t, n, key: x @ x.T, {0, 1}),
    "a queue": (lambda p, x, t, n, key: jnp.concatenate([x, p["queue"]])[:20], {0}),
    "a ring": (lambda p, x, t, n, key: lax.dynamic_update_slice(p["queue"], x, (p["at"], 0)), {0}),
    "slots": (lambda p, x, t, n, key: p["queue"].at[(p["at"] + jnp.arange(len(x))) % 20].set(x), {0}),
    "a memory bank": (lambda p, x, t, n, key: p["queue"].at[x[:, 0].astype(int)].set(x), {0}),
    "a histogram": (lambda p, x, t, n, key: jnp.bincount(x[:, 0].astype(int), length=3), set()),
    "flattened": (lambda p, x, t, n, key: t.reshape(-1, WIDTH) @ p["w"], {0}),
    "flattened and back": (lambda p, x, t, n, key: (t.reshape(-1, WIDTH) @ p["w"]).reshape(-1, TIME, 3), {0}),
    "chunks": (lambda p, x, t, n, key: x.reshape(2, -1, WIDTH), {0, 1}),
    "some rows": (lambda p, x, t, n, key: x[1:4], {0}),
    "one row": (lambda p, x, t, n, key: x[1], set()),
    "backwards": (lambda p, x, t, n, key: x[::-1], {0}),
    "padded": (lambda p, x, t, n, key: jnp.pad(x, ((0, 2), (1, 1))), {0}),
    "rolled": (lambda p, x, t, n, key: jnp.roll(x, 1, 0), {0}),
    "permuted": (lambda p, x, t, n, key: x[jax.random.permutation(key, len(x))], {0}),
    "embedded": (lambda p, x, t, n, key: p["queue"][t[..., 0].astype(int)], {0}),
    "chosen": (lambda p, x, t, n, key: jnp.take_along_axis(t, jnp.zeros((len(t), 1, 1), int), 1), {0}),
    "selected": (lambda p, x, t, n, key: jnp.where(p["at"] > 0, x, 0.0), {0}),
    "sorted within rows": (lambda p, x, t, n, key: jnp.sort(x, -1), {0}),
    "stacked": (lambda p, x, t, n, key: jnp.stack([x, x], 1), {0}),
    "a list of rows": (lambda p, x, t, n, key: jnp.stack(list(x)), set()),  # single rows are not told apart
    "rows of a vmapped axis": (
        lambda p, x, t, n, key: jax.vmap(lambda x: x - lax.pmean(x, "b"), axis_name="b")(x),
        {0},
    ),
    "repeated": (lambda p, x, t, n, key: jnp.repeat(x, 2, 0), {0}),
    "tiled": (lambda p, x, t, n, key: jnp.tile(x, (2, 1)), {0}),
    "mapped": (lambda p, x, t, n, key: lax.map(lambda row: row @ p["w"], x), {0}),
    "scanned over time": (lambda p, x, t, n, key: lax.scan(lambda c, x: (c + x, c), x, t.swapaxes(0, 1))[1], {1}),
    "carried": (lambda p, x, t, n, key: lax.fori_loop(0, 3, lambda i, x: x + 1, x), {0}),
    "images": (lambda p, x, t, n, key: lax.conv(t[..., None], jnp.ones((2, TIME, 2, 1)), (1, 1), "SAME"), {0}),
    "noise": (lambda p, x, t, n, key: jax.random.normal(key, (len(x),)), set()),
    "gathered": (lambda p, x, t, n, key: lax.all_gather(x, "data", tiled=True), set()),
}


@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("name", HOLDING)
def test_dimensions_that_hold_rows_are_followed(name, rows):
    fn, expected = HOLDING[name]
    if rows == 1 and name in ("some rows", "chunks", "one row", "a list of rows"):
        return
    assert facts(fn, rows=rows)[0].row_dims == expected
