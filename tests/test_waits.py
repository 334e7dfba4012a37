"""What keeps a second gather apart, what holds it back, and what backward passes on GPUs wait for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.interpreters import partial_eval as pe

import jzero
from jzero.core.base import compat
from jzero.core.engine.placed import first_elements, operations_of, wait, wait_p
from jzero.core.jaxpr.equations import equations_of
from tests import engine_losses, light_decoder, models, shared
from tests.test_prefetch import on

ROWS, WIDTH, HIDDEN, VOCAB = 48, 32, 64, 512  # rows per device
SIZES = {"inner": (WIDTH, HIDDEN), "outer": (HIDDEN, WIDTH), "head": (WIDTH, VOCAB)}


def make_params():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=size).astype(np.float32) / 8 for name, size in SIZES.items()}


def loss_fn(params, batch):
    x = jnp.tanh(batch @ params["inner"]) @ params["outer"]
    return jax.nn.logsumexp(x @ params["head"], axis=-1).mean()


def batch(rows=8 * ROWS):
    return np.random.default_rng(1).normal(size=(rows, WIDTH)).astype(np.float32)


def make_state():
    return shared.sharded(make_params(), optax.sgd(0.1), 3)


def barriers(jaxpr):
    """Yields the shapes of what goes into each barrier of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is wait_p:
            yield from barriers(operations_of(eqn))
        if eqn.primitive.name == "optimization_barrier":
            yield [x.aval.shape for x in eqn.invars]
        for inner in compat.contained_jaxprs(eqn):
            yield from barriers(inner)


def found_barriers(fn, *args):
    return list(barriers(compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0]))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_operands_of_barriers(platform, monkeypatch):
    on(platform, monkeypatch)
    found = found_barriers(jzero.value_and_grad(loss_fn), make_state(), batch())
    of_logits, of_x = (ROWS, VOCAB), (ROWS, WIDTH)
    shards = {"outer": (HIDDEN // 8, WIDTH), "head": (WIDTH, VOCAB // 8)}
    assert len(found) == 2, "the batch needs no gradient, so the first parameter is not used again"
    for name, gradient in (("head", of_logits), ("outer", of_x)):
        light = platform == "tpu" and name != "outer"  # 48 x 32 < 64 x 32; but 48 x 512 > 32 x 512
        (operands,) = [shapes for shapes in found if shards[name] in shapes]
        assert ((1, 1) if light else gradient) in operands
        assert light == (gradient not in operands)


def test_what_is_gathered_once_waits_for_nothing():
    """No loss alone has a second gather, nor has a step whose parameters stay from pass to pass."""
    waits = lambda fn, state: str(jax.make_jaxpr(fn)(state, engine_losses.batch())).count(f"{wait_p.name}[")
    again, stays = (engine_losses.sharded(3, 8, **x) for x in ({}, {"reshard_after_forward": False}))
    assert waits(jzero.value_and_grad(engine_losses.nested_jit), again) > 0
    assert waits(jzero.value_and_grad(engine_losses.nested_jit), stays) == 0
    assert waits(jzero.make_eval_step(engine_losses.nested_jit), again) == 0


@pytest.mark.slow
def test_gradients_with_light_barriers_are_those_of_plain_jax(monkeypatch):
    on("tpu", monkeypatch)
    tokens, loss = models.tokens(64, vocab=64), light_decoder.loss_fn
    plain = light_decoder.make_state(optax.sgd(0.1), layers=2, width=40, vocab=64)
    state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    assert any(
        shape and set(shape) == {1}
        for shapes in found_barriers(jzero.value_and_grad(loss), state, tokens)
        for shape in shapes
    )
    _, grads = jzero.value_and_grad(loss)(state, tokens)
    want = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(plain.params, tokens))
    for path, x in jax.tree_util.tree_leaves_with_path(want):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = jzero.get_full_grad(state, name, grads=grads)
        # Sums over the batch in another order: float32's rounding, relative to the largest element.
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=2e-6 * float(np.abs(x).max()) + 1e-9)


