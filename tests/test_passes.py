"""The passes of the engine one by one, and what differentiating first makes right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.core.base import compat
from jzero.core.engine.gradient_rules import Reduction
from jzero.core.engine.reduce_early import reduce_early
from jzero.core.engine.roles import Role
from jzero.core.engine.trace import LossInputs, trace_loss
from jzero.core.jaxpr.equations import equations_of
from jzero.core.layout.cut import Cut
from jzero.core.layout.route import Hop, Route, Sums
from tests import shared

WIDTH = 16
BATCH = np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)


def sharded(params, stage=3, tx=None, **options):
    return shared.sharded(params, tx or shared.sgd(1.0), stage, **options)


def matrix(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape or (WIDTH, WIDTH)).astype(np.float32) / 4


def names(jaxpr):
    """The primitives of a program, those of the jaxprs that it holds among them."""
    return [eqn.primitive.name for eqn in equations_of(jaxpr)]


def unrolled(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
        for _ in range(10):
            x = jnp.sin(x) + 1
    return x.sum()


def loss_fn(params, batch):
    return jnp.square(jnp.tanh(batch @ params["w"])).mean()


def test_a_traced_loss_has_whole_parameters_and_the_rows_of_one_device():
    state = sharded({"w": matrix()})
    plan = jzero.plan_of(state)
    traced = trace_loss(loss_fn, plan, LossInputs(state.params, {}, BATCH, None), accumulate_steps=2)
    assert [x.shape for x in traced.jaxpr.in_avals] == [(WIDTH, WIDTH), (1, WIDTH)]
    assert traced.num_inputs == (1, 0, 1, 0)
    assert not any(name in ("zero_gather", "zero_reduce", "all_gather", "psum") for name in names(traced.jaxpr))


def how(shape, dim, *, by_use=True):
    return Reduction(
        "w", Cut(dim, shape, 8), Route((Hop("data", 8),)), Sums(("data",)), jnp.dtype("float32"), by_use=by_use
    )


def gradient(fn, *shapes):
    return compat.open_jaxpr(jax.make_jaxpr(jax.grad(fn))(*(jnp.ones(shape) for shape in shapes)))[0]


def reduced_at(jaxpr, exits):
    """The primitives whose results are reduced, and the shapes."""
    new = reduce_early(jaxpr, exits)
    maker = {v: eqn for eqn in new.eqns for v in eqn.outvars}
    reductions = [eqn for eqn in new.eqns if eqn.primitive.name == "zero_reduce"]
    assert [v.aval.shape for v, x in zip(new.outvars, exits, strict=True) if x] == [
        x.cut.shard_shape for x in exits if x
    ]
    return [maker[eqn.invars[0]].primitive.name for eqn in reductions], [eqn.invars[0].aval for eqn in reductions]


def test_a_gradient_is_reduced_before_it_is_widened():
    jaxpr = gradient(lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).sum(), (16, 8), (2, 16))
    makers, (made,) = reduced_at(jaxpr, [how((16, 8), 0)])
    assert makers in (["transpose"], ["dot_general"])
    assert made.dtype == jnp.bfloat16


def test_what_something_else_reads_is_no_shard():
    """The cast would run on a shard, but its whole result is returned, too."""
    twice = lambda x, g: [(x.T @ g).astype(jnp.float32)] * 2
    jaxpr = jax.make_jaxpr(twice)(jnp.ones((2, 16), jnp.bfloat16), jnp.ones((2, 8), jnp.bfloat16)).jaxpr
    new = reduce_early(jaxpr, [how((16, 8), 0), None])
    made = {v for eqn in new.eqns for v in eqn.outvars}
    assert made >= {*new.outvars}
    assert [v.aval.shape for v in new.outvars] == [(2, 8), (16, 8)]


def tied(w, x):
    return (jnp.tanh(x @ w) @ w.T).sum()


def tied_around(turn):
    return lambda w, x: (lax.scan(lambda h, _: (turn(h), None), x @ w, None, length=3)[0] @ w.T).sum()


tied_around_layers = tied_around(lambda h: jnp.sin(h @ (h.T @ h)))
tied_around_sums = tied_around(jnp.sin)


@pytest.mark.parametrize(
    ("loss", "by_use", "is_summed"),
    [
        (tied, True, True),
        (tied_around_layers, True, False),
        (tied_around_layers, False, True),
        (tied_around_sums, True, True),
    ],
    ids=["no loop", "layers", "layers, at the end", "a loop without products"],
)
def test_a_tied_gradient_is_summed_first_but_not_across_a_loop_over_layers(loss, by_use, is_summed):
    jaxpr = gradient(loss, (16, 8), (2, 16))
    exits = [how((16, 8), 0, by_use=by_use)]
    assert (reduced_at(jaxpr, exits)[0] == ["add_any"]) == is_summed
    marked = [eqn for eqn in reduce_early(jaxpr, exits).eqns if eqn.primitive.name == "zero_unreduced"]
    assert len(marked) == 2 * is_summed, "noted, since passes wait for them"


def test_a_gradient_that_was_there_before_the_first_loop_does_not_wait_for_it():
    layers = lambda w, m: lax.scan(lambda h, _: (m @ h, None), w, None, length=3)[0]
    both = lambda g, h, m: jax.linear_transpose(lambda w: (w.T, layers(w, m)), h)((g, h))
    jaxpr = jax.make_jaxpr(both)(jnp.ones((8, 16)), jnp.ones((16, 8)), jnp.ones((16, 16))).jaxpr
    assert "add_any" in names(jaxpr)
    new = reduce_early(jaxpr, [how((16, 8), 0)])
    assert [*names(new)].count("zero_reduce") == 2


WHOLE, REDUCED_AT_END, REDUCED_EARLY = Role(False, False, False), Role(False, True, False), Role(False, True, True)
SHARDED_REDUCED_AT_END, SHARDED = Role(True, True, False), Role(True, True, True)


@pytest.mark.parametrize(
    ("stage", "accumulate_steps", "reduce", "role"),
    [
        (0, 1, None, WHOLE),
        (1, 1, None, REDUCED_EARLY),
        (1, 2, None, REDUCED_AT_END),
        (2, 2, None, REDUCED_EARLY),
        (2, 2, "last", REDUCED_AT_END),
        (3, 2, None, SHARDED),
        (3, 2, "last", SHARDED_REDUCED_AT_END),
    ],
)
def test_the_roles_of_the_stages(stage, accumulate_steps, reduce, role):
    """By the plan, and by what the walk of a step emits: where gradients are reduced."""
    state = sharded({"w": matrix()}, stage)
    is_last = accumulate_steps > 1 and (reduce == "last" or stage < 2)
    assert Role.of(jzero.plan_of(state).leaves[0], reduce_last=is_last) == role
    options = {} if reduce is None else {"reduce": reduce}
    step = jzero.make_train_step(loss_fn, accumulate_steps=accumulate_steps, **options)
    traced = step.trace(state, BATCH).jaxpr
    inside = [x for eqn in scans(traced) for x in names(eqn.params["jaxpr"])]
    everywhere = names(traced)
    _, is_cut, as_made = role
    assert ("zero_reduce" in everywhere) == is_cut
    assert ("zero_reduce" in inside) == (as_made and accumulate_steps > 1)


def scans(jaxpr):
    return [eqn for eqn in equations_of(jaxpr) if eqn.primitive.name == "scan"]


def test_a_weight_that_is_computed_from_itself_is_gathered_once_in_each_pass():
    """Kept until another parameter is gathered, and dropped where the backward pass begins."""
    loss = lambda p, x: jnp.square(x @ (p["w"] / jnp.sqrt(jnp.square(p["w"]).sum()))).mean()
    fn = jzero.value_and_grad(loss, remat="as_written")
    found = names(jax.make_jaxpr(fn)(sharded({"w": matrix()}), BATCH))
    assert found.count("zero_gather") == 2
    assert found.count("zero_reduce") == 1


def test_a_table_made_of_literals_is_traced_once_in_each_pass_not_at_each_use():
    def loss_fn(params, batch):
        table = jnp.cos(lax.broadcasted_iota(jnp.float32, (1, WIDTH), 1))
        h = jnp.tanh(batch * table @ params["w"] * table)
        return jnp.square(h * table).mean()

    state, params = sharded({"w": matrix()}), {"w": matrix()}
    assert names(jax.make_jaxpr(loss_fn)(params, BATCH)).count("cos") == 1
    assert names(jax.make_jaxpr(jzero.value_and_grad(loss_fn))(state, BATCH)).count("cos") <= 2
    loss, grads = jzero.value_and_grad(loss_fn)(state, BATCH)
    want, want_grads = jax.value_and_grad(loss_fn)(params, BATCH)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], want_grads["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("length", "operations"), [(8, 16), (24, 24)])
def test_a_long_chain_of_parameters_alone_is_computed_once(length, operations):
    """A short one is repeated at each of its two uses."""

    def products(params, x):
        w = params["w"]
        for _ in range(length):
            w = jnp.sin(w)
        return {"one": (x @ w).mean(), "two": ((x + 1) @ w).mean()}

    evaluate = jzero.make_eval_step(products)
    found = names(jax.make_jaxpr(evaluate)(sharded({"w": matrix()}), BATCH))
    assert found.count("sin") == operations


def test_a_parameter_that_goes_into_a_call_twice_is_gathered_once():
    """In each pass; the call is long enough to stay one."""

    @jax.jit
    def layer(x, a, b):
        x = x @ a
        for _ in range(16):
            x = jnp.sin(x)
        return x @ b

    fn = jzero.value_and_grad(lambda p, x: layer(x, p["w"], 2 * p["w"]).mean(), remat="as_written")
    found = names(jax.make_jaxpr(fn)(sharded({"w": matrix()}), BATCH))
    assert found.count("zero_gather") == 2


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_what_a_loop_recomputes_stays_behind_its_barriers(prevent_cse):
    """As the loss says: in a loop, too, a compiler may see what is recomputed beside what was computed."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), prevent_cse=prevent_cse)
    loss = lambda p, x: jnp.square(lax.scan(layer, x, p["w"])[0]).mean()
    jaxpr = jax.make_jaxpr(jzero.value_and_grad(loss))(sharded({"w": matrix(3, WIDTH, WIDTH)}), BATCH)
    found = [names(eqn.params["jaxpr"]).count("optimization_barrier") for eqn in scans(jaxpr)]
    assert found == [0, int(prevent_cse)], "forward, backward"


