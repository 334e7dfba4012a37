"""`Keep`: parameters that stay whole between the passes, and blocks that are not recomputed."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.engine.kept_blocks import num_blocks
from jzero.core.jaxpr.equations import equations_of
from jzero.estimate import step_memory
from jzero.estimate.traced import trace_program
from jzero.estimate.traced_collectives import traced_collectives
from tests import engine_losses, shared
from tests.shared import whole

LAYERS, WIDTH, ROWS = 5, 35, 48  # 8 devices cut no dimension evenly


def layer(w, x):
    """Each row attends over 17 places of 3 columns."""
    q = (x @ w["up"]).reshape(-1, 17, 3)
    shares = jnp.tanh(jnp.einsum("bik,bjk->bij", q, jnp.sin(q)))
    return x + jnp.einsum("bij,bjk->bik", shares, jnp.cos(q)).reshape(-1, 51) @ w["down"]


def make_params(layers=LAYERS):
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / 8).astype(np.float32)
    return {
        "embed": draw(23, WIDTH),
        "blocks": [{"up": draw(WIDTH, 51), "down": draw(51, WIDTH)} for _ in range(layers)],
    }


def loss_fn(params, batch):
    """Layers between a tied embedding and head."""
    x = jnp.sin(batch @ params["embed"])
    for block in params["blocks"]:
        x = layer(block, x)
    return jnp.square(jax.nn.softmax(x @ params["embed"].T)).mean()


def nested_loss(params, batch):
    """The same, with all layers but the last in functions of their own."""
    x = jnp.sin(batch @ params["embed"])
    encode = jax.jit(lambda blocks, x: layer(blocks[1], layer(blocks[0], x)))
    x = jax.jit(lambda x: jnp.tanh(encode(params["blocks"][:2], x)))(x)
    x = encode(params["blocks"][2:4], x)
    return jnp.square(layer(params["blocks"][4], x) @ params["embed"].T).mean()


def scan_loss(params, batch):
    x = jnp.sin(batch @ params["embed"])
    x = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["blocks"])[0]
    return jnp.square(x @ params["embed"].T).mean()


def stacked_params():
    params = make_params()
    return {**params, "blocks": jax.tree.map(lambda *rows: np.stack(rows), *params["blocks"])}


def make_batch():
    return np.random.default_rng(1).normal(size=(ROWS, 23)).astype(np.float32)


def make_state(params=None, **fields):
    return shared.sharded(make_params() if params is None else params, optax.sgd(1.0), 3, **fields)


@functools.cache
def default_state():
    """A state for tracing, which consumes none."""
    return make_state()


def traced(loss_fn, remat, state=None):
    step = jzero.make_train_step(loss_fn, remat=remat)
    return step.trace(default_state() if state is None else state, make_batch()).jaxpr


@functools.cache
def default_traced(loss_fn):
    return traced(loss_fn, None)


def gathers(jaxpr):
    counts = collections.Counter()
    for x in traced_collectives(jaxpr):
        counts[x.path] += x.times * x.gathers
    return counts


def num_products(jaxpr):
    return sum(eqn.primitive.name == "dot_general" for eqn in equations_of(jaxpr))


ALL = jzero.Keep(params="all")
PATHS = ["embed", *(f"blocks/{i}/{name}" for i in range(LAYERS) for name in ("down", "up"))]


@functools.cache
def on_one_device(precision, layers=2):
    """The loss and gradients by plain jax."""
    batch = make_batch()
    of_bf16 = lambda params: loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch.astype(jnp.bfloat16))
    reference = of_bf16 if precision == "bf16" else lambda params: loss_fn(params, batch)
    return jax.jit(jax.value_and_grad(reference))(make_params(layers))


@pytest.mark.parametrize(
    ("keep", "accumulate_steps", "precision"),
    [
        (jzero.Keep(params=("embed", "blocks/1/.*"), blocks=1), 3, "bf16"),
        (ALL, 1, "fp32"),
    ],
)
def test_numbers_are_those_of_plain_jax(keep, accumulate_steps, precision):
    old, batch = make_params(2), make_batch()
    step = jzero.make_train_step(loss_fn, remat=keep, accumulate_steps=accumulate_steps)
    state = make_state(old, precision=precision)
    if keep is ALL:  # in the compiled program, too
        report = jzero.analyze(step, state, batch)
        report.verify()
        assert sum(c.count for c in report.collectives if c.kind == "all-gather") == 1 + 2 * 2
    new, metrics = step(state, batch)
    loss, grads = on_one_device(precision)
    # Each device rounds its gradients to bf16 before they are summed, and plain jax rounds the whole batch's: 8 bits.
    rtol, atol = (1e-5, 1e-6) if precision == "fp32" else (5e-2, 5e-4)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6 if precision == "fp32" else 1e-2)
    moved = jax.tree.map(np.subtract, old, whole(new.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), moved, grads)


def test_losses_of_all_kinds_train_alike():
    kinds = engine_losses.scan, engine_losses.remat, engine_losses.nested_jit
    loss = lambda params, batch: sum(kind(params, batch) for kind in kinds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most have no blocks
        keep = jzero.Keep(params="all", blocks=1)
        engine_losses.assert_equal(engine_losses.sharded(3, 8), loss, engine_losses.batch(), remat=keep)


@pytest.mark.parametrize("loss", [loss_fn, nested_loss])
def test_parameters_that_stay_are_gathered_once(loss):
    """The tied head, too, whose use is transposed; the others twice, in the forward and the backward pass."""
    assert gathers(traced(loss, ALL)) == dict.fromkeys(PATHS, 1)
    some = gathers(traced(loss, jzero.Keep(params=("embed", "blocks/3/up"))))
    assert [path for path in PATHS if some[path] == 1] == ["embed", "blocks/3/up"]
    default = gathers(default_traced(loss))
    assert all(some[path] == default[path] > 1 for path in PATHS if path not in ("embed", "blocks/3/up"))


def test_rows_of_stacks_that_stay_are_gathered_once():
    state = make_state(stacked_params())
    for keep, times in (
        (ALL, LAYERS),
        (jzero.Keep(params="blocks/.*"), LAYERS),
        (jzero.Keep(params="embed"), 2 * LAYERS),
    ):
        assert gathers(traced(scan_loss, keep, state))["blocks/up"] == times


def test_rows_that_stay_are_stacked_once_whatever_is_made_of_them():
    """Here they are cast, and not recomputed: the backward pass reads the whole rows, and casts them again."""

    def cast_loss(params, batch):
        def turn(x, w):
            up, down = (w[name].astype(jnp.bfloat16) for name in ("up", "down"))
            return x + jnp.tanh(x @ up) @ down, None

        x = jax.lax.scan(turn, jnp.sin(batch @ params["embed"]).astype(jnp.bfloat16), params["blocks"])[0]
        return jnp.square(x.astype(jnp.float32) @ params["embed"].T).mean()

    jaxpr = traced(cast_loss, jzero.Keep(params="all", remat=False), make_state(stacked_params()))
    loops = [eqn for eqn in equations_of(jaxpr) if eqn.primitive.name == "scan"]
    stacks = collections.Counter(v.aval.shape for eqn in loops for v in eqn.outvars)
    assert stacks[LAYERS, WIDTH, 51] == stacks[LAYERS, 51, WIDTH] == 1


@pytest.mark.parametrize(("loss", "layers"), [(loss_fn, 1), (nested_loss, 2)])
def test_no_product_of_the_last_blocks_is_recomputed(loss, layers):
    """Those of `nested_loss`, of two layers, count in the order in which they run, whatever calls them."""
    plain = num_products(jax.make_jaxpr(jax.grad(loss))(make_params(), make_batch()))
    total = jzero.make_train_step(loss, remat=jzero.Keep()).plan(default_state(), make_batch()).kept.of_blocks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keeps = [jzero.Keep(blocks=k) for k in (0, 1, total + 1)]
        more = [num_products(traced(loss, keep)) - plain for keep in keeps]
    assert more == [layers * total, layers * (total - 1), 0], "only the scores are computed twice"
    assert num_products(default_traced(loss)) - plain == layers * total


def test_the_plan_tells_what_is_kept():
    state, batch = default_state(), make_batch()
    plan = lambda keep: jzero.make_train_step(loss_fn, remat=keep).plan(state, batch)
    size = 4 * sum(x.size for x in jax.tree.leaves(make_params()))
    kept = plan(jzero.Keep(params="all", blocks=2)).kept
    assert kept.params == frozenset(PATHS)
    assert kept.param_bytes == size
    assert (kept.blocks, kept.of_blocks) == (2, LAYERS)
    # A block saves the results of its first and third product, of 51 columns, three operands of as many, its scores and
    # shares; and its sum, of 35 columns.
    rows = ROWS // 8
    assert kept.block_bytes == 2 * 4 * rows * (5 * 51 + 2 * 17 * 17 + WIDTH)
    in_thirds = jzero.make_train_step(loss_fn, remat=jzero.Keep(blocks=2), accumulate_steps=3)
    assert kept.block_bytes == 3 * in_thirds.plan(state, batch).kept.block_bytes
    assert f"kept between passes: all parameters ({size / 1024:.2f} KiB), 0 of 5 blocks (0 B)" in str(plan(ALL))
    assert "kept between passes: 1 of 11 (3.14 KiB), 0 of 5 blocks (0 B)" in str(plan(jzero.Keep(params="embed")))
    assert plan(None).kept is None
    assert "kept between passes" not in str(plan(None))
    default, once = plan(None).gathered_bytes, plan(ALL).gathered_bytes
    assert default == 2 * once


def test_kept_blocks_are_as_written_where_the_compiler_fuses_products(monkeypatch):
    """As that for TPUs does: there a block keeps no scores, since only their shares have a derivative to compute.

    Here the estimate does not ask what its products compute of their operands.
    """
    monkeypatch.setattr(step_memory, "trace_program", lambda *args, **options: trace_program(*args))
    step, rows = jzero.make_train_step(loss_fn, remat=jzero.Keep(params="all", blocks=LAYERS)), ROWS // 8
    gpu, tpu = (
        jzero.estimate_step_memory(step, default_state(), make_batch(), topology=x).activation_bytes
        for x in ("h200:8", "v5p:2x2x2")
    )
    assert gpu - tpu == LAYERS * 4 * rows * 17 * 17


def test_a_loop_that_is_kept_saves_what_its_batched_products_read():
    """Scores are recomputed, and shares of them are not; the numbers are those of plain jax."""
    state, batch = make_state(stacked_params()), make_batch()
    step = jzero.make_train_step(scan_loss, remat=jzero.Keep(blocks=1))
    kept = step.plan(state, batch).kept
    assert (kept.blocks, kept.of_blocks) == (1, 1)
    # Of each layer: its input, the results of its first and third product, three operands of 51 columns, and shares.
    # And the sum that leaves the loop.
    assert kept.block_bytes == 4 * (ROWS // 8) * (LAYERS * (WIDTH + 5 * 51 + 17 * 17) + WIDTH)
    grads = jax.jit(jax.grad(scan_loss))(stacked_params(), batch)
    moved = jax.tree.map(np.subtract, stacked_params(), whole(step(state, batch)[0].params))
    # Gradients of up to 5, summed in another order through five layers.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=1e-5), moved, grads)


@pytest.mark.parametrize(("groups", "blocks"), [(1, 1), (3, 0)])
def test_a_loop_whose_shares_are_read_in_another_layout_is_not_kept(groups, blocks):
    """As those of grouped queries, which compilers would copy with the whole stack of layers."""

    def turn(x, w):
        q, k = (x @ w).reshape(-1, 17, 5, groups), x @ w[:, :5]
        shares = jax.nn.softmax(jnp.einsum("btkg,bsk->gbts", q, jnp.broadcast_to(k[:, None], (len(x), 17, 5))))
        return x + jnp.einsum("gbts,bsk->btgk", shares, q[..., 0]).reshape(len(x), -1)[:, :WIDTH], None

    scanned = lambda w, x: jax.lax.scan(turn, x, w)[0].sum()
    jaxpr = jax.make_jaxpr(scanned)(jnp.ones((2, WIDTH, 85 * groups)), jnp.ones((3, WIDTH)))
    assert num_blocks(jaxpr, fuses_products=False) == blocks


def test_weights_of_batched_products_are_not_kept():
    """What follows from parameters alone, here experts' scaled weights, is made again, as parameters are gathered."""

    def expert_layer(w, x):
        h = (x @ w["up"]).reshape(-1, 17, 3)
        return x + jnp.einsum("ben,enm->bem", h, jnp.sin(w["experts"])).reshape(-1, 51) @ w["down"]

    def loss(params, batch):
        x = batch @ params["embed"]
        for block in params["blocks"]:
            x = expert_layer(block, x)
        return jnp.square(x).mean()

    params = make_params(2)
    for block in params["blocks"]:
        block["experts"] = np.ones((17, 3, 3), np.float32)
    kept = jzero.make_train_step(loss, remat=jzero.Keep(blocks=2)).plan(make_state(params), make_batch()).kept
    # Of each block the results of the first two products, of 51 columns; of the first block the sum.
    assert kept.block_bytes == 4 * (ROWS // 8) * (2 * 2 * 51 + WIDTH)


def rotated(w, x):
    """Complex operands."""
    q = (x @ w["up"]).reshape(-1, 17, 3) * jnp.exp(1j)
    mixed = jnp.einsum("bij,bjk->bik", jnp.einsum("bik,bjk->bij", q, jnp.conj(q)) / 17, q)
    return x + mixed.real.reshape(-1, 51) @ w["down"]


@jax.custom_vjp
def modes(x):
    return jnp.fft.rfft(x)


modes.defvjp(lambda x: (modes(x), x), lambda x, g: jax.vjp(jnp.fft.rfft, x)[1](g))


def spectral(w, x):
    """Complex results of real operands, by an operation, a function with a derivative of its own, a loop, a branch."""
    h = x @ w["up"]
    damped = jax.lax.fori_loop(0, 3, lambda i, z: z * (0.5 + 0.5j) + jnp.abs(z) / 9, jax.jit(modes)(h))
    chosen = jax.lax.cond(h.size > 0, jnp.fft.rfft, modes, jnp.sin(h))
    return x + jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(h) * (1 + 2j) + damped * chosen, 51)) @ w["down"]


