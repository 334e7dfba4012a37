"""ZeRO beside tensor parallelism: the loss constrains what it computes, or parts, to a further axis of the mesh."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import shared
from tests.tiers import slow

WIDTH, HIDDEN, LAYERS = 32, 96, 3
SPECS = {"up": P(None, None, "model"), "down": P(None, "model", None)}


def constrained(x, mesh, *names):
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*names)))


def layer(mesh, x, w):
    """A layer whose hidden units lie over the model axis."""
    hidden = constrained(jax.nn.silu(x @ w["up"]), mesh, "data", "model")
    return x + hidden @ w["down"], None


def loss_of(mesh, scan):
    block = jax.checkpoint(functools.partial(layer, mesh), prevent_cse=not scan)

    def loss_fn(params, x):
        if scan:
            return jnp.square(jax.lax.scan(block, x, params)[0]).mean()
        for i in range(LAYERS):
            x, _ = block(x, jax.tree.map(lambda w, i=i: w[i], params))
        return jnp.square(x).mean()

    return loss_fn


def draw():
    rng = np.random.default_rng(0)
    sizes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: rng.normal(size=size).astype(np.float32) / 9 for name, size in sizes.items()}
    return params, rng.normal(size=(2, 16, WIDTH)).astype(np.float32)


@functools.cache
def trained_on_one_device():
    """Nothing is constrained."""
    params, batches = draw()
    return shared.by_optax(loss_of(None, True), params, shared.sgd(1.0, momentum=0.9), batches)


@pytest.mark.parametrize(
    ("scan", "stage", "accumulate_steps"),
    [(True, 3, 1), (False, 1, 2), slow(True, 0, 1)],
)
def test_layers_train_as_on_one_device(scan, stage, accumulate_steps):
    """The reference has one micro-batch: their means are of as many rows each."""
    mesh, (params, batches) = jzero.make_mesh(data=4, model=2), draw()
    placed = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in params.items()}
    state = shared.sharded(placed, shared.sgd(1.0, momentum=0.9), stage, mesh=mesh)
    step = jzero.make_train_step(loss_of(mesh, scan), remat="as_written", accumulate_steps=accumulate_steps)
    assert_each_part_travels_alone(jzero.analyze(step, state, batches[0]))
    want, compiled = trained_on_one_device(), step.lower(state, batches[0]).compile()
    state, losses = shared.train(compiled, state, batches)
    np.testing.assert_allclose(losses, want.losses, rtol=1e-5)
    found = jax.tree.map(np.asarray, jzero.gather_params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, want.params)
    products = {*re.findall(r"f32\[([\d,]+)\]\S* dot\(", compiled.as_text())}
    assert products
    assert not {p for p in products if str(HIDDEN) in p.split(",")}, "hidden units lie over two devices"


def assert_each_part_travels_alone(report):
    """Devices along the data axis exchange what one device of the model axis holds; along that none is gathered."""
    plan = report.plan
    held = sum(leaf.param.size // (2 if any(leaf.param.base) else 1) for leaf in plan.leaves)
    assert held < 0.6 * sum(leaf.param.size for leaf in plan.leaves)
    moved = collections.Counter()
    for row in report.collectives:
        moved[row.kind, row.axis] += row.elements
    numbers = 10  # the loss, the norm, each a sum
    if plan.config.stage == 0:
        assert 0 <= moved.pop(("all-reduce", "data")) - 2 * held < numbers
    else:
        assert moved.pop(("reduce-scatter", "data")) == held
        assert moved.pop(("all-reduce", "data")) < numbers
        # At most as often: compilers for CPUs merge gathers of the forward and the backward pass.
        assert 0 < moved.pop(("all-gather", "data")) <= (2 * held if plan.config.stage == 3 else held)
    assert list(moved) == [("all-reduce", "model")], "sums of partial products"
    assert not report.violations


def test_states_are_born_cut_over_the_models_axis():
    """`init_train_state` goes by the constraints in the function that makes the state."""
    mesh = jzero.make_mesh(data=4, model=2)

    def make_state(key):
        draw = lambda key: jax.random.normal(key, (WIDTH, HIDDEN))
        params = {name: draw(k) for name, k in zip("ab", jax.random.split(key), strict=True)}
        params["a"] = jax.lax.with_sharding_constraint(params["a"], NamedSharding(mesh, P(None, "model")))
        return jzero.TrainState.create(params=params, tx=optax.adam(0.1))

    state = jzero.init_train_state(make_state, jax.random.key(0), config=shared.config(3), mesh=mesh)
    wanted = {"a": P("data", "model"), "b": P(None, "data")}
    for tree in (state.params, state.opt_state[0].mu):
        assert jax.tree.map(lambda x: x.sharding.spec, tree) == wanted
    plain = make_state(jax.random.key(0)).params
    jax.tree.map(np.testing.assert_array_equal, jzero.gather_params(state), plain)


@jax.custom_vjp
def scaled(x, rows, factor):
    return jax.nn.silu(x[rows]) * factor, jnp.argmax(jax.nn.relu(x), -1)


def _scaled_forward(x, rows, factor):
    return scaled(x, rows, factor), (x, rows, factor)


def _scaled_backward(residuals, counts):
    x, rows, factor = residuals
    pull = jax.vjp(lambda x: jax.nn.silu(x[rows]) * factor, x)[1]
    # Twice the derivative, so that it shows whose is used.
    return 2 * pull(counts[0])[0], None, jnp.zeros_like(factor)


scaled.defvjp(_scaled_forward, _scaled_backward)


@jax.custom_jvp
def shifted(x, rows, by):
    return jax.nn.silu(x[rows]) + by


@shifted.defjvp
def _shifted_jvp(primals, tangents):
    x, rows, by = primals
    moved = jax.nn.relu(x[rows]) * tangents[0][rows]
    return shifted(x, rows, by), 3 * moved + tangents[2]


OWN = {
    "logsumexp": lambda x, rows: jax.nn.logsumexp(x, axis=-1),
    "set": lambda x, rows: x.at[:, 2:4].set(0.5),
    "solve": lambda x, rows: jnp.linalg.solve(x[:4, :4] @ x[:4, :4].T + jnp.eye(4), x[:4, :4]),
    "reduce": lambda x, rows: lax.reduce(x, jnp.float32(1), lambda a, b: a * 0.5 + b, (0,)),
    "jvp_in_scan": lambda x, rows: lax.scan(lambda c, y: (c + shifted(y, rows[0], c), None), 0.0, x.T[:, :4])[0],
    "vjp_in_remat": lambda x, rows: jax.checkpoint(lambda x: scaled(x, rows, 1.5)[0])(x),
    "jvp_in_cond": lambda x, rows: lax.cond(rows[0] > 0, lambda x: shifted(x, rows, 0.5), lambda x: x, x),
}


def weighted(x, w):
    return x @ w * (1 + lax.axis_index("data"))


def place_from(start):
    """The index along the axis, found by counting."""
    return lax.while_loop(lambda i: i % 4 != lax.axis_index("data"), lambda i: i + 1, start) % 4


def place_on(one):
    """The index along the axis, and one; for TPUs what cannot be lowered for others."""
    on_tpu = lambda one: pallas.pallas_call(lambda x, y: None, out_shape=one)(one)
    return lax.platform_dependent(one, tpu=on_tpu, default=lambda one: one + lax.axis_index("data"))


WEIGHTED = {
    "scan": lambda x, w: lax.scan(lambda c, x: (c, weighted(x, w)), None, x[:, None])[1],
    "while": lambda x, w: x @ w * (1 + place_from(4)),
    "vmap_of_while": lambda x, w: x @ w * (1 + jax.vmap(place_from)(jnp.arange(3)))[:, None],
    "cond": lambda x, w: lax.cond(lax.axis_index("data") < 4, weighted, lambda x, w: 0 * x @ w, x, w),
    "platforms": lambda x, w: x @ w * place_on(jnp.ones((1, 1))),
    "composite": lambda x, w: x @ w * lax.composite(lambda one: one + lax.axis_index("data"), "tests.place")(1.0),
    "jit": jax.jit(weighted),
    "remat": jax.checkpoint(weighted),
}


@pytest.mark.parametrize("anew", [False, True], ids=["the state", "its parameters"])
def test_another_layout_of_padded_leaves_keeps_what_the_models_axis_cuts(anew):
    mesh = jzero.make_mesh(data=4, model=2)
    w = jax.device_put(np.ones((37, 18), np.float32), NamedSharding(mesh, P(None, "model")))
    state = plain = jzero.TrainState.create(params={"w": w}, tx=shared.sgd(0.1))
    for stage, spec in ((3, P("data", "model")), (1, P(None, "model"))):
        given = plain.replace(params=state.params) if anew else state
        state = jzero.shard_train_state(given, config=shared.config(stage), mesh=mesh)
        assert jzero.plan_of(state).params["w"] == spec


HALVES = ["scan while vmap_of_while cond", "platforms composite jit remat"]


@pytest.mark.parametrize(("names", "stage"), [*zip(HALVES, [1, 3], strict=True)])
def test_places_along_an_axis_beside_another(names, stage):
    """`lax.axis_index` in what holds jaxprs."""
    mesh = jzero.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 32)).astype(np.float32)}
    batch = rng.normal(size=(12, 16)).astype(np.float32)
    weights = 1 + np.repeat(np.arange(4), 3)[:, None]
    num, out = len(names.split()), batch @ params["w"] * weights
    want, want_grad = num * np.square(out).mean(), num * batch.T @ (2 * out * weights) / out.size
    state = shared.sharded(params, shared.sgd(0.1), stage, mesh=mesh)
    loss_fn = lambda p, x: sum(jnp.square(WEIGHTED[name](x, p["w"])).mean() for name in names.split())
    loss, got = jzero.value_and_grad(loss_fn)(state, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(got["w"], want_grad, rtol=1e-5, atol=1e-6 * np.abs(want_grad).max())


@pytest.mark.slow
def test_functions_of_what_is_constrained():
    """They hold jaxprs, and so the mesh that they were traced in; some bring their own derivative."""
    mesh = jzero.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 32)).astype(np.float32) / 4, "d": rng.normal(size=(16,)).astype(np.float32)}
    batch = {"x": rng.normal(size=(16, 16)).astype(np.float32), "rows": np.full((16,), 1)}

    def loss_fn(p, batch, mesh=mesh):
        hidden = constrained(batch["x"] @ p["w"], mesh, "data", "model")
        losses = [jnp.square(own(hidden, batch["rows"])).mean() for own in OWN.values()]
        return sum(losses) + jnp.square(p["d"]).sum()

    def loss_of_parts(p, batch):
        """The mean of what the devices compute, each of its four rows."""
        parts = jax.tree.map(lambda x: x.reshape(4, 4, *x.shape[1:]), batch)
        return lax.map(lambda part: loss_fn(p, part, None), parts).mean()

    want, want_grads = jax.jit(jax.value_and_grad(loss_of_parts))(params, batch)
    state = shared.sharded(params, shared.sgd(0.1), 3, mesh=mesh)
    loss, grads = jzero.value_and_grad(loss_fn, remat=True, check_rows=False)(state, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    grads = jax.tree.map(np.asarray, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, want_grads)


@pytest.mark.slow
def test_parameters_that_the_loss_constrains():
    """Their parts lie over the model axis before they are gathered; odd sizes and what is scanned, too."""
    mesh = jzero.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    sizes = {"stack": (5, 32, 32), "odd": (32, 31), "out": (31, 64), "scale": (64,), "flat": (3, 5, 7)}
    params = {name: rng.normal(size=size).astype(np.float32) / 6 for name, size in sizes.items()}
    batch = rng.normal(size=(16, 32)).astype(np.float32)

    def loss_fn(p, batch, mesh=mesh):
        stack = constrained(p["stack"], mesh, None, "data", "model")
        hidden = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, stack)[0]
        hidden = hidden @ constrained(p["odd"], mesh, "model", "data")
        out = constrained(constrained(p["out"].T, mesh, "model", None).astype(jnp.bfloat16), mesh, ("data", "model"))
        hidden = hidden @ constrained(2 * out.T.astype(jnp.float32), mesh, None, "model")
        return jnp.square(hidden * p["scale"][None]).mean() + constrained(p["flat"], mesh, None).sum()

    want, grads = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, batch, None)))(params)
    state = shared.sharded(params, shared.sgd(1.0), 3, mesh=mesh)
    step = jzero.make_train_step(loss_fn)
    report = jzero.analyze(step, state, batch)
    new, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    got = jzero.gather_params(new)
    for name, grad in grads.items():
        # "out" and its gradient pass bf16.
        np.testing.assert_allclose(
            params[name] - got[name], grad, rtol=1e-2 if name == "out" else 1e-4, atol=2e-6, err_msg=name
        )
    gathered = [row.elements for row in report.collectives if row.kind == "all-gather" and row.in_loop]
    assert gathered.count(2 * 5 * 32 * 32 // 2) == 1, "each layer twice, half of it"


def test_shardings_of_calls_are_constraints():
    """Those of arguments in one layer, and of the result in another."""
    mesh = jzero.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    sizes = {"u": (64, 32), "v": (64, 48), "w": (32, 12), "x": (48, 12)}
    params = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    batch = rng.normal(size=(32, 64)).astype(np.float32) / 8
    rows, columns = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P(None, "model"))
    calls = {"in_shardings": (rows, columns)}, {"out_shardings": NamedSharding(mesh, P("data", "model"))}

    def loss_fn(p, batch, calls=calls):
        first, second = (jax.jit(lambda x, w: jnp.tanh(x @ w), **call) for call in calls)
        return jnp.square(first(batch, p["u"]) @ p["w"] + second(batch, p["v"]) @ p["x"]).mean()

    want, want_grads = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, batch, ({}, {}))))(params)
    state = shared.sharded(params, shared.sgd(0.1), 3, mesh=mesh)
    compiled = jax.jit(jzero.value_and_grad(loss_fn)).lower(state, batch).compile()
    loss, grads = compiled(state, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), dict(grads), want_grads)
    products = re.findall(r"f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    assert {"8,16", "8,24"} <= {*products}, "hidden units lie over two devices"
    assert not {"8,32", "8,48"} & {*products}


def of_its_transpose(w, x):
    return x @ w.T


def of_a_slice(w, x):
    return x @ w[3:61]  # of the dimension that the model axis cuts: it is not cut any more


def of_its_columns(w, x):
    return x @ w[:, :64]


@pytest.mark.parametrize(
    ("use", "width", "gathered"),
    [(of_its_transpose, 128, 64 * 128 // 2), (of_a_slice, 58, 58 * 128), (of_its_columns, 64, 64 * 128 // 2)],
)
def test_parts_survive_what_is_done_to_shards(use, width, gathered):
    mesh = jzero.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    w = rng.normal(size=(64, 128)).astype(np.float32)
    batch = rng.normal(size=(16, width)).astype(np.float32)
    state = shared.sharded(
        {"w": jax.device_put(w, NamedSharding(mesh, P("model", None)))}, shared.sgd(0.1), 3, mesh=mesh
    )
    loss_fn = lambda p, batch: jnp.square(use(p["w"], batch)).mean()
    fn = jax.jit(jzero.value_and_grad(loss_fn, remat="as_written"))
    want = jax.jit(jax.grad(loss_fn))({"w": w}, batch)
    np.testing.assert_allclose(fn(state, batch)[1]["w"], want["w"], rtol=1e-4, atol=1e-5)
    rows = [row for row in jzero.analyze(fn, state, batch).collectives if row.kind == "all-gather"]
    assert {row.elements // row.count for row in rows if row.axis == "data"} == {gathered}


FREE = (P.UNCONSTRAINED, P.UNCONSTRAINED)


@pytest.mark.parametrize(("names", "stage"), [(("model", None), 1), (FREE, 3), slow(("data", None), 3)])
def test_constraints_that_cut_nothing_more_leave_a_parameter_as_it_is(names, stage):
    mesh = jzero.make_mesh(data=4, model=2)
    params = {
        "w": jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P(None, "model"))),
        "v": jnp.ones((128, 128)),
    }
    state = shared.sharded(params, shared.sgd(0.1), stage, mesh=mesh)

    def loss_fn(p, batch):
        hidden = constrained(jnp.tanh(batch @ constrained(p["w"], mesh, *names)), mesh, "data", "model")
        # So parts of "v" have the sizes of "w", which is not exchanged whole for that.
        return jnp.square(hidden @ constrained(p["v"], mesh, None, "model")).mean()

    report = jzero.analyze(jzero.make_train_step(loss_fn), state, jnp.ones((8, 64)))
    report.verify()
    reduced = sum(row.elements for row in report.collectives if (row.kind, row.axis) == ("reduce-scatter", "data"))
    assert reduced == 64 * 128 // 2 + 128 * 128 // 2


def test_a_constraint_that_names_no_other_axis_makes_whole_along_it():
    mesh = jzero.make_mesh(data=4, model=2)

    def loss_fn(p, batch, *names):
        hidden = constrained(jnp.tanh(batch @ p["w"]), mesh, "data", "model")
        return jnp.square(jnp.sin(constrained(hidden, mesh, "data", *names))).mean()

    w = jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P(None, "model")))
    plain = jzero.TrainState.create(params={"w": w}, tx=shared.sgd(0.1))
    state = jzero.shard_train_state(plain, stage=3, mesh=mesh)
    kinds = []
    for names in ("model",), (None,):
        fn = jzero.value_and_grad(lambda p, batch, names=names: loss_fn(p, batch, *names))
        rows = jzero.analyze(jax.jit(fn), state, jnp.ones((8, 64))).collectives
        kinds.append({row.kind for row in rows if row.axis == "model" and row.elements > 100})
    assert "all-gather" in kinds[1] - kinds[0]
