"""Parameters and gradients that travel as integers: against NumPy's rounding, and training on rounded parameters."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.core.layout.blocks import pack, packed_size, unpack
from jzero.core.layout.cut import Cut
from jzero.core.layout.route import bytes_on_port
from tests import shared, test_two_hops
from tests.quantized import BATCH, FLAT, SECONDARY, STEPS, TWO, TWO_HOPS, WIDTH, config_of, numpy_rounded
from tests.test_two_hops import loss_fn
from tests.tiers import slow

TX = optax.sgd(0.05, momentum=0.9)


make_params = functools.partial(test_two_hops.make_params, np.float32, WIDTH, tied=95, scale=8)


def sharded(config, sizes, tx=None):
    plain = jzero.TrainState.create(params=make_params(), tx=tx or TX)
    mesh = jzero.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    return jzero.shard_train_state(plain, config=config, mesh=mesh, trainable="(?!frozen).*")


def train(config, sizes, **options):
    step = jzero.make_train_step(loss_fn, **options)
    state, losses = shared.train(step, sharded(config, sizes), [BATCH] * STEPS)
    return losses, jzero.gather_params(state)


def rounded_params(params, dims):
    """The parameters as all uses see them: those that travel in blocks are rounded, as the definition says."""

    def rounded(key, x):
        dim, num_stacked = dims.get(jax.tree_util.keystr(key, simple=True, separator="/"), (None, 0))
        return x if dim is None else numpy_rounded(x, dim, num_stacked=num_stacked)

    return jax.tree_util.tree_map_with_path(rounded, params)


gradient_of_loss = jax.jit(jax.value_and_grad(loss_fn))
"""One program for all references: it does not matter to them how the loss goes through its layers."""


@jax.jit
def plain_update(grads, opt_state, params):
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@functools.cache
def trained_on_rounded_parameters(cuts):
    """Plain optax: the gradient is taken at the rounded parameters, and applied to the exact ones.

    Returns the losses and the parameters; `cuts` are the path, dimension and stack of what is rounded.
    """
    dims, plain, want = {path: where for path, *where in cuts}, make_params(), []
    opt_state = TX.init(plain)
    for _ in range(STEPS):
        value, grads = gradient_of_loss(rounded_params(plain, dims), BATCH)
        grads["frozen"] = np.zeros_like(grads["frozen"])
        want.append(float(value))
        plain, opt_state = plain_update(grads, opt_state, plain)
        plain = jax.tree.map(np.asarray, plain)
    return want, plain


def cuts_of(plan):
    cuts = {leaf.path: leaf.param.cut for leaf in plan.leaves}
    return tuple((name, cuts[name].dim, cuts[name].num_stacked) for name in ("stack/w", "tied", "frozen"))


@pytest.mark.parametrize(
    ("sizes", "options", "fields"),
    [
        slow({"replica": 2, "data": 4}, {"remat": False}, {"replica_axis": "replica", "reshard_after_forward": False}),
        (TWO, {"accumulate_steps": 2}, {**SECONDARY, "prefetch_bytes": 10**6}),
        slow(TWO, {}, TWO_HOPS),
    ],
)
@pytest.mark.filterwarnings("ignore:`prefetch_bytes=")
def test_gathers_train_like_plain_optax_on_rounded_parameters(sizes, options, fields):
    """Kept for the backward pass, for the step, or gathered again, they are the same integers."""
    config = config_of(gather="int8", **fields)
    plan = jzero.plan_of(sharded(config, sizes))
    assert {x.path for x in plan.unquantized} == {"flat", "stack/b"}
    losses, params = train(config, sizes, **options)
    want, plain = trained_on_rounded_parameters(cuts_of(plan))
    np.testing.assert_allclose(losses[0], want[0], rtol=1e-6)
    # Sums in another order move a master by a bit, and now and then an element across a tie: a step of 1/127.
    np.testing.assert_allclose(losses, want, atol=2e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), params, plain)


@pytest.mark.parametrize(
    ("kind", "stage", "levels", "late"),
    [
        ("int8", 3, (4, 1), False),
        ("int4", 2, (3, 2), True),
        slow("int8", 1, (2, 2), False),
    ],
)
def test_reductions_sum_what_each_device_or_node_rounds(kind, stage, levels, late):
    """Against gradients of each device's rows, by plain jax, rounded by NumPy and summed."""
    data, node = levels
    num_shards = data * node
    fields = {"node_axis": "node", "secondary_grads": late} if node > 1 else {}
    sizes = {"node": node, "data": data} if node > 1 else {"data": data}
    state = sharded(config_of(stage, reduce=kind, **fields), sizes, tx=optax.sgd(1.0))
    plan, steps = jzero.plan_of(state), 2 if late else 1
    state, _ = jzero.make_train_step(loss_fn, accumulate_steps=steps)(state, BATCH)
    grads = jax.tree.map(lambda a, b: a - b, make_params(), jax.device_get(jzero.gather_params(state)))
    rows = BATCH.reshape(num_shards, steps, -1, WIDTH).swapaxes(0, 1)  # a device splits its own rows
    params = make_params()
    local = [[gradient_of_loss(params, part)[1] for part in micro] for micro in rows]
    for leaf in plan.leaves:
        if not leaf.trained or leaf.grad.cut is None:
            continue
        pick = lambda tree, path=leaf.path: np.asarray(functools.reduce(lambda t, k: t[k], path.split("/"), tree))
        exact = leaf.path in {x.path for x in plan.unquantized}
        cut = leaf.grad.cut
        round_ = (
            (lambda x: x)
            if exact
            else functools.partial(numpy_rounded, dim=cut.dim, kind=kind, num_stacked=cut.num_stacked)
        )
        # Devices are in the order of the batch: (node, data). Sums within a node are exact.
        of_nodes = [[sum(map(pick, micro[i * data : (i + 1) * data])) for i in range(node)] for micro in local]
        if node == 1:
            want = sum(round_(pick(x)) for micro in local for x in micro)
        elif late:
            want = sum(round_(sum(micro[i] for micro in of_nodes)) for i in range(node))
        else:
            want = sum(round_(x) for micro in of_nodes for x in micro)
        want = want / (num_shards * steps)
        off = np.abs(pick(grads) - want)
        assert np.quantile(off, 0.98) < 1e-7, leaf.path
        assert off.max() <= np.abs(want).max(), "an element on a tie goes to the next integer"


