"""Tables of which a loss looks up rows are never whole, and loss and gradients are those of plain jax."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.estimate.traced_collectives import traced_collectives
from jzero.machines.topologies import topology_devices
from tests import shared
from tests.shared import whole
from tests.tiers import default_for, slow

V, D = 960, 16
RATE = 1e6  # of gradient descent: what a step changes is the gradient


def whole_rows(p, b):
    return jnp.tanh(p["t"][b["i"]] @ p["w"]).mean()


def filled(p, b):
    return jnp.nan_to_num(jnp.take(p["t"], b["o"], axis=0), nan=0.7).mean()


def clipped(p, b):
    return jnp.square(jnp.take(p["t"], b["o"], axis=0, mode="clip")).mean()


def filled_by_a_number(p, b):
    return jnp.square(p["t"].at[b["o"]].get(mode="fill", fill_value=0.25)).mean()


def promised(p, b):
    return jnp.square(p["t"].at[b["o"]].get(mode="promise_in_bounds")).mean()


def embedded(p, b):
    return jnp.sin(nn.Embed(V, D).apply({"params": {"embedding": p["t"]}}, b["i"])).mean()


def looked_up_twice(p, b):
    return jnp.square(p["t"][b["i"]] + 2 * jnp.take(p["t"], b["i"][:, ::-1], axis=0)).mean()


def by_bytes(p, b):
    return jnp.square(p["t"][(b["i"] % 250).astype(jnp.uint8)]).mean()


def mapped(p, b):
    return jnp.square(jax.vmap(lambda i: p["t"][i])(b["i"])).mean()


def recomputed(p, b):
    return jax.checkpoint(lambda t, i: jnp.tanh(t[i]))(p["t"], b["i"]).mean()


def in_a_loop(p, b):
    body = lambda h, i: (jnp.tanh(h @ p["w"] + p["t"][i]), None)
    return jnp.square(lax.scan(body, jnp.zeros((len(b["i"]), D)), b["i"].T)[0]).mean()


def in_nested_loops(p, b):
    inner = jax.checkpoint(lambda h, i: (jnp.tanh(h @ p["w"] + p["t"][i]), None))
    outer = lambda h, ids: (lax.scan(inner, h, ids)[0], None)
    return jnp.square(lax.scan(outer, jnp.zeros((len(b["i"]), D)), b["i"].T.reshape(2, 2, -1))[0]).mean()


def before_a_loop(p, b):
    body = lambda h, x: (jnp.tanh(h @ p["w"] + x), None)
    rows = jnp.take(p["t"], b["i"], axis=0).swapaxes(0, 1)
    return jnp.square(lax.scan(body, jnp.zeros((len(b["i"]), D)), rows)[0]).mean()


def of_a_part(p, b):
    return jnp.square(p["t"][: V // 2][b["i"] % (V // 2)]).mean()


def of_one_of_a_stack(p, b):
    return sum(jnp.square(p["stack"][j][b["i"][:, j]]).mean() for j in range(3))


def tied(p, b):
    logits = jnp.tanh(p["t"][b["i"]].mean(1) @ p["w"]) @ p["t"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["i"][:, 0]).mean()


def rows_of_what_is_computed(p, b):
    return jnp.square(jnp.tanh(p["t"])[b["i"]]).mean()


def by_columns(p, b):
    return jnp.square(p["t"][:, b["i"] % D]).mean()


def by_rows_and_columns(p, b):
    return jnp.square(p["t"][b["i"]]).mean() + jnp.square(p["t"][:, b["i"] % D]).mean()


def in_a_branch(p, b):
    return lax.cond(b["o"][0, 0] > 10**6, lambda t: t.sum(), lambda t: jnp.square(t[b["i"]]).mean(), p["t"])


LOOKED_UP = (
    *(whole_rows, filled, clipped, filled_by_a_number, promised, embedded, looked_up_twice, by_bytes, mapped),
    *(recomputed, before_a_loop, of_a_part, of_one_of_a_stack),
)
OTHERWISE = (tied, rows_of_what_is_computed, by_columns, in_a_branch)
LOOPS = (in_a_loop, in_nested_loops)
"""Each by itself: jax 0.10 may run the collectives of a loop on CPUs beside others, and so have devices differ."""


def params():
    """One table for each loss, so that each gradient is seen by itself."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
    tables = {loss.__name__: normal(V, D) for loss in (*LOOKED_UP, *OTHERWISE, *LOOPS)}
    return {"w": normal(D, D), "stack": normal(3, V, D), **tables, by_rows_and_columns.__name__: normal(V, D)}