@pytest.mark.parametrize(
    ("complex_layer", "remat", "params"),
    [
        (rotated, jzero.Keep(params="all", blocks=2), make_params(2)),
        (spectral, jzero.Keep(params="all", blocks=2), make_params(2)),
        (spectral, "cheap", make_params(2)),
        (spectral, "cheap", stacked_params()),
    ],
    ids=["operands", "results", "results, recomputed", "results, scanned"],
)
def test_complex_numbers_are_not_kept(complex_layer, remat, params):
    """jax rounds what a checkpoint saves by `reduce_precision`, which takes no complex numbers."""

    def loss(params, batch):
        x, blocks = jnp.sin(batch @ params["embed"]), params["blocks"]
        if isinstance(blocks, dict):
            return jnp.square(jax.lax.scan(lambda x, w: (complex_layer(w, x), None), x, blocks)[0]).mean()
        for block in blocks:
            x = complex_layer(block, x)
        return jnp.square(x).mean()

    batch = make_batch()
    new, _ = jzero.make_train_step(loss, remat=remat)(make_state(params), batch)
    moved = jax.tree.map(np.subtract, params, whole(new.params))
    grads = jax.jit(jax.grad(loss))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), moved, grads)


def test_patterns_without_a_parameter_are_refused():
    with pytest.raises(ValueError, match=r"no parameter: \['heads'\]"):
        traced(loss_fn, jzero.Keep(params=("embed", "heads")))


def test_parameters_on_the_host_cannot_stay():
    state = make_state(offload=jzero.Offload(params="host"))
    with pytest.raises(ValueError, match=r"Offload\(params='host'\)"):
        traced(loss_fn, ALL, state)


def test_blocks_that_are_not_there_are_warned_about():
    turn = lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None)  # its products are all with weights
    loss = lambda params, batch: jax.lax.scan(turn, batch @ params["embed"], params["blocks"])[0].mean()
    with pytest.warns(UserWarning, match=r"Keep\(blocks=2\).*no block"):
        traced(loss, jzero.Keep(blocks=2), make_state(stacked_params()))