@pytest.mark.slow
def test_tensor_parallel_parameters_are_rounded_part_by_part():
    """Each device packs its own part: no hop sends or joins another's."""
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(64, 1024)) / 8, "down": rng.normal(size=(1024, 64)) / 32}
    params = {name: x.astype(np.float32) for name, x in params.items()}
    loss = lambda p, x: jnp.square(jnp.tanh(x @ p["up"]) @ p["down"]).mean()
    batch = rng.normal(size=(32, 64)).astype(np.float32)
    mesh = jzero.make_mesh(node=2, data=2, model=2)
    specs = {"up": P(None, "model"), "down": P("model", None)}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
    # Cut so that a device has whole blocks: 512 of `up`'s columns, 32 of `down`'s.
    dims = {"up": 0, "down": 1}
    rules = {name: jzero.LeafRule(dim=dim) for name, dim in dims.items()}
    config = config_of(gather="int8", reduce="int8", rules=rules, secondary_grads=True, **SECONDARY)
    plain = jzero.TrainState.create(params=placed, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(plain, config=config, mesh=mesh)
    assert not jzero.plan_of(state).unquantized
    step = jzero.make_train_step(loss)
    report = jzero.analyze(step, state, batch)
    report.verify()
    assert {r.dtype for r in report.collectives if r.kind == "all-gather"} == {"s8"}
    state, metrics = step(state, batch)
    rounded = {name: numpy_rounded(x, dims[name]) for name, x in params.items()}
    whole, grads = jax.jit(jax.value_and_grad(loss))(rounded, batch)
    assert float(metrics["loss"]) == pytest.approx(float(whole), rel=1e-6)
    # Gradients are rounded, too, and each node's by itself.
    for name, x in jzero.gather_params(state).items():
        np.testing.assert_allclose(x, params[name] - 0.1 * np.asarray(grads[name]), atol=1e-4)


def stack_alone(config, sizes):
    """Returns a state of the stack, and its loss."""
    plain = jzero.TrainState.create(params={"w": make_params()["stack"]["w"]}, tx=TX)
    loss = lambda params, batch: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["w"])[0].mean()
    return jzero.shard_train_state(plain, config=config, mesh=jzero.make_mesh(**sizes)), loss


