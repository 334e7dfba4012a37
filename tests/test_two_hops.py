"""A ZeRO axis of two levels, nodes and their devices: against the flat one and against plain optax."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.analysis.replanning import relaid
from jzero.core.layout.mesh import num_along
from jzero.core.layout.platform import PLATFORMS
from jzero.estimate.traced_collectives import traced_collectives
from tests import light_decoder, models, shared
from tests.tiers import slow

WIDTH, LAYERS, STEPS = 21, 3, 8
BATCH = np.random.default_rng(1).normal(size=(96, WIDTH))


def make_params(dtype=np.float64, width=WIDTH, tied=35, scale=5):
    """Sizes that no number of devices divides, a stack, a tied matrix and a frozen one."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / scale).astype(dtype)
    return {
        "stack": {"w": draw(LAYERS, width, width), "b": draw(LAYERS, width)},
        "tied": draw(width, tied),
        "frozen": draw(tied, tied),
        "flat": draw(3, 5, 7),
        "tiny": draw(2),
    }


def loss_fn(params, batch):
    layer = lambda h, p: (h + jnp.tanh(h @ p["w"] + p["b"][None]), None)
    hidden = lax.scan(layer, batch, params["stack"])[0] @ params["tied"]
    out = jnp.tanh(hidden @ params["frozen"]) @ params["tied"].T
    return jnp.square(out).mean() + jnp.square(params["flat"]).mean() + params["tiny"].sum()


def make_few(dtype=np.float64):
    """A stack, a frozen matrix, and one used twice."""
    params = make_params(dtype)
    return {"stack": {"w": params["stack"]["w"]}, "tied": params["tied"], "frozen": params["frozen"]}


def few_loss(params, batch):
    hidden = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch, params["stack"]["w"])[0]
    return jnp.square(jnp.tanh(hidden @ params["tied"] @ params["frozen"]) @ params["tied"].T).mean()


def unrolled_few_loss(params, batch):
    hidden = batch
    for i in range(LAYERS):
        hidden = hidden + jnp.tanh(hidden @ params["stack"]["w"][i])
    return jnp.square(jnp.tanh(hidden @ params["tied"] @ params["frozen"]) @ params["tied"].T).mean()


def sharded(params, config, *, place=jzero.shard_train_state, **sizes):
    plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-2))
    num_devices = int(np.prod(list(sizes.values())))
    mesh = jzero.make_mesh(devices=jax.devices()[:num_devices], **sizes)
    return place(plain, config=config, mesh=mesh, trainable="(?!frozen).*")


abstract = functools.partial(sharded, place=jzero.abstract_train_state)


def config_of(stage=3, **options):
    return jzero.ZeroConfig(stage=stage, persistence_threshold=0, **options)


def train(loss, config, sizes, make=make_few, **options):
    step = jzero.make_train_step(loss, **options)
    state, losses = shared.train(step, sharded(make(), config, **sizes), [BATCH] * STEPS)
    return losses, jzero.gather_params(state)


@functools.cache
def plain_params(make):
    """Returns parameters after the same training on one device, with plain optax; loops and their turns are equal."""
    loss = loss_fn if make is make_params else few_loss
    frozen = lambda params, batch: loss({**params, "frozen": lax.stop_gradient(params["frozen"])}, batch)
    return shared.by_optax(frozen, make(), optax.adam(1e-2), [BATCH] * STEPS).params


SIZES = [{"node": 2, "data": 4}, {"node": 3, "data": 2}, {"replica": 2, "node": 2, "data": 2}]
TWICE = {"accumulate_steps": 2}
KEPT, AHEAD = {"reshard_after_forward": False}, {"prefetch_bytes": 10**6}
SECONDARY, LATE = {"secondary_params": True}, {"secondary_grads": True}