def batch(rows):
    rng = np.random.default_rng(1)
    ids = lambda low, high: jnp.asarray(rng.integers(low, high, (rows, 4)), jnp.int32)
    return {"i": ids(0, V), "o": ids(-V // 8, V + V // 8)}


@functools.cache
def together(*losses):
    """The sum of losses, each over a table of its own."""
    return lambda p, b: sum(loss({**p, "t": p[loss.__name__]}, b) for loss in losses)


@functools.cache
def on_one_device(loss, rows):
    return jax.jit(jax.value_and_grad(loss))(params(), batch(rows))


def sharded(stage, devices, dim=None, *, axes=None, **options):
    rules = {} if dim is None else {"(?!w$|stack).*": jzero.LeafRule(dim=dim), "stack": jzero.LeafRule(dim=dim + 1)}
    mesh = jzero.make_mesh(devices=jax.devices()[:devices], **axes or {})
    options = {"rules": rules, "padding_threshold": 0} | options
    return shared.sharded(params(), shared.sgd(RATE), stage, mesh=mesh, **options)


def assert_equal(state, loss, rows, *, tolerance=1e-6, **options):
    """Compares loss and gradients with plain jax's; returns the step's plan, and what travels whole."""
    (want_loss, want), before = on_one_device(loss, rows), whole(state.params)
    step = jzero.make_train_step(loss, check_rows=False, **options)
    plan, found = step.plan(state, batch(rows)), list(traced_collectives(step.trace(state, batch(rows)).jaxpr))
    state, metrics = step(state, batch(rows))
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=2 * tolerance)
    for name, after in whole(state.params).items():
        grad, atol = (before[name] - after) / RATE, tolerance * float(jnp.abs(want[name]).max())
        np.testing.assert_allclose(grad, want[name], rtol=0, atol=atol, err_msg=name)
    return plan, {x.path for x in found if "lookup" not in x.eqn.params}


SETTINGS = [
    slow(3, 8, 1, {}),  # by columns
    (3, 3, 0, {}),  # by rows
    (2, 5, 1, {"accumulate_steps": 2}),  # padded columns, of gradients
    slow(3, 7, 0, {"accumulate_steps": 2, "reduce": "last"}),  # padded rows; gradients are summed whole
]


@pytest.mark.parametrize(("stage", "devices", "dim", "options"), SETTINGS)
def test_lookups_equal_plain_jax(stage, devices, dim, options):
    loss = together(*LOOKED_UP, *OTHERWISE)
    plan, travel_whole = assert_equal(sharded(stage, devices, dim), loss, 4 * devices, **options)
    names = {loss.__name__ for loss in LOOKED_UP} - {of_one_of_a_stack.__name__} | {"stack"}
    assert {path for path, read in plan.lookups.items() if not read.otherwise} == names
    assert {path for path, read in plan.lookups.items() if read.otherwise} == {"tied"}
    assert {loss.__name__ for loss in OTHERWISE} <= travel_whole
    part = {of_a_part.__name__} if dim == 0 else set()  # which is on some devices only
    assert "reduce" in options or travel_whole & names == part


def test_a_table_that_is_read_otherwise_beside_its_lookups_is_gathered_for_that():
    plan, _ = assert_equal(sharded(3, 3, 0), together(by_rows_and_columns), 12)
    assert [path for path, read in plan.lookups.items() if read.otherwise] == [by_rows_and_columns.__name__]


LOOP_CASES = [(loss, *case) for loss in LOOPS for case in ((3, 8, 1), (2, 3, 0))]


@pytest.mark.parametrize(("loss", "stage", "devices", "dim"), default_for(LOOP_CASES[::3], LOOP_CASES))
def test_lookups_in_loops_equal_plain_jax(loss, stage, devices, dim):
    _, travel_whole = assert_equal(sharded(stage, devices, dim), together(loss), 4 * devices)
    assert travel_whole == {"w"}


OPTIONS = [
    # Where the table is cut by default, axes, options, tolerance, whether it is looked up.
    (0, {"data": 4, "model": 2}, {"reduce_scatter": False}, 1e-6, True),
    (1, {"replica": 2, "data": 4}, {"replica_axis": "replica"}, 1e-6, True),  # gradients are reduced whole
    (0, {"node": 2, "data": 4}, {"node_axis": "node", "secondary_params": True}, 1e-6, False),
    (1, {"data": 4, "seq": 2}, {"context_axis": "seq"}, 1e-6, True),
    (1, {}, {"precision": "bf16"}, 3e-2, True),
    (0, {}, {"quantization": jzero.Quantization(gather="int8")}, 3e-2, None),  # rows are too short for blocks
    (1, {}, {"offload": jzero.Offload(params="host", optimizer="host")}, 1e-6, True),
    (None, {}, {"reshard_after_forward": False}, 1e-6, True),
    (None, {"node": 2, "data": 4}, {"node_axis": "node"}, 1e-6, False),
    (None, {}, {"quantization": jzero.Quantization(reduce="int8")}, 3e-2, True),  # gradients are reduced whole
]
OPTIONS = [(dim, *case) if dim == default else slow(dim, *case) for default, *case in OPTIONS for dim in (0, 1)]


@pytest.mark.parametrize(("dim", "axes", "options", "tolerance", "looked_up"), OPTIONS, ids=str)
def test_lookups_equal_plain_jax_under_each_option(dim, axes, options, tolerance, looked_up):
    loss = together(whole_rows, clipped, looked_up_twice, tied)
    plan, _ = assert_equal(sharded(3, 8, dim, axes=axes, **options), loss, 16, tolerance=tolerance)
    looked_up = dim == 0 if looked_up is None else looked_up
    assert set(plan.lookups) == ({"whole_rows", "clipped", "looked_up_twice", "tied"} if looked_up else set())


@pytest.mark.parametrize("dim", [0, 1])
def test_the_plan_the_trace_and_the_compiled_step_send_what_arithmetic_says(dim):
    """16 rows of 64 features on each of 8 devices, and all indices, in both passes; no table of 4,096 rows."""
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, rules={"table": jzero.LeafRule(dim=dim)})
    state = jzero.TrainState.create(params={"table": jnp.ones((4096, 64))}, tx=shared.sgd(0.1))
    state, ids = jzero.shard_train_state(state, config=config), jnp.arange(128, dtype=jnp.int32) * 31
    step = jzero.make_train_step(lambda p, ids: jnp.square(p["table"][ids]).mean())
    rows = 16 * 64 * (1 if dim else 8)  # in the parts of all devices, if each has only some rows
    want = 2 * 7 / 8 * 4 * (rows + 8 * 16)
    plan, report = step.plan(state, ids), jzero.analyze(step, state, ids)
    report.verify()
    assert plan.sent_bytes().within == want
    assert plan.gathered_bytes == report.estimated.planned_bytes == report.estimated.gathered_bytes
    scalars = 2 * 2 * 4 * 7 / 8  # loss and norm of the gradient are summed
    merged = 7 / 8 * 4 * 8 * 16  # compilers may gather the indices once for both passes
    sent = sum(x.sent_bytes for x in report.collectives) - scalars
    assert want - merged <= sent <= want
    assert report.memory.temporaries < 4096 * 64 * 4