def test_wider_gathers_are_a_violation(monkeypatch):
    monkeypatch.setattr(Cut, "pack_shard", lambda packed, shard: shard)
    monkeypatch.setattr(Cut, "in_blocks", lambda cut, *_: cut)
    state, loss = stack_alone(config_of(gather="int8"), FLAT)
    with pytest.raises(jzero.PlanViolation, match="wider than the int8 of the plan"):
        jzero.analyze(jzero.make_train_step(loss), state, BATCH).verify()


def test_crossing_nodes_at_each_use_is_a_violation(monkeypatch):
    """The plan gathers between nodes once; this program does so at each use, in the loop."""
    monkeypatch.setattr(
        "jzero.core.engine.gradients._LocalStep.gather_plan",
        lambda step, leaf: step.plan.traffic.gather_plan(leaf)._replace(is_secondary=False),
    )
    state, loss = stack_alone(config_of(**SECONDARY), TWO)
    with pytest.raises(jzero.PlanViolation, match="3 times per step, once in"):
        jzero.analyze(jzero.make_train_step(loss), state, BATCH).verify()


@pytest.mark.parametrize("kinds", [{"gather": "int8"}, {"reduce": "int8"}, {"gather": "int8", "reduce": "int8"}])
def test_the_plan_names_what_stays_exact(kinds):
    config = config_of(**kinds, rules={"tied": jzero.LeafRule(quantize=False)})
    plan = jzero.plan_of(sharded(config, FLAT))
    assert {x.path: x.reason for x in plan.unquantized} == {
        "flat": "5 elements beside the cut, fewer than 32",
        "stack/b": "1 elements beside the cut, fewer than 32",
        "tied": "by rule",
    }
    assert "as they are, not int8" in str(plan)
    assert not jzero.plan_of(sharded(config_of(), FLAT)).unquantized


@pytest.mark.parametrize(
    ("kind", "num_devices", "num_nodes", "want"),
    [
        ("all-gather", 16, 2, 15 / 16 * 2 / 16),  # a ring leaves each node once, over eight ports
        ("all-gather", 2, 2, 1 / 2),
        ("all-to-all", 16, 2, 1 / 2),  # half of each device's parts are for the other node
        ("all-to-all", 16, 4, 3 / 4),
        ("all-reduce", 8, 1, 0.0),
    ],
)
def test_bytes_on_one_port_by_hand(kind, num_devices, num_nodes, want):
    traced_collectives = (num_devices - 1) / num_devices
    assert bytes_on_port(kind, traced_collectives, num_devices, num_nodes) == pytest.approx(want)


LARGEST_ERROR = {"int8": 1 / 254, "int4": 1 / 14, "nf4": 0.1520}  # nf4: half of the widest gap, (0.6962 - 1) / 2


few = settings(max_examples=2)  # each new shape is compiled


