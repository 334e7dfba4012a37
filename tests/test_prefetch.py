"""`prefetch_bytes`: the same numbers, gathered ahead, by no more than the bound."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.interpreters import partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero import _compat
from jzero.layout.platform import PLATFORMS
from tests import test_engine
from tests.test_engine import LOSSES, D, branches
from tests.tiers import default_for, singles, slow

AMPLE = 2**30


@pytest.fixture(autouse=True)
def short_loops_too(monkeypatch):
    """Loops of these tests have few turns, whose last gathers a large share in vain."""
    monkeypatch.setattr("jzero.engine.prefetch.MOST_IN_VAIN", 1.0)


def on(platform, monkeypatch):
    """Has steps traced as for such devices."""
    facts = {name: getattr(PLATFORMS[platform], name) for name in ("fence", "postpones", "prefetches")}
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(**facts))


OFTEN = {
    test_engine.plain,
    test_engine.scan_reversed_with_outputs,
    test_engine.scan_with_constant_weights,
    test_engine.scan_carrying_weights,
    test_engine.python_loop_over_the_stack,
    test_engine.nested_jit,
    test_engine.tied,
    test_engine.loop_after_layers_that_count,
    test_engine.loops_after_whole_numbers,
    branches,
}


@pytest.mark.parametrize("loss_fn", default_for(OFTEN, LOSSES), ids=lambda f: f.__name__)
def test_gradients_equal_plain_jax(loss_fn):
    batch = test_engine._batch()
    if loss_fn is branches:
        batch["x"] = np.abs(batch["x"])
    test_engine._assert_equal(test_engine._sharded(3, 8, prefetch_bytes=AMPLE), loss_fn, batch)


def scan_with_everything(p, batch):
    """A constant with a gradient, an integer carry, integers and keys among the rows, results of both kinds."""
    keys = jax.random.split(jax.random.key(3), 6)
    constant = jnp.cos(p["b"][None] * batch["x"])

    def layer(carry, row):
        h, count, total = carry
        w, i, key, scale = row
        h = jnp.tanh(h @ w["w"] + w["b"][None] * scale) + constant * h
        h = h * (jax.random.bernoulli(key, 0.9, (1, D)) * (i >= 0))
        return (h, count + i, total + h.mean()), (h.mean() * count, i * 2)

    rows = (p["stack"], jnp.arange(6), keys, jnp.linspace(0.5, 1.5, 6) * p["b"][:6])
    (h, count, total), (ys, numbers) = lax.scan(layer, (batch["x"], jnp.int32(1), jnp.float32(0)), rows)
    return test_engine._out(p, h, batch) + ys.sum() * 1e-3 + total * count + numbers.sum()


def scan_casting_its_rows(p, batch):
    def layer(h, w):
        return jnp.tanh(h @ w["w"].astype(jnp.bfloat16).astype(jnp.float32) + w["b"][None]), None

    return test_engine._out(p, lax.scan(layer, batch["x"], p["stack"])[0], batch)


def scan_of_remat_with_policy(p, batch):
    @jax.checkpoint
    def layer(h, w):
        inner = jax.checkpoint(lambda h: jnp.sin(h @ w["w"]), policy=jax.checkpoint_policies.dots_saveable)
        return jnp.tanh(inner(h) + w["b"][None]), None

    return test_engine._out(p, lax.scan(layer, batch["x"], p["stack"])[0], batch)


def scan_of_remat_with_keys(p, batch):
    """What the loop keeps by turn may be keys, made in the turn."""

    @jax.checkpoint
    def dropped(h, w, key):
        return jnp.tanh(h @ w["w"] + w["b"][None]) * jax.random.bernoulli(key, 0.9, (1, D))

    def layer(carry, row):
        h, i = carry
        w, key = row
        return (dropped(h, w, jax.random.fold_in(key, i)) * 2.0, i + 1), None

    rows = (p["stack"], jax.random.split(jax.random.key(3), 6))
    return test_engine._out(p, lax.scan(layer, (batch["x"], jnp.int32(0)), rows)[0][0], batch)


def scan_within_remat(p, batch):
    @jax.checkpoint
    def layers(h, stack):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w["w"] + w["b"][None]), None), h, stack)[0]

    return test_engine._out(p, layers(batch["x"], p["stack"]), batch)


def scan_of_a_call(p, batch):
    layer = lambda h, w: (test_engine._inner(w["w"], w["b"], h), None)
    return test_engine._out(p, lax.scan(layer, batch["x"], p["stack"], reverse=True)[0], batch)


@singles(
    lambda x: getattr(x, "__name__", None),
    limit=[AMPLE, D * D * 4, 0],
    loss_fn=[
        scan_with_everything,
        scan_of_remat_with_policy,
        scan_of_remat_with_keys,
        scan_within_remat,
        scan_of_a_call,
    ],
)
def test_scans_of_all_kinds_equal_plain_jax(loss_fn, limit):
    test_engine._assert_equal(test_engine._sharded(3, 8, prefetch_bytes=limit), loss_fn, test_engine._batch())


def scan_with_a_parameter_of_the_outside(p, batch):
    layer = lambda h, w: (jnp.tanh(h @ w["w"] + h @ p["w"]), None)
    return test_engine._out(p, lax.scan(layer, batch["x"], p["stack"])[0], batch)


def test_a_scan_that_uses_a_parameter_of_the_outside_gathers_ahead():
    state, batch = test_engine._sharded(3, 8, prefetch_bytes=AMPLE), test_engine._batch()
    test_engine._assert_equal(state, scan_with_a_parameter_of_the_outside, batch)
    loops = carried_shapes(jzero.value_and_grad(scan_with_a_parameter_of_the_outside), state, batch)
    assert [(D, D) in shapes for shapes in loops] == [True, True]


@pytest.mark.parametrize("stage", [1, 2])
def test_where_nothing_is_gathered_nothing_changes(stage):
    step = jzero.make_train_step(test_engine.scan)
    texts = [
        step.lower(test_engine._sharded(stage, 8, **options), test_engine._batch()).as_text()
        for options in ({}, {"prefetch_bytes": AMPLE})
    ]
    assert texts[0] == texts[1]


def two_products(p, batch):
    def layer(h, w):
        return jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"]), None

    return jnp.square(lax.scan(layer, batch, p)[0]).mean()


def stack_state(limit, layers=5, width=32, inner=64, precision="fp32"):
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(layers, width, inner)).astype(np.float32) / 6,
        "down": rng.normal(size=(layers, inner, width)).astype(np.float32) / 8,
    }
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, prefetch_bytes=limit, precision=precision)
    return jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)


def carried_shapes(fn, *args):
    """The shapes that loops carry from turn to turn, one list for each loop with a gather in it."""
    found = []

    def search(jaxpr):
        for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
            if eqn.primitive.name == "scan" and "zero_gather" in str(eqn.params["jaxpr"]):
                consts, carry = _compat.scan_groups(eqn)
                found.append([v.aval.shape for v in eqn.invars[consts : consts + carry]])
            for inner in _compat.contained_jaxprs(eqn):
                search(inner)

    search(jax.make_jaxpr(fn)(*args))
    return found


@pytest.mark.parametrize(
    ("limit", "precision", "expected"),
    [
        (None, "fp32", 0),
        (0, "fp32", 0),
        (2 * 32 * 64 * 4, "fp32", 2),
        (2 * 32 * 64 * 4 - 1, "fp32", 1),  # the one that is used first
        (2 * 32 * 64 * 2, "bf16", 2),
    ],
)
def test_loops_carry_the_next_layer_as_far_as_it_fits(limit, precision, expected):
    batch = jnp.ones((8, 32))
    loops = carried_shapes(jzero.value_and_grad(two_products), stack_state(limit, precision=precision), batch)
    assert len(loops) == 2, "one forward, one backward"
    for shapes, order in zip(loops, ([(32, 64), (64, 32)], [(64, 32), (32, 64)]), strict=True):
        whole = [shape for shape in shapes if shape in ((32, 64), (64, 32))]
        assert sorted(whole) == sorted(order[:expected])


@pytest.mark.parametrize(
    ("turns", "limit", "ahead"),
    [
        (32, AMPLE, ["up", "down"]),
        (31, AMPLE, ["up"]),  # a 32nd of what the loop gathers is less than a turn
        (16, AMPLE, ["up"]),
        (16, None, ["up"]),  # the first one, though it is more than a third of a turn
        (15, None, []),
    ],
)
def test_the_last_turn_gathers_little_in_vain(turns, limit, ahead, monkeypatch):
    monkeypatch.undo()
    on("gpu", monkeypatch)
    loops = carried_shapes(jzero.value_and_grad(two_products), stack_state(limit, layers=turns), jnp.ones((8, 32)))
    of = {(32, 64): "up", (64, 32): "down"}
    backwards = [{"up": "down", "down": "up"}[name] for name in ahead]  # what the backward pass uses first
    assert [{of[shape] for shape in shapes if shape in of} for shapes in loops] == [set(ahead), set(backwards)]


@pytest.mark.parametrize(
    ("turns", "limit", "message"),
    [
        # Half of a turn must be at most a 32nd of all turns.
        (15, AMPLE, r"15 turns may gather 7680 bytes ahead, .* smallest parameter has 8192. Scan 16 layers or more"),
        (5, AMPLE, r"5 turns may gather 2560 bytes ahead, .* Scan 16 layers or more"),
        (32, 8191, r"`prefetch_bytes=8191` has no effect .* has 8192 bytes. Give so many or more"),
    ],
)
def test_a_bound_that_has_no_effect_is_warned_about(turns, limit, message, monkeypatch):
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=message):
        loops = carried_shapes(jzero.value_and_grad(two_products), stack_state(limit, layers=turns), jnp.ones((8, 32)))
    assert len(loops) == 2
    assert not {(32, 64), (64, 32)} & {shape for shapes in loops for shape in shapes}


def scan_within_remat_with_policy(p, batch):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layers(h, stack):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w["w"] + w["b"][None]), None), h, stack)[0]

    return test_engine._out(p, layers(batch["x"], p["stack"]), batch)


@pytest.mark.parametrize("limit", [AMPLE, 0, pytest.param(None, marks=pytest.mark.smoke)])
def test_a_scan_inside_of_a_policy_gathers_ahead(limit, monkeypatch):
    """The policy sees whole parameters, and nothing of what loops carry for it."""
    on("gpu", monkeypatch)
    state, batch = test_engine._sharded(3, 8, prefetch_bytes=limit), test_engine._batch()
    test_engine._assert_equal(state, scan_within_remat_with_policy, batch)
    loops = carried_shapes(jzero.value_and_grad(scan_within_remat_with_policy), state, batch)
    assert [(D, D) in shapes for shapes in (loops[0], loops[-1])] == [limit != 0] * 2
    assert len(loops) >= 2


def scan_in_a_recomputed_loop(p, batch):
    def group(h, stack):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h @ p["outside"], stack)[0] @ p["back"], None

    return jnp.square(lax.scan(group, batch, p["groups"])[0]).mean()


@pytest.mark.parametrize("limit", [AMPLE, 0, None])
def test_a_scan_inside_of_a_recomputed_loop_gathers_ahead(limit, monkeypatch):
    on("gpu", monkeypatch)
    rng = np.random.default_rng(0)
    params = {"outside": rng.normal(size=(16, 24)) / 4, "back": rng.normal(size=(24, 16)) / 4}
    params["groups"] = rng.normal(size=(2, 32, 24, 24)) / 4
    params = jax.tree.map(np.float32, params)
    rules = {"groups": jzero.LeafRule(dim=2, scan_dim=0)}
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, rules=rules, prefetch_bytes=limit)
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)
    batch = rng.normal(size=(16, 16)).astype(np.float32)
    fn = jzero.value_and_grad(scan_in_a_recomputed_loop, remat="as_written")
    loss, grads = fn(state, batch)
    assert any((24, 24) in shapes for shapes in carried_shapes(fn, state, batch)) == (limit != 0)
    want_loss, want = jax.value_and_grad(scan_in_a_recomputed_loop)(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, want)


def three_products(p, batch):
    def layer(h, w):
        return jnp.tanh(jnp.tanh(jnp.tanh(h @ w["first"]) @ w["up"]) @ w["down"]), None

    return jnp.square(lax.scan(layer, batch, p)[0]).mean()


@pytest.mark.parametrize(
    ("platform", "options", "ahead"),
    [
        ("gpu", {}, {"first", "down"}),  # what the forward pass uses first, and what the backward pass does
        ("gpu", {"prefetch_bytes": 0}, set()),
        ("gpu", {"reshard_after_forward": False}, {"first"}),
        ("gpu", {"offload": jzero.Offload(params="host")}, set()),
        ("tpu", {}, set()),
        ("cpu", {}, set()),
    ],
)
def test_loops_on_gpus_gather_ahead_what_is_used_first(platform, options, ahead, monkeypatch):
    on(platform, monkeypatch)
    rng = np.random.default_rng(0)
    sizes = {"first": (32, 32), "up": (32, 64), "down": (64, 32)}
    params = {name: rng.normal(size=(5, *size)).astype(np.float32) / 8 for name, size in sizes.items()}
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, **options)
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)
    batch = rng.normal(size=(16, 32)).astype(np.float32)
    loops = carried_shapes(jzero.value_and_grad(three_products), state, batch)
    found = {name for name, size in sizes.items() if any(size in shapes for shapes in loops)}
    assert found == ahead
    if len(ahead) > 1:  # `first`; three in a turn; what the backward pass gathers before its first turn waits for that
        assert gathers_of(jzero.value_and_grad(three_products), state, batch)[4].needs
    loss, grads = jzero.value_and_grad(three_products)(state, batch)
    want_loss, want = jax.value_and_grad(three_products)(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    grads = jax.tree.map(np.asarray, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), grads, want)


def scans_of(jaxpr):
    """Yields the scans of a program."""
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in _compat.contained_jaxprs(eqn):
            yield from scans_of(inner)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_rows_that_stay_are_written_when_their_turn_is_done(platform, monkeypatch):
    """The compiler for GPUs would write them as early as it can, and gather them for that, before their use."""
    on(platform, monkeypatch)
    params = {"first": jnp.ones((5, 32, 32)), "up": jnp.ones((5, 32, 64)), "down": jnp.ones((5, 64, 32))}
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, reshard_after_forward=False)
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)
    forward = next(scans_of(jax.make_jaxpr(jzero.value_and_grad(three_products))(state, np.ones((16, 32), np.float32))))
    body, _ = _compat.open_jaxpr(forward.params["jaxpr"])
    shapes = {x.shape[1:] for x in params.values()}
    rows = [v for v in body.outvars[_compat.scan_groups(forward)[1] :] if v.aval.shape in shapes]
    last = max(i for i, eqn in enumerate(body.eqns) if eqn.primitive.name == "dot_general")
    waiting = {v for eqn in body.eqns[last:] if eqn.primitive.name == "zero_wait" for v in eqn.outvars}
    assert len(rows) == 3
    assert [v in waiting for v in rows] == [platform == "gpu"] * 3


def num_elements(state):
    return sum(leaf.param.size for leaf in jzero.plan_of(state).leaves)


@pytest.mark.parametrize("loss_fn", [two_products, test_engine.scan_of_remat], ids=lambda f: f.__name__)
def test_no_gather_more_than_of_the_last_turn_and_no_weights_kept(loss_fn):
    """What one layer ahead may cost: that layer. Kept for the backward pass, the whole stack would show."""
    state = {limit: stack_state(limit, layers=24, width=64, inner=256) for limit in (None, AMPLE)}
    batch = jnp.ones((8, 64))
    if loss_fn is not two_products:
        state = {limit: test_engine._sharded(3, 8, prefetch_bytes=limit) for limit in (None, AMPLE)}
        batch = test_engine._batch()
    step = jzero.make_train_step(loss_fn)
    reports = {limit: jzero.analyze(step, s, batch) for limit, s in state.items()}
    reports[AMPLE].verify()
    found = [reports[limit].communication_elements for limit in (None, AMPLE)]
    turn = sum(math.prod(x.param.shape[1:]) for x in jzero.plan_of(state[AMPLE]).leaves if x.scan_dim == 0)
    assert found[0] <= found[1] <= found[0] + 2 * turn or loss_fn is not two_products
    once = jzero.plan_of(state[AMPLE]).gathered_bytes / 4
    assert found[1] <= once + num_elements(state[AMPLE]) + 2 * turn + 64
    if loss_fn is two_products:
        layer = 2 * 64 * 256 * 4
        assert (
            reports[AMPLE].memory.peak <= reports[None].memory.peak + 3 * layer < reports[None].memory.peak + 24 * layer
        )


def test_a_gather_ahead_travels_in_the_dtype_that_the_layer_casts_to():
    lowered = jzero.make_train_step(scan_casting_its_rows).lower(
        test_engine._sharded(3, 8, prefetch_bytes=AMPLE), test_engine._batch()
    )
    gathers = [line for line in lowered.as_text().splitlines() if "stablehlo.all_gather" in line]
    whole = f"tensor<{D}x{D}x"
    of_stack = [line.rsplit("->", 1)[1] for line in gathers if whole in line.rsplit("->", 1)[1]]
    assert of_stack
    assert all("xbf16" in line for line in of_stack), of_stack


def test_evaluation_gathers_ahead_too():
    state, batch = stack_state(AMPLE), jnp.asarray(np.random.default_rng(1).normal(size=(16, 32)), jnp.float32)
    evaluate = jzero.make_eval_step(lambda params, batch: {"loss": two_products(params, batch)})
    want = two_products(jzero.gather_params(state), batch)
    np.testing.assert_allclose(evaluate(state, batch)["loss"], want, rtol=2e-6)
    (shapes,) = carried_shapes(evaluate, state, batch)
    assert (32, 64) in shapes


@pytest.mark.parametrize("precision", ["bf16", slow("fp16")])
def test_training_with_micro_batches_and_16_bits_is_the_same(precision):
    """Not a compiler's rounding apart: the same operations on the same values, in another order of gathers."""
    batch = jnp.asarray(np.random.default_rng(1).normal(size=(32, 32)), jnp.float32)
    losses = []
    for limit in (None, AMPLE, 0):
        state = stack_state(limit, precision=precision)
        step = jzero.make_train_step(two_products, accumulate_steps=2, clip_norm=0.5)
        run = []
        for _ in range(4):
            state, metrics = step(state, batch)
            run.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        losses.append(run)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)