@pytest.mark.parametrize(("times", "looked_up"), [(6, True), (8, False)])  # 8 devices, 16 rows each: 768 of 960
def test_a_table_travels_whole_if_all_its_lookups_would_send_more(times, looked_up):
    """One decision for all of them: each by itself sends less."""
    several = lambda p, b: sum(jnp.square(p["tied"][b["i"] + k]).mean() for k in range(times))
    looped = lambda p, b: lax.scan(lambda h, k: (h + p["tied"][b["i"] + k].sum(), None), 0.0, jnp.arange(times))[0]
    for loss in (several, looped):
        step = jzero.make_train_step(loss, check_rows=False)
        assert bool(step.plan(sharded(3, 8, 0), batch(32)).lookups) == looked_up


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((65536, 64), 1),
        ((520, 64), 1),
        ((512, 64), 0),  # 8 rows per feature: a layer of a perceptron
        ((64, 65536), 1),  # a head, by its largest dimension
        ((65536, 60), 0),  # 8 devices do not divide it
        ((65536, 56), 0),  # 7 features on each device
        ((65536, 8, 64), 0),
    ],
)
def test_what_looks_like_a_table_is_cut_along_its_features(shape, dim):
    params = {"t": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=shared.adamw(0.1)), params)
    plan = jzero.plan_train_state(state, config=shared.config(3), mesh=jzero.make_mesh())
    assert plan.leaves[0].param.cut.dim == dim
    assert {leaf.cut.dim for leaf in plan.opt_leaves if leaf.shape == shape} == {dim}


@pytest.mark.compilers
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("stage", "options"), [(3, {}), (2, {"accumulate_steps": 2})])
@pytest.mark.parametrize("topology", ["h200:8", "v5p:2x2x2"])
def test_lookups_lower_for_machines_that_are_not_there(topology, stage, options, dim):
    shapes = jax.eval_shape(lambda: jzero.TrainState.create(params=params(), tx=shared.sgd(RATE)))
    rules = {"(?!w$|stack).*": jzero.LeafRule(dim=dim), "stack": jzero.LeafRule(dim=dim + 1)}
    config = jzero.ZeroConfig(stage=stage, precision="bf16", persistence_threshold=0, rules=rules)
    mesh = jzero.make_mesh(devices=topology_devices(topology))
    state = jzero.abstract_train_state(shapes, config=config, mesh=mesh)
    loss = together(*LOOKED_UP, *OTHERWISE, *LOOPS)
    step = jzero.make_train_step(loss, check_rows=False, **options)
    names = {loss.__name__ for loss in (*LOOKED_UP, *LOOPS)} - {of_one_of_a_stack.__name__} | {"stack"}
    assert names <= step.plan(state, batch(64)).lookups.keys()
    step.lower(state, jax.eval_shape(lambda: batch(64)))