@st.composite
def arrays(draw):
    shape = draw(st.lists(st.integers(1, 23), min_size=2, max_size=4))
    num_stacked = draw(st.integers(0, len(shape) - 1))
    dim = draw(st.integers(num_stacked, len(shape) - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-12, 12)
    return (x * rng.choice([0, 1, 1e-6], size=shape)).astype(np.float32), dim, num_stacked


packed_by = jax.jit(pack, static_argnums=(1, 2, 3))
unpacked_by = jax.jit(unpack, static_argnums=(1, 2))


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_blocks_are_those_of_the_definition(kind):
    x = np.clip(np.random.default_rng(0).normal(size=(2, 3, 137)) / 2, -1, 1)
    most = [[1, np.finfo(np.float32).max, ml_dtypes.finfo("bfloat16").max], [8.6e37, 65504, 2e-29]]
    assert_packed_by_definition(((x * np.array(most, float)[..., None]).astype(np.float32), 1, 1), kind)


@few
@given(arrays(), st.sampled_from(["int8", "int4", "nf4"]))
def test_blocks_of_any_shape_are_those_of_the_definition(drawn, kind):
    assert_packed_by_definition(drawn, kind)


def assert_packed_by_definition(drawn, kind):
    """Within one bit: XLA's reciprocal may differ from NumPy's by as much."""
    x, dim, num_stacked = drawn
    packed = packed_by(x, dim, num_stacked, kind)
    size = int(np.prod(x.shape[num_stacked:])) // x.shape[dim]
    assert packed.dtype == jnp.int8
    assert packed.shape == (*x.shape[:num_stacked], x.shape[dim], packed_size(size, kind))
    rest = np.moveaxis(x, dim, num_stacked).shape[num_stacked + 1 :]
    found = unpacked_by(packed, size, kind)
    found = np.moveaxis(np.asarray(found).reshape(*found.shape[:-1], *rest), num_stacked, dim)
    want = numpy_rounded(x, dim, kind, num_stacked)
    steps = np.abs(found - want) > 1e-6 * np.abs(want)
    assert steps.mean() < 0.01, "but for ties that one bit decides"
    axes = tuple(i for i in range(num_stacked, x.ndim) if i != dim)  # of a row, which has blocks of its own
    most = np.abs(x).max(axes, keepdims=True).astype(float)
    assert np.all(np.abs(found - x) <= most * LARGEST_ERROR[kind] * 1.001 + 1e-30)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_not_finite_fills_its_block_alone(kind, bad):
    x = np.ones((3, 700), np.float32)  # blocks of 234
    x[1, 300] = bad
    y = np.asarray(unpacked_by(packed_by(x, 0, 0, kind), 700, kind))
    assert np.isnan(y[1, 234:468]).all()
    assert np.isfinite(np.delete(y, np.s_[234:468], axis=1)).all()
    assert np.isfinite(y[0]).all()


def test_denormals_round_to_zero():
    x = np.array([[1e-38, -1e-40, 3e-31, 0.0]], np.float32)
    np.testing.assert_array_equal(unpacked_by(packed_by(x, 0, 0, "int8"), 4, "int8"), np.zeros((1, 4)))


@few
@given(arrays(), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
def test_rounding_again_changes_no_bit(drawn, dtype):
    """So frozen parameters move in natural shape, to other layouts and checkpoints, and are the same integers there."""
    x, dim, num_stacked = drawn
    x = jnp.asarray(np.clip(x, -6e4, 6e4), dtype)  # what fp16 can hold
    shape = x.shape
    cut = Cut(dim, shape, 1, num_stacked=num_stacked).in_blocks("int8", dtype, {})
    store, load = jax.jit(cut.to_stored), jax.jit(cut.to_natural)
    once = store(x)
    values = load(once)
    if dtype == jnp.float16:  # its smallest numbers have too few bits for that
        values = load(store(values))
    np.testing.assert_array_equal(load(store(values)), values)
    if dtype != jnp.float16:
        np.testing.assert_array_equal(store(values), once)
