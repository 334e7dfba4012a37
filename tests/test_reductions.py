"""What is reduced of parameters that a loss uses more than once: each gradient once, whatever the loss."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.analysis.collectives import find_collectives
from jzero.core.jaxpr.equations import equations_of
from tests.shared import whole
from tests.tiers import slow

X = jnp.ones((3, 16))


def once(w):
    return (X @ w).sum()


def tied(w):
    return (jnp.tanh(X @ w) @ w.T).sum()


def cast_for_each_use(w):
    x = jnp.tanh(X.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return (x @ w.astype(jnp.bfloat16).T).astype(jnp.float32).sum()


def in_two_calls(w):
    call = jax.jit(lambda w: w * 2.0)
    return (X @ call(w)).sum() + once(w)


def constant_of_a_loop(w):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), X, None, length=4)[0].sum()


def scanned(w):
    return lax.scan(lambda x, row: (jnp.tanh(x @ row), None), X, w)[0].sum()


def layer_by_layer(w):
    x = X
    for i in range(4):
        x = jnp.tanh(x @ w[i])
    return x.sum()


def constrained(w):
    return lax.with_sharding_constraint(w, NamedSharding(jzero.make_mesh(), PartitionSpec()))


LOSSES = {
    "once": once,
    "tied": tied,
    "tied_and_constrained": lambda w: tied(constrained(w)),
    "cast_for_each_use": cast_for_each_use,
    "in_a_call": jax.jit(once),
    "in_two_calls": in_two_calls,
    "recomputed": jax.checkpoint(once),
    "recomputed_tied": jax.checkpoint(tied),
    "handed_on_by_a_checkpoint": lambda w: (X @ jax.checkpoint(lambda w: w * 2.0)(w)).sum(),
    "selected": lambda w: (X @ jnp.where(w > 0, w, 0.1 * w)).sum(),
    "twice_into_a_call": lambda w: (X @ jax.jit(lambda a, b: a @ b)(w, w)).sum(),
    "two_of_it_into_a_checkpoint": lambda w: (X @ jax.checkpoint(lambda a, b: a @ b)(w, 2 * w)).sum(),
    "out_of_a_call_and_again": lambda w: (X @ (jax.jit(lambda w: 2 * w)(w) @ w)).sum(),
    "branches": lambda w: lax.cond(w[0, 0] > 0, once, tied, w),
    "constant_of_a_loop": constant_of_a_loop,
    "constant_of_two_loops": lambda w: constant_of_a_loop(w) + constant_of_a_loop(2 * w),
    "scanned": scanned,
    "scanned_tied": lambda w: lax.scan(lambda x, row: (jnp.tanh(x @ row) @ row, None), X, w)[0].sum(),
    "scanned_twice": lambda w: scanned(w) + lax.scan(lambda x, row: (jnp.sin(x @ row), None), X, w)[0].sum(),
    "indexed_in_a_loop": lambda w: lax.scan(lambda x, i: (jnp.tanh(x @ w[i]), None), X, jnp.arange(4))[0].sum(),
    "layer_by_layer": layer_by_layer,
    "in_columns": lambda w: sum(((i + 1) * (X @ w[:, i : i + 4]) ** 2).sum() for i in (0, 4, 8, 12)),
    "in_three_of_four_columns": lambda w: sum(((i + 1) * (X @ w[:, i : i + 4]) ** 2).sum() for i in (0, 4, 8)),
}
MATRIX, STACK, DEEP = (16, 16), (4, 16, 16), (8, 16, 16)
CASES = [  # and the dimension that is cut
    *((name, MATRIX, 0) for name in itertools.takewhile(lambda name: name != "scanned", LOSSES)),
    ("scanned", STACK, 1),
    ("scanned_tied", STACK, 1),
    ("scanned_twice", STACK, 1),
    ("scanned", DEEP, 0),  # gathered before the loop
    ("indexed_in_a_loop", STACK, 1),
    ("indexed_in_a_loop", DEEP, 0),
    ("layer_by_layer", STACK, 1),
    ("in_columns", MATRIX, 1),
    ("layer_by_layer", DEEP, 0),
    ("in_columns", MATRIX, 0),
    ("in_three_of_four_columns", MATRIX, 0),
]


TOGETHER = [CASES[number::3] for number in range(3)]
"""Losses of several kinds in one, of a parameter each, by default for each stage others."""


def name_of(case):
    return f"{case[0]}_{case[2]}"


@pytest.mark.filterwarnings("ignore:A stack of shape .* is cut on dimension 0")
@pytest.mark.parametrize(
    ("cases", "stage"),
    [*zip(TOGETHER, [1, 2, 3], strict=True), *(slow(TOGETHER[stage - 2], stage) for stage in [1, 2, 3])],
    ids=lambda x: "-".join(map(name_of, x)) if isinstance(x, list) else None,
)
def test_each_gradient_is_reduced_once(cases, stage):
    """The elements that the compiled step reduces are those of the parameters; and what it computes is jax's own."""
    cases = {f"w{number}": case for number, case in enumerate(cases)}
    rules = {
        name: jzero.LeafRule(dim=dim, scan_dim=-1 if dim == 0 or shape == MATRIX else 0)
        for name, (_, shape, dim) in cases.items()
    }
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, (_, shape, _) in cases.items()}
    plain = jzero.TrainState.create(params=jax.tree.map(jnp.asarray, params), tx=optax.sgd(1.0))

    def loss_fn(params, batch):  # the factors keep compilers from taking gradients of two kinds for the same
        return (
            sum((1 + i / 16) * LOSSES[name](params[k]) for i, (k, (name, *_)) in enumerate(cases.items()))
            * batch.mean()
        )

    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=100, rules=rules))
    assert {x.path: x.grad.cut.dim for x in jzero.plan_of(state).leaves} == {k: dim for k, (*_, dim) in cases.items()}
    batch = np.ones(8, np.float32)
    compiled = jzero.make_train_step(loss_fn).lower(state, batch).compile()
    reduced = [c for c in find_collectives(compiled.as_text()) if c.kind == "reduce-scatter"]
    # From stage 2 on, not across a loop: there the gradient of each is reduced.
    is_twice = lambda name: stage > 1 and cases[name][0] in ("constant_of_two_loops", "scanned_twice")
    share = lambda name: 3 / 4 if cases[name][0] == "in_three_of_four_columns" else 1 + is_twice(name)
    assert sum(c.elements for c in reduced) == sum(w.size * share(name) for name, w in params.items())
    got = whole(compiled(state, batch)[0].params)
    want = jax.jit(jax.grad(loss_fn))(params, batch)
    for name, (loss, *_) in cases.items():
        # Sums of 8 equal gradients, in another order; in bf16 these differ by a rounding.
        tolerance = 2e-2 if loss == "cast_for_each_use" else 1e-5
        np.testing.assert_allclose(got[name], params[name] - want[name], rtol=tolerance, atol=tolerance)


def test_shards_of_uses_are_summed_in_the_accumulate_dtype():
    """Of uses with a loop between them, each of which travels in 16 bits."""
    precision = jzero.Precision(compute_dtype="bfloat16", accumulate_dtype="float32")
    plain = jzero.TrainState.create(params={"w": jnp.ones((16, 16))}, tx=optax.sgd(1.0))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=2, precision=precision))
    loss_fn = lambda params, batch: LOSSES["constant_of_two_loops"](params["w"]) * batch.mean()
    jaxpr = jax.make_jaxpr(jzero.value_and_grad(loss_fn))(state, jnp.ones(8))
    assert [x.dtype for x in reduced(jaxpr)] == [jnp.bfloat16] * 2
    assert sums_of_shards(jaxpr, (2, 16)) == [jnp.float32]


def sums_of_shards(jaxpr, shape):
    """The dtypes of sums of this shape."""
    found = [eqn.outvars[0].aval for eqn in equations_of(jaxpr) if eqn.primitive.name == "add"]
    return [x.dtype for x in found if x.shape == shape]


def reduced(jaxpr):
    """What is reduced and scattered."""
    return [eqn.invars[0].aval for eqn in equations_of(jaxpr) if eqn.primitive.name == "zero_reduce"]
