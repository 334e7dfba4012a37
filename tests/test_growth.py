"""How results grow with the number of rows that a program is traced over: what tells a sum from a mean."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jzero.core.jaxpr.growth import growth

UNKNOWN, ZERO = math.nan, -math.inf


def each(w, x):
    return jnp.square(jnp.tanh(x @ w)).mean(-1)


def chunked(w, x):
    """The sum of all rows, by a loop over parts of them that always have two."""
    return lax.scan(lambda total, x: (total + each(w, x).sum(), None), 0.0, x.reshape(-1, 2, 3))[0]


GROWTH = {
    # name: (result, its growth)
    "mean": (lambda w, x, key: each(w, x).mean(), 0),
    "sum": (lambda w, x, key: each(w, x).sum(), 1),
    "half of a sum": (lambda w, x, key: 0.5 * each(w, x).sum(), 1),
    "sum over a number": (lambda w, x, key: each(w, x).sum() / 2, 1),
    "sum over each row": (lambda w, x, key: jnp.square(x @ w).sum() / 3, 1),
    "sum with a learned factor": (lambda w, x, key: w[0, 0] * each(w, x).sum(), 1),
    "sum scaled to the data set": (lambda w, x, key: 64 / len(x) * each(w, x).sum(), 0),
    "array as a factor": (lambda w, x, key: jnp.float32(64) / len(x) * each(w, x).sum(), 0),
    "product with weights": (lambda w, x, key: each(w, x) @ np.full(len(x), 1 / len(x), np.float32), 0),
    "product with weights of jax": (lambda w, x, key: each(w, x) @ jnp.full(len(x), 1 / len(x)), 0),
    "divided by a sum of ones": (lambda w, x, key: each(w, x).sum() / jnp.ones(len(x)).sum(), 0),
    "root of the rows within a square": (lambda w, x, key: jnp.square((x @ w) / np.sqrt(len(x))).sum(), 0),
    "mean beside a penalty": (lambda w, x, key: each(w, x).mean() + 0.1 * jnp.square(w).sum(), 0),
    "mean beside a sum": (lambda w, x, key: each(w, x).mean() + 0.25 * each(w, x).sum(), 1),
    "mean over the rows": (lambda w, x, key: each(w, x).mean() / len(x), -1),
    "dropout": (lambda w, x, key: (jax.random.bernoulli(key, 0.5, x.shape) * x).mean() / 0.5, 0),
    "labels": (lambda w, x, key: jax.nn.log_softmax(x @ w)[jnp.arange(len(x)), 1].sum(), 1),
    "vmapped axis": (lambda w, x, key: jax.vmap(lambda x: lax.pmean(x, "b"), axis_name="b")(x).mean(), 0),
    "remat": (lambda w, x, key: jax.checkpoint(lambda x: 0.5 * each(w, x).sum())(x), 1),
    "branches": (lambda w, x, key: lax.cond(w[0, 0] > 0, x.mean, lambda: 2 * x.sum()), 1),
    "loop": (lambda w, x, key: lax.fori_loop(0, len(x), lambda i, c: c + each(w, x[i]), 0.0), 1),
    "chunks": (lambda w, x, key: 0.5 * chunked(w, x), 1),
    "mean by chunks": (lambda w, x, key: chunked(w, x) / len(x), 0),
    "moving average": (lambda w, x, key: lax.scan(lambda c, x: (0.9 * c + x.sum(), None), 0.0, x)[0], UNKNOWN),
    "iterations": (
        lambda w, x, key: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, x.mean()), (0, 0.0))[1],
        0,
    ),
    "as many iterations": (
        lambda w, x, key: lax.while_loop(lambda c: c[0] < len(x), lambda c: (c[0] + 1, c[1] + 1), (0, 0.0))[1],
        UNKNOWN,
    ),
    "histogram": (lambda w, x, key: jnp.bincount((x[:, 0] > 0).astype(int), length=3), 1),
    "padding": (lambda w, x, key: jnp.pad(each(w, x), (0, 1)).sum() / len(x), UNKNOWN),
    "program of so many equations": (lambda w, x, key: sum(list(x)).sum(), UNKNOWN),
    "count of rows": (lambda w, x, key: len(x), 1),
    "last index of a row": (lambda w, x, key: jnp.arange(len(x))[-1], UNKNOWN),
    "constant": (lambda w, x, key: 12, 0),
    "large table": (lambda w, x, key: jnp.asarray(np.arange(9000)), 0),
    "flag": (lambda w, x, key: False, ZERO),
}


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("name", GROWTH)
def test_growth(name, rows):
    fn, expected = GROWTH[name]
    trace = lambda rows: jax.make_jaxpr(fn)(jnp.ones((3, 3)), jnp.ones((rows, 3)), jax.random.key(0))
    np.testing.assert_allclose(growth(trace(rows), trace(2 * rows)), [expected], atol=1e-6)
