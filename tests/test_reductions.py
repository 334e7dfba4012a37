"""Which parameters a loss uses more than once, seen by what stage 1 reduces: each gradient once, whatever the loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero import _compat
from jzero._collectives import Wire
from jzero._layout import Cut
from jzero._lazy import Lazy
from jzero._reductions import reduced_repeatedly
from jzero.analysis.collectives import find_collectives

X = jnp.ones((3, 16))


def once(w):
    return (X @ w).sum()


def tied(w):
    return (jnp.tanh(X @ w) @ w.T).sum()


def cast_for_each_use(w):
    x = jnp.tanh(X.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return (x @ w.astype(jnp.bfloat16).T).astype(jnp.float32).sum()


def in_a_call(w):
    return jax.jit(once)(w)


def in_two_calls(w):
    call = jax.jit(lambda w: w * 2.0)
    return (X @ call(w)).sum() + once(w)


def recomputed(w):
    return jax.checkpoint(once)(w)


def recomputed_tied(w):
    return jax.checkpoint(tied)(w)


def handed_on_by_a_checkpoint(w):
    return (X @ jax.checkpoint(lambda w: w * 2.0)(w)).sum()


def selected(w):
    return (X @ jnp.where(w > 0, w, 0.1 * w)).sum()


def twice_into_a_call(w):
    return (X @ jax.jit(lambda a, b: a @ b)(w, w)).sum()


def two_of_it_into_a_checkpoint(w):
    return (X @ jax.checkpoint(lambda a, b: a @ b)(w, 2 * w)).sum()


def out_of_a_call_and_again(w):
    return (X @ (jax.jit(lambda w: 2 * w)(w) @ w)).sum()


def branches(w):
    return lax.cond(w[0, 0] > 0, once, tied, w)


def constant_of_a_loop(w):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), X, None, length=4)[0].sum()


def constant_of_two_loops(w):
    return constant_of_a_loop(w) + constant_of_a_loop(2 * w)


def scanned(w):
    return lax.scan(lambda x, row: (jnp.tanh(x @ row), None), X, w)[0].sum()


def scanned_tied(w):
    return lax.scan(lambda x, row: (jnp.tanh(x @ row) @ row, None), X, w)[0].sum()


def scanned_twice(w):
    return scanned(w) + scanned(w)


def indexed_in_a_loop(w):
    return lax.scan(lambda x, i: (jnp.tanh(x @ w[i]), None), X, jnp.arange(4))[0].sum()


def layer_by_layer(w):
    x = X
    for i in range(4):
        x = jnp.tanh(x @ w[i])
    return x.sum()


def in_columns(w):
    return sum(((i + 1) * (X @ w[:, i : i + 4]) ** 2).sum() for i in (0, 4, 8, 12))


def tied_and_constrained(w):
    return tied(lax.with_sharding_constraint(w, NamedSharding(jzero.make_mesh(), PartitionSpec())))


MATRIX, STACK = (16, 16), (4, 16, 16)
CASES = [  # the dimension that is cut, and whether gradients of uses would be reduced one by one
    (once, MATRIX, 0, False),
    (tied, MATRIX, 0, True),
    (tied_and_constrained, MATRIX, 0, True),
    (cast_for_each_use, MATRIX, 0, True),
    (in_a_call, MATRIX, 0, False),
    (in_two_calls, MATRIX, 0, True),
    (recomputed, MATRIX, 0, False),
    (recomputed_tied, MATRIX, 0, True),
    (handed_on_by_a_checkpoint, MATRIX, 0, False),
    (selected, MATRIX, 0, False),
    (twice_into_a_call, MATRIX, 0, False),
    (two_of_it_into_a_checkpoint, MATRIX, 0, False),
    (out_of_a_call_and_again, MATRIX, 0, True),
    (branches, MATRIX, 0, False),
    (constant_of_a_loop, MATRIX, 0, False),
    (constant_of_two_loops, MATRIX, 0, True),
    (scanned, STACK, 1, False),
    (scanned_tied, STACK, 1, True),
    (scanned_twice, STACK, 1, True),
    (scanned, (8, 16, 16), 0, False),  # gathered before the loop
    (indexed_in_a_loop, STACK, 1, False),
    (indexed_in_a_loop, (8, 16, 16), 0, True),
    (layer_by_layer, STACK, 1, False),
    (layer_by_layer, (8, 16, 16), 0, True),
    (in_columns, MATRIX, 0, False),
    (in_columns, MATRIX, 1, True),
]


@pytest.mark.parametrize(("loss", "shape", "dim", "repeatedly"), CASES)
def test_uses_are_told_from_parts(loss, shape, dim, repeatedly):
    cut = Cut(dim, shape, 8, False)
    param = Lazy(None, None, None, cut, Wire("data", None, True), jnp.float32, jnp.float32)
    jaxpr = jax.make_jaxpr(lambda unused, w: loss(w))(0.0, jnp.ones(shape))
    assert reduced_repeatedly(jaxpr, [None, param]) == (frozenset([1]) if repeatedly else frozenset())


@pytest.mark.filterwarnings("ignore:A stack of shape .* is cut on dimension 0")
@pytest.mark.parametrize(("loss", "shape", "dim", "repeatedly"), CASES)
def test_stage_1_reduces_each_gradient_once(loss, shape, dim, repeatedly):
    """The elements that the compiled step reduces are those of the parameter; and what it computes is jax's own."""
    scan_dim = -1 if dim == 0 or shape == MATRIX else 0
    config = jzero.ZeroConfig(stage=1, rules={"w": jzero.LeafRule(dim=dim, scan_dim=scan_dim)})
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32) / 4
    plain = jzero.TrainState.create(params={"w": jnp.asarray(w)}, tx=optax.sgd(1.0))
    loss_fn = lambda params, batch: loss(params["w"]) * batch.mean()
    state = jzero.shard_train_state(plain, config=config)
    assert jzero.plan_of(state).leaves[0].grad.cut.dim == dim
    compiled = jzero.make_train_step(loss_fn).lower(state, jnp.ones(8)).compile()
    reduced = [c for c in find_collectives(compiled.as_text()) if c.kind == "reduce-scatter"]
    assert sum(c.elements for c in reduced) == w.size
    got = np.asarray(compiled(state, jnp.ones(8))[0].params["w"])
    want = w - np.asarray(jax.grad(lambda w: loss_fn({"w": w}, jnp.ones(8)))(jnp.asarray(w)))
    # Sums of 8 equal gradients, in another order; in bf16 these differ by a rounding.
    tolerance = 2e-2 if loss is cast_for_each_use else 1e-5
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulate_dtype", ["float32", "bfloat16"])
def test_tied_gradients_travel_as_the_loss_makes_them(stage, accumulate_dtype):
    """Whatever dtype they are summed in over micro-batches, of which there is one."""
    precision = jzero.Precision(compute_dtype="bfloat16", accumulate_dtype=accumulate_dtype)
    plain = jzero.TrainState.create(params={"w": jnp.ones((32, 32))}, tx=optax.sgd(1.0))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, precision=precision))
    loss_fn = lambda params, batch: ((jnp.tanh(batch @ params["w"]) @ params["w"].T) ** 2).mean()
    fn = jzero.value_and_grad(loss_fn)
    found = reduced(_compat.open_jaxpr(jax.make_jaxpr(fn)(state, jnp.ones((8, 32), jnp.bfloat16)))[0])
    assert [x.dtype for x in found] == [jnp.bfloat16] * stage
    assert fn(state, jnp.ones((8, 32), jnp.bfloat16))[1]["w"].dtype == accumulate_dtype


def reduced(jaxpr):
    """What is reduced and scattered."""
    found = [eqn.invars[0].aval for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_scatter"]
    return found + [x for eqn in jaxpr.eqns for inner in _compat.contained_jaxprs(eqn) for x in reduced(inner)]