# What differentiating first makes right.


@pytest.mark.parametrize(
    ("values", "chain"),
    [
        ([1e5, 3e-8, 1.003, -7e4], (jnp.bfloat16, jnp.float16, jnp.float32)),
        ([1.125, 1.13, -1.625, 3.25], (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32)),
        ([1.0009765625, 3.0e-5, -2.7, 65519.0], (jnp.float16, jnp.float32, jnp.bfloat16, jnp.float32)),
    ],
    ids=["bf16-f16", "e4m3-e5m2", "f16-f32-bf16"],
)
def test_each_rounding_of_a_chain_of_casts_happens(values, chain):
    """A second one to a dtype as narrow as the first, of another range, is one, too. Against NumPy, to the bit."""
    w = np.tile(np.array(values, np.float32), 16)

    def cast(x):
        for dtype in chain:
            x = x.astype(dtype)
        return x

    found = jzero.make_eval_step(lambda params, batch: {"w": cast(params["w"])})(sharded({"w": w}), BATCH)["w"]
    with np.errstate(over="ignore"):
        expected = cast(w)
    np.testing.assert_array_equal(np.asarray(found), expected)


def gated(params, x):
    return jax.nn.sigmoid(x @ params["w"])


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 2), ("fp16", 3)])
def test_a_weight_that_depends_on_parameters_is_differentiated(stage, precision):
    """Against jax's gradient of the quotient over the whole batch. fp16 rounds to 11 bits."""
    loss = lambda p, x: jzero.Weighted((gated(p, x) * x).sum(), gated(p, x).sum())
    whole = lambda p: (gated(p, BATCH) * BATCH).sum() / gated(p, BATCH).sum()
    value, grads = jzero.value_and_grad(loss)(sharded({"w": matrix()}, stage, precision=precision), BATCH)
    want, want_grads = jax.jit(jax.value_and_grad(whole))({"w": matrix()})
    rtol = 1e-5 if precision == "fp32" else 2e-2
    np.testing.assert_allclose(value, want, rtol=rtol, atol=rtol * 1e-2)
    scale = float(jnp.abs(want_grads["w"]).max())
    np.testing.assert_allclose(np.asarray(grads["w"], np.float32), want_grads["w"], rtol=rtol, atol=rtol * scale)