@pytest.mark.parametrize(
    ("loss", "stage", "sizes", "options", "fields"),
    [
        (loss_fn, 3, SIZES[0], {}, {}),
        (few_loss, 3, SIZES[1], TWICE, AHEAD | SECONDARY | LATE),
        (unrolled_few_loss, 3, SIZES[2], {"remat": False}, KEPT | SECONDARY),
        (few_loss, 2, SIZES[1], {"accumulate_steps": 4}, LATE),
        slow(loss_fn, 2, SIZES[2], TWICE, {}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:`prefetch_bytes=")
def test_two_hops_train_like_one_device(loss, stage, sizes, options, fields):
    """In float64: sums in another order differ by rounding alone."""
    make = make_params if loss is loss_fn else make_few
    replica = {"replica_axis": "replica"} if "replica" in sizes else {}
    with jax.enable_x64(True):
        _, params = train(loss, config_of(stage, node_axis="node", **replica, **fields), sizes, make, **options)
        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        jax.tree.map(same, params, plain_params(make))


@pytest.mark.parametrize(("stage", "sizes"), [(2, SIZES[0]), slow(1, {"replica": 2, "data": 4})])
def test_new_parameters_are_gathered_whole_as_for_gpus(monkeypatch, stage, sizes):
    """Where compilers transpose gathers, stages 1 and 2 gather what is padded, flattened, stacked or frozen so."""
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(transposes_gathers=True))
    levels = {f"{name}_axis": name for name in sizes if name != "data"}
    with jax.enable_x64(True):
        _, params = train(loss_fn, config_of(stage, **levels), sizes, make_params)
        same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        jax.tree.map(same, params, plain_params(make_params))


def test_only_the_parts_of_devices_cross_nodes():
    """Between nodes a gather moves 1/D of what one ring over all devices does; each hop is a collective of its own."""
    plain, tokens = light_decoder.make_state(optax.sgd(1e-3), layers=2, width=41, vocab=253), models.tokens(16)
    config, mesh = config_of(1, node_axis="node", precision="bf16"), jzero.make_mesh(node=2, data=4)
    step, state = (
        jzero.make_train_step(light_decoder.loss_fn),
        jzero.abstract_train_state(plain, config=config, mesh=mesh),
    )
    report = jzero.analyze(step, state, tokens)
    report.verify()
    assert all(
        row.axis in ("node", "data") for row in report.collectives if row.kind != "all-reduce" or row.elements > 100
    )
    for x in traced_collectives(step.trace(state, tokens).jaxpr):
        between, within = x.collectives if x.gathers else x.collectives[::-1]
        assert (between.axes, within.axes) == (("node",), ("data",))
        assert (between.num_devices, within.num_devices) == (2, 4)
        assert within.num_elements == 4 * between.num_elements


@pytest.mark.parametrize("steps", [1, 2])
def test_bytes_between_nodes_do_not_grow_with_micro_batches(steps):
    """Of the parameters P, between nodes: once P/D gathered, and once reduced, in bf16."""
    params = {"w": np.ones((4, 32, 32), np.float32), "out": np.ones((32, 64), np.float32)}
    config = config_of(node_axis="node", secondary_params=True, secondary_grads=True, precision="bf16")
    plain = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    state = jzero.shard_train_state(plain, config=config, mesh=jzero.make_mesh(node=2, data=4))
    loss = lambda p, x: jnp.square(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0] @ p["out"]).mean()
    step, batch = jzero.make_train_step(loss, accumulate_steps=steps), np.ones((48, 32), np.float32)
    moved = collections.Counter()
    for x in traced_collectives(step.trace(state, batch).jaxpr):
        for hop in x.collectives:
            moved[hop.axes[0], x.gathers] += x.times * hop.num_bytes
    size = sum(x.size for x in params.values())
    once = 2 * size // 4
    assert moved["node", True] == once
    assert moved["node", False] == once
    assert moved["data", False] == steps * 2 * size
    assert moved["data", True] >= steps * 2 * size
    if steps == 2:
        jzero.analyze(step, state, batch).verify()
    plan = jzero.plan_of(state)
    assert plan.traffic.bytes_gathered_in(micro_batches=steps) == once + steps * 2 * 2 * size


@pytest.mark.parametrize(
    "sizes", [{"replica": 2, "data": 4}, {"node": 2, "data": 4}, {"replica": 2, "node": 2, "data": 2}]
)
def test_another_machine_keeps_the_order_of_axes(sizes):
    """It says which devices are neighbours; ZeRO's axis takes the devices that are left."""
    fields = {f"{name}_axis": name for name in sizes if name != "data"}
    state = sharded({"w": np.ones((64, 64), np.float32)}, config_of(**fields), **sizes)
    mesh = jzero.plan_of(relaid(state, devices=32)).mesh
    others = {name: size for name, size in sizes.items() if name != "data"}
    assert dict(mesh.shape) == {**others, "data": 32 // int(np.prod(list(others.values())))}
    assert list(mesh.shape) == list(sizes)


def test_a_mesh_must_say_how_many_nodes_there_are():
    plain = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"make_mesh\(node=..., data=...\)"):
        jzero.shard_train_state(plain, config=config_of(node_axis="node"))
    with pytest.raises(ValueError, match="`node_axis` must name an axis"):
        jzero.shard_train_state(plain, config=config_of(node_axis="node"), mesh=jzero.make_mesh())


def test_late_hops_change_no_bit(monkeypatch):
    """A turn finishes the reductions of the one before; the sums are the same."""
    rounded = jzero.Quantization(gather="int8", reduce="int4")
    config = config_of(node_axis="node", quantization=rounded, secondary_params=True)
    at_once = train(few_loss, config, SIZES[0], **TWICE)
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(pipelines_reductions=True))
    step, state = jzero.make_train_step(few_loss, **TWICE), abstract(make_few(), config, **SIZES[0])
    late = [x for x in traced_collectives(step.trace(state, BATCH).jaxpr) if not x.gathers and x.path == "stack/w"]
    plan = jzero.plan_of(state)
    (between,) = (plan.traffic.route_of_gradient(leaf).levels[1] for leaf in plan.leaves if leaf.path == "stack/w")
    assert max(x.times for x in late if x.eqn.params["route"] == between) == 2 * LAYERS
    losses, params = train(few_loss, config, SIZES[0], **TWICE)
    assert losses == at_once[0]
    jax.tree.map(np.testing.assert_array_equal, params, at_once[1])


def test_late_hops_divide_gradients_once(monkeypatch):
    """With a loss scale, gradients are divided before they are summed: within a node, and not again between nodes."""
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(pipelines_reductions=True))
    params = {"stack": {"w": make_params(np.float32)["stack"]["w"]}, "frozen": np.eye(2, dtype=np.float32)}
    precision = jzero.Precision(compute_dtype="float16", loss_scale=256.0)
    state = sharded(params, config_of(node_axis="node", precision=precision), node=2, data=3)

    def loss(params, batch):
        stack = params["stack"]["w"]
        hidden, _ = lax.scan(lambda h, w: (h + jnp.sin(h @ w), None), batch.astype(stack.dtype), stack)
        return jnp.square(hidden).astype(jnp.float32).mean()

    _, grads = jax.jit(jzero.value_and_grad(loss))(state, BATCH[:6])
    want = jax.jit(jax.grad(loss))(params, BATCH[:6])
    np.testing.assert_allclose(grads["stack"]["w"], want["stack"]["w"], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_plan_tells_bytes_by_level(steps):
    """By hand: of a parameter of Ψ padded elements, half of 1/4 crosses nodes per hop, and 3/4 stay within."""
    rules = {"stack/b|flat|tiny|frozen": jzero.LeafRule(replicated=True)}
    plain = config_of(node_axis="node", precision="bf16", rules=rules)
    both = config_of(node_axis="node", precision="bf16", rules=rules, secondary_params=True, secondary_grads=True)
    sizes = {"node": 2, "data": 4}
    plans = [jzero.plan_of(abstract(make_params(np.float32), config, **sizes)) for config in (plain, both)]
    size = sum(int(np.prod(leaf.grad.stored_shape)) for leaf in plans[0].leaves if leaf.grad.cut)  # 2 bytes each
    within = 2 * size * 3 / 4
    crossing = 2 * size / 4 / 2
    assert plans[0].sent_bytes(micro_batches=steps) == (3 * steps * within, 3 * steps * crossing)
    late = 1 if steps > 1 else steps
    assert plans[1].sent_bytes(micro_batches=steps) == (3 * steps * within, (1 + late) * crossing)
    assert plans[0].traffic.secondary_bytes == 0
    assert plans[1].traffic.secondary_bytes == 2 * size / 4
    assert "between them" in str(plans[1])
    assert "secondary parameters" in str(plans[1])
    one = jzero.plan_of(abstract(make_params(np.float32), both, node=1, data=4))
    assert "one node along 'node': there is nothing between nodes" in str(one)
    assert one.sent_bytes().between == one.traffic.secondary_bytes == 0
    alone = jzero.plan_of(abstract(make_params(np.float32), both, node=4, data=1))
    size = sum(int(np.prod(leaf.grad.stored_shape)) for leaf in alone.leaves if leaf.grad.cut)
    gathered = alone.traffic.bytes_gathered_in(micro_batches=steps)
    assert gathered == alone.traffic.secondary_bytes == 2 * size, "one device per node gathers between nodes alone"


@pytest.mark.parametrize(("names", "want"), [(("node", "data"), (2, 1)), (("data", "node"), (1, 2))])
def test_processes_along_axes(names, want):
    """Hosts along the first axis: two processes of four devices."""
    processes = np.repeat([0, 1], 4).reshape(2, 4)
    assert tuple(num_along(processes, names.index(name)) for name in ("node", "data")) == want