@pytest.mark.parametrize("axes", [{"data": 4, "model": 2}, {"replica": 2, "data": 4}], ids="-".join)
def test_beside_other_axes(axes):
    mesh, batch = jzero.make_mesh(**axes), jnp.asarray(np.random.default_rng(1).normal(size=(16, 32)), jnp.float32)
    params = jzero.gather_params(stack_state(None))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(two_products)(params, batch))
    specs = {"up": PartitionSpec(None, None, "model"), "down": PartitionSpec(None, "model", None)}
    if "model" in axes:
        params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
    replica = "replica" if "replica" in axes else None
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, prefetch_bytes=AMPLE, replica_axis=replica)
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state, _ = jzero.make_train_step(two_products)(jzero.shard_train_state(plain, config=config, mesh=mesh), batch)
    for name, x in jzero.gather_params(state).items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=1e-6)


# Outside of loops: what each gather waits for, read from the program.


@dataclasses.dataclass
class Gather:
    """One gather of a program: what it brings, what it waits for, and the product that uses it first."""

    size: int
    needs: frozenset[int]
    use: int | None = None


def gathers_of(fn, *args):
    """All gathers of parameters, in the order of the program; calls are looked into."""
    found: list[Gather] = []
    products = iter(range(10**6))

    none = (frozenset(), frozenset())

    def walk(jaxpr, inputs):
        """`inputs`: of each variable, the products that it is made of and the gathers not used yet."""
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
        env = dict(zip(jaxpr.constvars, [none] * len(consts), strict=True))
        env |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atoms):
            return [none if _compat.is_literal(v) else env[v] for v in atoms]

        for eqn in jaxpr.eqns:
            given = read(eqn.invars)
            inner = [x for x in _compat.contained_jaxprs(eqn) if len(x.invars) == len(eqn.invars)]
            if len(inner) == 1:
                outputs = walk(inner[0], given)
            else:
                needs, holds = (frozenset().union(*(x[i] for x in given)) for i in (0, 1))
                if eqn.primitive.name == "zero_gather":
                    aval = eqn.outvars[0].aval
                    found.append(Gather(math.prod(aval.shape) * aval.dtype.itemsize, needs))
                    holds = holds | {len(found) - 1}
                elif eqn.primitive.name == "dot_general":
                    number = next(products)
                    for i in holds:
                        found[i].use = number if found[i].use is None else found[i].use
                    needs, holds = needs | {number}, frozenset()
                if eqn.primitive.name in (
                    "optimization_barrier",
                    "zero_wait",
                ):  # waits for all, but is made of its own
                    outputs = [(needs, own) for _, own in given]
                else:
                    outputs = [(needs, holds)] * len(eqn.outvars)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return read(jaxpr.outvars)

    jaxpr, _ = _compat.open_jaxpr(jax.make_jaxpr(fn)(*args))
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)  # as the compiler will see it
    walk(jaxpr, [none] * len(jaxpr.invars))
    return found