def test_a_weight_that_depends_on_parameters_needs_one_micro_batch():
    loss = lambda p, x: jzero.Weighted((gated(p, x) * x).sum(), gated(p, x).sum())
    state = sharded({"w": matrix()}, 2)
    with pytest.raises(ValueError, match=r"`Weighted.weight` depends on"):
        jzero.make_train_step(loss, accumulate_steps=2).lower(state, BATCH)
    fixed = lambda p, x: jzero.Weighted((gated(p, x) * x).sum(), lax.stop_gradient(gated(p, x).sum()))
    jzero.make_train_step(fixed, accumulate_steps=2).lower(state, BATCH)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("regathers", [True, False])
def test_what_the_loss_recomputes_itself_is_gathered_as_often_as_the_plan_says(scan, regathers):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))

    def loss(params, x):
        if scan:
            return jnp.square(lax.scan(layer, x, params["layers"])[0]).mean()
        for w in params["layers"]:
            x, _ = layer(x, w)
        return jnp.square(x).mean()

    stack = np.full((4, 64, 64), 1 / 64, np.float32)
    params = {"layers": stack if scan else list(stack)}
    state = sharded(params, tx=optax.adam(1e-3), reshard_after_forward=regathers)
    step, batch = jzero.make_train_step(loss), np.ones((16, 64), np.float32)
    gathers = names(step.trace(state, batch).jaxpr).count("zero_gather")
    assert gathers == (1 if scan else 4) * (2 if regathers else 1), "in the program, before a compiler merges any"
    planned = 1 + jzero.plan_of(state).gathered_bytes / stack.nbytes  # gathers, and one reduction
    assert planned == (3 if regathers else 2)
    estimated = jzero.estimate_step_memory(step, state, batch)
    assert estimated.gathered_bytes == estimated.planned_bytes == jzero.plan_of(state).gathered_bytes
    if scan == regathers:  # what compilers might merge or move
        report = jzero.analyze(step, state, batch)
        report.verify()
        assert report.communication_elements / stack.size == pytest.approx(planned, rel=0.02)


def test_what_calls_gather_again_is_not_merged_with_what_was_gathered_before():
    """Of layers that are calls of one function; the first is not used in the backward pass: rows need no gradient."""
    loss = lambda p, x: unrolled(p, x) / x.size
    state = sharded([matrix(64, 64, seed=i) for i in range(4)])
    report = jzero.analyze(jzero.make_train_step(loss, remat="as_written"), state, np.ones((16, 64), np.float32))
    assert report.communication_elements / (4 * 64 * 64) == pytest.approx((4 + 3 + 4) / 4, rel=0.01)