def test_results_without_elements_and_of_whole_numbers():
    """A light barrier takes what is there of each gradient."""
    none = [jnp.zeros((0, 2)), np.zeros((2,), jax.dtypes.float0), jnp.arange(3)]
    firsts = first_elements([jnp.ones((3, 4)), *none, jnp.float32(5), jnp.array([2 + 3j])])
    assert [(x.shape, x.dtype) for x in firsts] == [((1, 1), jnp.float32), ((), jnp.float32), ((1,), jnp.float32)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_is_held_back_stays_as_it_is(dtype):
    """Whatever it waits for, to the bit; a shard of numbers that are none, too."""
    shard = jnp.array([1.5, -0.0, jnp.nan, jnp.inf], dtype)
    hold = jax.jit(lambda shard, values: wait([shard], values, "select")[0][0])
    for value in (0.0, -0.0, 1.0, -6e4, np.inf, -np.inf, np.nan):
        held = hold(shard, [np.full((2, 3), value, dtype), np.full((), -value, np.float32), np.arange(4)])
        assert held.dtype == dtype
        np.testing.assert_array_equal(np.asarray(held).view(np.uint8), np.asarray(shard).view(np.uint8))


def test_what_is_held_back_cannot_be_had_before():
    """In the compiled program, where barriers are gone: the result is made of what it waits for."""
    compiled = (
        jax.jit(lambda shard, x: wait([shard], [jnp.sin(x)], "select")[0][0] * 2)
        .lower(jnp.ones(4), jnp.ones(3))
        .compile()
    )
    assert "sine" in compiled.as_text()


def state_of_layers(**options):
    params = {f"w{i}": np.full((32, 32), 0.1, np.float32) for i in range(6)}
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    return jzero.shard_train_state(plain, config=jzero.ZeroConfig(**options))


def loss_of_layers(params, batch):
    for name in sorted(params):
        batch = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(params[name], batch)
    return jnp.square(batch).mean()


@pytest.mark.parametrize(("platform", "threshold"), [("gpu", 0), ("gpu", 10**6), ("tpu", 0)])
def test_blocks_wait_for_the_gradients_of_the_one_after_the_next(platform, threshold, monkeypatch):
    """Of a chain of recomputed layers, in the backward pass: which reductions each gradient is made of.

    Parameters that stay whole count, too: what makes the gradient of a norm's scale is as large as an activation.
    """
    on(platform, monkeypatch)
    state = state_of_layers(stage=3, persistence_threshold=threshold)
    found = reductions_before_reductions(jzero.value_and_grad(loss_of_layers), state, batch())
    # Backwards from layer 5. The cotangent with which layer 3 begins waits for gradient 5, that of 2 for 4, and so on;
    # each is handed on to the layers before.
    assert found == ([0, 0, 1, 2, 3, 4] if platform == "gpu" else [0] * 6)


def test_the_first_block_waits_for_all_that_comes_before(monkeypatch):
    """A norm and a head, say: both of them, not the first alone."""
    on("gpu", monkeypatch)
    params = {name: np.full((32, 32), 0.1, np.float32) for name in ("w0", "w1", "x_norm", "y_head")}

    def loss(params, batch):
        for name in ("w0", "w1"):
            batch = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(params[name], batch)
        return jnp.square(jnp.sin(batch @ params["x_norm"]) @ params["y_head"]).mean()

    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), config=shared.config(3))
    found = reductions_before_reductions(jzero.value_and_grad(loss), state, batch())
    assert found == [0, 0, 2, 2], "head, norm, w1, w0"


@pytest.mark.parametrize(
    ("platform", "waits"), [("gpu", [("barrier", (8, 24), (8, 40)), ("select", (8, 24), (8, 40))]), ("cpu", [])]
)
def test_what_was_joined_waits_for_what_is_added_later(platform, waits, monkeypatch):
    """The cotangent of `y` waits for that of `x`, whose other part is made last; that of `e` is added at once.

    Behind a barrier, since compilers would make only the element of it that is looked at.
    """
    on(platform, monkeypatch)
    sizes = {"first": (16, 40), "second": (40, 24), "edge": (24, 24), "joined": (64, 24), "last": (40, 24)}
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=size).astype(np.float32) / 6 for name, size in sizes.items()}

    def loss(params, batch):
        x = jnp.tanh(batch @ params["first"])  # [8, 40]
        y = jnp.tanh(x @ params["second"])  # [8, 24]
        y = jnp.tanh(jnp.concatenate([y, x], -1) @ params["joined"])
        e = y @ params["edge"]
        return jnp.square(e + jnp.concatenate([e, batch], -1) @ params["last"]).mean()

    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state, rows = jzero.shard_train_state(state, stage=2), rng.normal(size=(64, 16)).astype(np.float32)
    fn = jzero.value_and_grad(loss)
    jaxpr = compat.open_jaxpr(jax.make_jaxpr(fn)(state, rows))[0]
    found = [eqn for eqn in equations_of(jaxpr) if eqn.primitive is wait_p]
    assert [(eqn.params["how"], *[v.aval.shape for v in eqn.invars]) for eqn in found] == waits
    delayed = {id(v) for eqn in found for v in eqn.invars}  # which others read as the wait returns them
    assert not any(id(v) in delayed for eqn in equations_of(jaxpr) if eqn.primitive is not wait_p for v in eqn.invars)
    want = jax.grad(loss)(params, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), fn(state, rows)[1], want)