def most_ahead(gathers):
    """The most bytes that may be gathered and not used yet when a gather is done, by what it waits for."""
    return max(
        sum(g.size for g in gathers[: i + 1] if g.use is None or g.use not in gather.needs)
        for i, gather in enumerate(gathers)
    )


def chain(p, batch, wrap=lambda layer: layer):
    h, layer = batch, wrap(lambda w, h: jnp.tanh(h @ w))
    for name in sorted(p):
        h = layer(p[name], h)
    return jnp.square(h).mean()


def recomputed_chain(p, batch):
    return chain(p, batch, wrap=jax.checkpoint)


def chain_state(limit, layers=8):
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(D, D)).astype(np.float32) / 5 for i in range(layers)}
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, prefetch_bytes=limit)
    return jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=config)


@pytest.mark.parametrize(
    ("limit", "forward", "backward"), [(None, 8, 1), (0, 1, 1), slow(1, 1, 1), (2, 2, 2), slow(3, 3, 3)]
)
@pytest.mark.parametrize(
    ("loss_fn", "remat"),
    [(chain, "as_written"), (chain, None), slow(recomputed_chain, None)],
    ids=["plain", "cheap recomputed", "all recomputed"],
)
def test_gathers_outside_of_loops_wait_for_earlier_uses(limit, forward, backward, loss_fn, remat):
    """In units of one matrix: without a bound all of the forward pass may be whole at once, and nothing is ahead in
    the backward pass; with one, both go ahead as far as it says. Recomputed layers are their own blocks.
    """
    unit = D * D * 4
    state = chain_state(None if limit is None else limit * unit)
    gathers = gathers_of(jzero.make_train_step(loss_fn, remat=remat), state, jnp.ones((8, D)))
    first = int(loss_fn is recomputed_chain)  # whose input needs no gradient, but its result is wanted again
    assert len(gathers) == 15 + first, "8 forward; backward all but the first"
    assert most_ahead(gathers[:8]) == forward * unit
    assert most_ahead(gathers[8:]) == backward * unit
    assert all(7 in g.needs for g in gathers[8:]), "nothing before the forward pass is done: product 7 is its last"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_bytes": -1}, "prefetch_bytes.*>= 0: got -1"),
        ({"prefetch_bytes": 1.5}, "prefetch_bytes.*integer"),
        ({"prefetch_bytes": True}, "prefetch_bytes.*integer"),
        ({"prefetch_bytes": 8, "offload": jzero.Offload(params="host")}, "params='host'"),
    ],
)
def test_what_contradicts_a_bound_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jzero.ZeroConfig(stage=3, **options)
