"""One slice of a stack: the program of a slice gives the slice of what the whole program gives, or there is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jzero.core.base import compat
from jzero.core.jaxpr.batches import NotSlicedError, slice_program
from jzero.core.jaxpr.flat import flattened
from jzero.core.jaxpr.interpret import evaluate

SIZE = 6  # slices; the other sizes differ, so that no dimension is mistaken for another one


def sym(x):
    return x @ jnp.swapaxes(x, -1, -2)


def carried(x):
    """A loop that starts with something unsliced, which the first pass slices."""

    def step(total, k):
        return total + k * sym(x), total.sum((1, 2))

    return lax.scan(step, jnp.zeros((SIZE, 3, 3)), jnp.arange(4.0))


def along_rows(x):
    """A loop over a dimension within each slice."""
    return lax.scan(lambda c, row: (c + row, c * row), jnp.ones((SIZE, 5)), jnp.moveaxis(x, 1, 0))


SLICED = {
    "elementwise": lambda x: jnp.tanh(x) * 2.0 + jnp.arange(SIZE * 15.0).reshape(x.shape),
    "norm": lambda x: x / jnp.sqrt((x * x).sum((1, 2), keepdims=True)),
    "mapped_norm": jax.vmap(lambda x: x / jnp.linalg.norm(x)),
    "batched_product": sym,
    "free_product": lambda x: jnp.einsum("lij,jk->lik", x, jnp.ones((5, 2))),
    "product_from_left": lambda x: jnp.einsum("ki,lij->klj", jnp.ones((2, 3)), x),
    "with_whole_stack": lambda x: jnp.einsum("lij,lj->li", x, jnp.arange(SIZE * 5.0).reshape(SIZE, 5)),
    "moved": lambda x: jnp.moveaxis(x, 0, 2) * 3,
    "flattened": lambda x: (x.reshape(SIZE * 3, 5) @ jnp.ones((5, 2))).reshape(SIZE, 3, 2),
    "unflattened": lambda x: jnp.tanh(x.reshape(SIZE, 15)).reshape(SIZE, 5, 3),
    "with_new_dimension": lambda x: lax.expand_dims(x, (0, 2)) * jnp.ones((2, 1, 1, 1, 1)),
    "rows": lambda x: lax.squeeze(x[:, 1:2], (1,)),
    "sorted": lambda x: jnp.sort(jnp.concatenate([x, 2 * x, jnp.ones((SIZE, 3, 1))], 2), axis=1),
    "cumulative": lambda x: jnp.cumsum(jnp.flip(x, 2), axis=2),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2))),
    "selected": lambda x: jnp.where(jnp.arange(3)[:, None] > 0, x, 0.0).argmax(1),
    "eigenvectors": lambda x: jnp.abs(jnp.linalg.eigh(sym(x) + jnp.diag(jnp.arange(3.0))[None])[1]),
    "qr": lambda x: jnp.linalg.qr(jnp.swapaxes(x, 1, 2))[0],
    "solved": lambda x: jnp.linalg.cholesky(sym(x) + jnp.eye(3)[None]),
    "branch": lambda x: lax.cond(jnp.ones(()) > 0, sym, lambda x: jnp.zeros((SIZE, 3, 3)), x),
    "loop": carried,
    "loop_along_rows": along_rows,
    "loop_over_slices": lambda x: lax.map(sym, x),
    "repeated": lambda x: lax.fori_loop(0, 3, lambda _, y: sym(y) @ y, 0.1 * x),
}

MIXED = {
    "sum": lambda x: x.sum(0),
    "norm_of_all": lambda x: x / jnp.linalg.norm(x),
    "product": lambda x: jnp.einsum("lij,ljk->ik", x, jnp.ones((SIZE, 5, 2))),
    "of_two_slices": lambda x: jnp.einsum("lij,mkj->limk", x, x),
    "flipped": lambda x: x[::-1],
    "some": lambda x: x[1:],
    "sorted": lambda x: jnp.sort(x, 0),
    "cumulative": lambda x: jnp.cumsum(x, 0),
    "regrouped": lambda x: x.reshape(SIZE // 2, 6, 5),
    "faster_part": lambda x: jnp.moveaxis(x, 0, 1).reshape(3 * SIZE, 5),
    "padded": lambda x: jnp.pad(x, ((1, 0), (0, 0), (0, 0))),
    "qr_across": lambda x: jnp.linalg.qr(jnp.moveaxis(x, 0, 1))[0],
    "two_places": lambda x: jnp.sin(x[:, :1, 0]) + jnp.cos(x[:, 0][None, :, 0]),
    "looked_up": lambda x: x[jnp.array([0, 2])],
    "branch_by_slice": lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
    "loop_from_slice_to_slice": lambda x: lax.scan(lambda c, y: (c + y, c), jnp.zeros((3, 5)), x)[1],
    "iterated": lambda x: lax.while_loop(lambda y: y.sum() < 1e3, lambda y: 2 * jnp.abs(y) + 1, x),
}


def stack():
    return jax.random.normal(jax.random.key(0), (SIZE, 3, 5))


def sliced(fn):
    return slice_program(flattened(jax.make_jaxpr(fn)(stack())), [0], SIZE)


def test_a_slice_of_the_result_is_the_result_of_a_slice():
    """Of all functions in one program, for each slice."""
    programs = {name: sliced(fn) for name, fn in SLICED.items()}
    want = jax.jit(lambda x: {name: jax.tree.leaves(fn(x)) for name, fn in SLICED.items()})(stack())
    run = jax.jit(lambda *args: {name: evaluate(x, [*args], compat.bind) for name, (x, _) in programs.items()})
    for number in range(SIZE):
        found = run(stack()[number : number + 1], jnp.int32(number))
        for name, (_, dims) in programs.items():
            for dim, x, whole in zip(dims, found[name], want[name], strict=True):
                few = x.shape[dim]
                expected = np.take(whole, range(number * few, (number + 1) * few), axis=dim)
                np.testing.assert_allclose(x, expected, rtol=2e-5, atol=2e-5, err_msg=name)
                assert few * SIZE == whole.shape[dim], name


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_slices_has_no_program_of_one(name):
    try:
        _, dims = sliced(MIXED[name])
    except NotSlicedError:
        return
    assert None in dims  # no result may pass for one of slices