def reductions_before_reductions(fn, *args):
    """Of each reduced gradient of a program: of how many others it is made, barriers left out."""
    found, reductions = [], iter(range(10**6))

    def walk(jaxpr, inputs):
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        env = dict.fromkeys(jaxpr.constvars, frozenset()) | dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            given = [frozenset() if compat.is_literal(v) else env[v] for v in eqn.invars]
            inner = [x for x in compat.contained_jaxprs(eqn) if len(x.invars) == len(eqn.invars)]
            made = frozenset().union(*given)
            if len(inner) == 1:
                outputs = walk(inner[0], given)
            elif eqn.primitive.name == "optimization_barrier" or eqn.params.get("how") == "barrier":
                outputs = given
            else:
                if eqn.primitive.name == "zero_reduce":
                    found.append(len(made))
                    made = made | {next(reductions)}
                outputs = [made] * len(eqn.outvars)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [frozenset() if compat.is_literal(v) else env[v] for v in jaxpr.outvars]

    jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(fn)(*args))
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)  # as the compiler will see it
    walk(jaxpr, [frozenset()] * len(jaxpr.invars))
    return found


def head_after_a_loop(p, batch):
    hidden = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, p["stack"])[0]
    return jax.nn.logsumexp(hidden @ p["head"], axis=-1).mean()


@pytest.mark.parametrize(
    ("platform", "options", "waits"),
    [
        ("gpu", {"stage": 1}, True),
        ("gpu", {"stage": 2}, True),
        ("gpu", {"stage": 3}, True),
        ("gpu", {"stage": 3, "reshard_after_forward": False}, True),
        ("gpu", {"stage": 3, "rules": {"head": jzero.LeafRule(persistent=True)}}, False),
        ("tpu", {"stage": 2}, False),
        ("tpu", {"stage": 3}, False),
        ("cpu", {"stage": 3}, False),
    ],
)
def test_the_backward_loop_waits_for_the_gradient_of_the_head(platform, options, waits, monkeypatch):
    """Else compilers for GPUs put off the product that makes it, and keep the gradient of the logits meanwhile."""
    on(platform, monkeypatch)
    rng = np.random.default_rng(0)
    sizes = {"stack": (5, 32, 32), "head": (32, 512)}
    params = {name: rng.normal(size=size).astype(np.float32) / 6 for name, size in sizes.items()}
    state = shared.sharded(params, optax.sgd(0.1), **options)
    batch = rng.normal(size=(16, 32)).astype(np.float32)
    step = jzero.make_train_step(head_after_a_loop)
    assert ((32, 512 // 8) in waited_for_by_loops(step, state, batch)) == waits
    if platform != "gpu" or options != {"stage": 3}:
        return
    loss, grads = jzero.value_and_grad(head_after_a_loop)(state, batch)
    want_loss, want = jax.jit(jax.value_and_grad(head_after_a_loop))(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), grads, want)


def waited_for_by_loops(fn, *args, kinds=("zero_reduce",)):
    """The shapes of what is reduced over devices, or of other results, before some loop begins."""
    found = set()

    def search(jaxpr):
        needs = {}
        for eqn in jaxpr.eqns:
            of_inputs = [needs.get(v, frozenset()) for v in eqn.invars if not compat.is_literal(v)]
            needed = frozenset().union(*of_inputs)
            if eqn.primitive.name in ("scan", "while"):
                found.update(needed)
            if eqn.primitive.name in kinds:
                needed |= {v.aval.shape for v in eqn.outvars}
            needs.update(dict.fromkeys(eqn.outvars, needed))
            for inner in compat.contained_jaxprs(eqn):
                search(inner)

    search(compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0])
    return found
