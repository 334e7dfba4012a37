"""ZeRO beside tensor parallelism: the loss constrains what it computes to a further axis of the mesh."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import custom_batching, lax
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from tests import models
from tests.compiled import analyze
from tests.tiers import default_for, singles, slow, stages

VOCAB, WIDTH, HIDDEN, HEADS, LAYERS = 128, 32, 96, 4, 3


class Layer(nn.Module):
    """A layer of a Llama, its heads and its hidden units over the model axis."""

    mesh: jax.sharding.Mesh | None

    @nn.compact
    def __call__(self, x, _=None):
        dense = functools.partial(nn.Dense, use_bias=False)
        y = nn.RMSNorm()(x)
        q, k, v = (dense(WIDTH, name=name)(y).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
        q, k, v = (constrained(y, self.mesh, "data", None, "model", None) for y in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / float(np.sqrt(WIDTH // HEADS))
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + dense(WIDTH, name="out")(y)
        y = nn.RMSNorm()(x)
        gate, up = (constrained(dense(HIDDEN, name=n)(y), self.mesh, "data", None, "model") for n in ("gate", "up"))
        return x + dense(WIDTH, name="down")(jax.nn.silu(gate) * up), None


class Llama(nn.Module):
    mesh: jax.sharding.Mesh | None
    scan: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        layer = nn.remat(Layer, prevent_cse=not self.scan) if self.remat else Layer
        if self.scan:
            scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = scanned(self.mesh, name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = layer(self.mesh, name=f"layer_{i}")(x)
        logits = nn.Dense(VOCAB, use_bias=False, name="head")(nn.RMSNorm()(x))
        return constrained(logits, self.mesh, "data", None, "model")


def constrained(x, mesh, *names):
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, P(*names)))


def next_token_loss(model, params, tokens):
    logits = model.apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def split(params, mesh):
    """Kernels of what is constrained, cut over the model axis as Megatron does it."""

    def place(path, x):
        name = path[-2].key if len(path) > 1 else ""
        spec = {"down": (-2,), "out": (-2,)}.get(name, (-1,) if name in ("q", "k", "v", "gate", "up", "head") else ())
        names = ["model" if d - x.ndim in spec else None for d in range(x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, P(*names)))

    return jax.tree_util.tree_map_with_path(place, params)


@functools.cache
def trained_on_one_device(scan):
    """Parameters before and after two steps, and their losses; nothing is constrained."""
    model = Llama(None, scan=scan)
    params = models.draw_params(model, batches()[0])
    tx = optax.adamw(1e-2, eps=1e-4)
    state, losses, first = tx.init(params), [], params
    value_and_grad = jax.jit(jax.value_and_grad(functools.partial(next_token_loss, model)))
    for tokens in batches():
        loss, grads = value_and_grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, first), jax.tree.map(np.asarray, params), losses


def batches():
    return np.random.default_rng(0).integers(0, VOCAB, size=(2, 8, 13))


@pytest.mark.parametrize(
    ("scan", "remat", "stage"),
    default_for([(True, True, 3), (False, False, 1)], itertools.product([True, False], [True, False], range(4))),
)
def test_a_llama_trains_as_on_one_device(scan, remat, stage):
    mesh = jzero.make_mesh(data=4, model=2)
    first, want, losses = trained_on_one_device(scan)
    model = Llama(mesh, scan=scan, remat=remat)
    tx = optax.adamw(1e-2, eps=1e-4)
    state = jzero.TrainState.create(params=split(first, mesh), tx=tx)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    step = jzero.make_train_step(functools.partial(next_token_loss, model), remat="as_written")
    for tokens, loss in zip(batches(), losses, strict=True):
        state, metrics = step(state, tokens)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    got = jax.tree.map(np.asarray, jzero.gather_params(state))
    # AdamW divides by a root: eps keeps rounding in gradients near 0 from becoming a whole step.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)
    hlo = step.lower(state, batches()[0]).compile().as_text()
    products = {p for p in re.findall(r"f32\[([\d,]+)\]\S* dot\(", hlo) if str(HIDDEN) in p.split(",")}
    assert not products, "hidden units lie over two devices"
    assert_each_part_travels_alone(analyze(step, state, batches()[0]))


@pytest.mark.parametrize("options", [{}, slow({"reduce": "last"})], ids=str)
def test_sums_over_micro_batches_travel_in_parts(options):
    mesh = jzero.make_mesh(data=4, model=2)
    first, _, _ = trained_on_one_device(True)
    state = jzero.TrainState.create(params=split(first, mesh), tx=optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=2 if options else 1, persistence_threshold=0)
    state = jzero.shard_train_state(state, config=config, mesh=mesh)
    loss_fn = functools.partial(next_token_loss, Llama(mesh))
    step = jzero.make_train_step(loss_fn, accumulate_steps=2, **options)
    assert_each_part_travels_alone(analyze(step, state, batches()[0]))


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


@jax.custom_jvp
def recomputed(x):
    return jax.checkpoint(lambda x: jax.nn.silu(jnp.sin(x)))(x)


recomputed.defjvp(lambda x, t: jax.jvp(jax.checkpoint(lambda x: jax.nn.silu(jnp.sin(x))), x, t))


@custom_batching.custom_vmap
def batched_on_its_own(x):
    return 2 * jnp.sin(x)


@batched_on_its_own.def_vmap
def _(_size, is_batched, x):
    return 2 * jnp.sin(x), is_batched[0]


OWN = {
    "relu": lambda x, rows: jax.nn.relu(x),
    "where": lambda x, rows: jnp.where(x > 0, x, 0.1 * x),
    "logsumexp": lambda x, rows: jax.nn.logsumexp(x, axis=-1),
    "var": lambda x, rows: jnp.var(x, axis=-1),
    "set": lambda x, rows: x.at[:, 2:4].set(0.5),
    "sort": lambda x, rows: jnp.sort(x, axis=1),
    "solve": lambda x, rows: jnp.linalg.solve(x[:4, :4] @ x[:4, :4].T + jnp.eye(4), x[:4, :4]),
    "reduce": lambda x, rows: lax.reduce(x, jnp.float32(1), lambda a, b: a * 0.5 + b, (0,)),
    "custom_vmap": lambda x, rows: batched_on_its_own(lax.stop_gradient(x)) * x,
    "vjp": lambda x, rows: scaled(x, rows, 1.5)[0],
    "jvp": lambda x, rows: shifted(x, rows, jnp.max(x)),
    "jvp_in_scan": lambda x, rows: lax.scan(lambda c, y: (c + shifted(y, rows[0], c), None), 0.0, x.T[:, :4])[0],
    "vjp_in_remat": lambda x, rows: jax.checkpoint(lambda x: scaled(x, rows, 1.5)[0])(x),
    "jvp_in_cond": lambda x, rows: lax.cond(rows[0] > 0, lambda x: shifted(x, rows, 0.5), lambda x: x, x),
    "jvp_of_remat_in_cond": lambda x, rows: lax.cond(rows[0] > 0, recomputed, lambda x: x, x),
    "second": lambda x, rows: jax.grad(lambda x: shifted(x, rows, 0.5).sum())(x),
}


@pytest.mark.parametrize("stage", [slow(1), 3])
@pytest.mark.parametrize(
    "name", default_for(["relu", "logsumexp", "set", "custom_vmap", "vjp", "jvp_in_scan", "vjp_in_remat"], OWN)
)
def test_functions_of_what_is_constrained(name, stage):
    """They hold jaxprs, and so the mesh that they were traced in; some bring their own derivative."""
    assert_as_on_one_device(OWN[name], stage, jzero.make_mesh(data=4, model=2))


@pytest.mark.parametrize(
    "name", ["relu", "custom_vmap", "jvp_in_scan", *map(slow, ("sort", "solve", "reduce", "jvp_of_remat_in_cond"))]
)
def test_functions_of_what_is_computed_under_a_mesh(name):
    """All types carry the mesh where one is set."""
    mesh = jzero.make_mesh(data=4, model=2)
    with jax.set_mesh(mesh):
        assert_as_on_one_device(OWN[name], 3, mesh)


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


@singles(name=list(WEIGHTED), stage=[1, 3])
def test_places_along_an_axis_beside_another(name, stage):
    """`lax.axis_index` in what holds jaxprs."""
    mesh = jzero.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 32)).astype(np.float32)}
    batch = rng.normal(size=(12, 16)).astype(np.float32)
    weights = 1 + np.repeat(np.arange(4), 3)[:, None]
    want, grads = jax.value_and_grad(lambda p: jnp.square(batch @ p["w"] * weights).mean())(params)
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config, mesh=mesh)
    loss, got = jzero.value_and_grad(lambda p, x: jnp.square(WEIGHTED[name](x, p["w"])).mean())(state, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(got["w"], grads["w"], rtol=1e-5, atol=1e-6 * np.abs(grads["w"]).max())


def assert_as_on_one_device(fn, stage, mesh):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(16, 32)).astype(np.float32) / 4, "d": rng.normal(size=(16,)).astype(np.float32)}
    batch = {"x": rng.normal(size=(16, 16)).astype(np.float32), "rows": np.full((16,), 1)}

    def loss_fn(p, batch, mesh=mesh):
        hidden = constrained(batch["x"] @ p["w"], mesh, "data", "model")
        return jnp.square(fn(hidden, batch["rows"])).mean() + jnp.square(p["d"]).sum()

    def loss_of_parts(p, batch):
        """The mean of what the devices compute, each of its four rows."""
        parts = [jax.tree.map(operator.itemgetter(slice(4 * i, 4 * i + 4)), batch) for i in range(4)]
        return sum(loss_fn(p, part, None) for part in parts) / 4

    want, want_grads = jax.value_and_grad(loss_of_parts)(params, batch)
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config, mesh=mesh)
    for remat in ("as_written", True):
        loss, grads = jzero.value_and_grad(loss_fn, remat=remat, check_rows=False)(state, batch)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        grads = jax.tree.map(np.asarray, grads)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, want_grads)


@stages(1, 3)
def test_parameters_that_the_loss_constrains(stage):
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

    want, grads = jax.value_and_grad(lambda p: loss_fn(p, batch, None))(params)
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(1.0))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config, mesh=mesh)
    step = jzero.make_train_step(loss_fn)
    report = analyze(step, state, batch)
    new, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    got = jzero.gather_params(new)
    for name, grad in grads.items():
        # "out" and its gradient pass bf16.
        np.testing.assert_allclose(
            params[name] - got[name], grad, rtol=1e-2 if name == "out" else 1e-4, atol=2e-6, err_msg=name
        )
    gathered = [row.elements for row in report.collectives if row.kind == "all-gather" and row.in_loop]
    assert gathered.count(2 * 5 * 32 * 32 // 2) == (stage == 3), "each layer twice, half of it"


@singles(of_what=["in_shardings", "out_shardings"], stage=[3, 1, 0])
def test_shardings_of_calls_are_constraints(of_what, stage):
    mesh = jzero.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=size).astype(np.float32) for name, size in [("w", (64, 32)), ("v", (32, 12))]}
    batch = rng.normal(size=(32, 64)).astype(np.float32) / 8
    rows, columns = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P(None, "model"))
    shardings = {
        "in_shardings": {"in_shardings": (rows, columns)},
        "out_shardings": {"out_shardings": NamedSharding(mesh, P("data", "model"))},
    }

    def loss_fn(p, batch, of_call=shardings[of_what]):
        hidden = jax.jit(lambda x, w: jnp.tanh(x @ w), **of_call)(batch, p["w"])
        return jnp.square(hidden @ p["v"]).mean()

    want, want_grads = jax.value_and_grad(lambda p: loss_fn(p, batch, {}))(params)
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0), mesh=mesh)
    for remat in (None, True):
        fn = jax.jit(jzero.value_and_grad(loss_fn, remat=remat))
        loss, grads = fn(state, batch)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), dict(grads), want_grads)
        products = re.findall(r"f32\[([\d,]+)\]\S* dot\(", fn.lower(state, batch).compile().as_text())
        assert "8,16" in products, "hidden units lie over two devices"
        assert "8,32" not in products


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
    plain = jzero.TrainState.create(
        params={"w": jax.device_put(w, NamedSharding(mesh, P("model", None)))}, tx=optax.sgd(0.1)
    )
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, persistence_threshold=0), mesh=mesh)
    loss_fn = lambda p, batch: jnp.square(use(p["w"], batch)).mean()
    fn = jax.jit(jzero.value_and_grad(loss_fn, remat="as_written"))
    np.testing.assert_allclose(fn(state, batch)[1]["w"], jax.grad(loss_fn)({"w": w}, batch)["w"], rtol=1e-4, atol=1e-5)
    rows = [row for row in analyze(fn, state, batch).collectives if row.kind == "all-gather"]
    assert {row.elements // row.count for row in rows if row.axis == "data"} == {gathered}


@singles(names=[(), ("data",), ("data", None), ("model", None), (P.UNCONSTRAINED, P.UNCONSTRAINED)], stage=[1, 3])
def test_constraints_that_cut_nothing_more_leave_a_parameter_as_it_is(names, stage):
    mesh = jzero.make_mesh(data=4, model=2)
    params = {
        "w": jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P(None, "model"))),
        "v": jnp.ones((128, 128)),
    }
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0), mesh=mesh)

    def loss_fn(p, batch):
        hidden = constrained(jnp.tanh(batch @ constrained(p["w"], mesh, *names)), mesh, "data", "model")
        # So parts of "v" have the sizes of "w", which is not exchanged whole for that.
        return jnp.square(hidden @ constrained(p["v"], mesh, None, "model")).mean()

    report = analyze(jzero.make_train_step(loss_fn), state, jnp.ones((8, 64)))
    report.verify()
    reduced = sum(row.elements for row in report.collectives if (row.kind, row.axis) == ("reduce-scatter", "data"))
    assert reduced == 64 * 128 // 2 + 128 * 128 // 2


def test_a_constraint_that_names_no_other_axis_makes_whole_along_it():
    mesh = jzero.make_mesh(data=4, model=2)

    def loss_fn(p, batch, *names):
        hidden = constrained(jnp.tanh(batch @ p["w"]), mesh, "data", "model")
        return jnp.square(jnp.sin(constrained(hidden, mesh, "data", *names))).mean()

    w = jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P(None, "model")))
    plain = jzero.TrainState.create(params={"w": w}, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(plain, stage=3, mesh=mesh)
    kinds = []
    for names in ("model",), (None,):
        fn = jzero.value_and_grad(lambda p, batch, names=names: loss_fn(p, batch, *names))
        rows = analyze(jax.jit(fn), state, jnp.ones((8, 64))).collectives
        kinds.append({row.kind for row in rows if row.axis == "model" and row.elements > 100})
    assert "all-gather" in kinds[1] - kinds[0]


def test_exchanging_a_parameter_whole_is_a_violation(monkeypatch):
    """So compilers do it where a collective over the data axis is left to them: they gather the operand first."""
    monkeypatch.setattr("jzero.layout.comm.apply_to_parts", lambda collective, x, before, after: collective(x))
    mesh = jzero.make_mesh(data=4, model=2)
    params = {"w": jnp.ones((64, 128)), "v": jnp.ones((128, 256))}
    params["w"] = jax.device_put(params["w"], NamedSharding(mesh, P(None, "model")))
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(persistence_threshold=0), mesh=mesh)
    step = jzero.make_train_step(lambda p, batch: jnp.tanh(jnp.tanh(batch @ p["w"]) @ p["v"]).mean())
    with pytest.raises(jzero.PlanViolation) as error:
        analyze(step, state, jnp.ones((8, 64))).verify()
    moved = [
        re.search(r"moves ([\d,]+) elements by (\S+), the traced one ([\d,]+): ", x) for x in error.value.violations
    ]
    found = {x[2]: [int(x[i].replace(",", "")) for i in (1, 3)] for x in moved if x}
    assert sorted(found) == ["all-gather", "reduce-scatter"]
    part = 64 * 128 // 2  # of w, which each device should exchange alone
    assert all(compiled - traced == part for compiled, traced in found.values())
