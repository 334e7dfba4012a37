"""`prefetch_bytes`: the same numbers, gathered ahead by no more than the bound, and how far ahead."""

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

import jzero
from jzero.core.base import compat
from jzero.core.layout.platform import PLATFORMS
from tests import engine_losses, shared
from tests.engine_losses import D
from tests.tiers import slow

AMPLE = 2**30


@pytest.fixture(autouse=True)
def short_loops_too(monkeypatch):
    """Loops of these tests have few turns, whose last gathers a large share in vain."""
    monkeypatch.setattr("jzero.core.engine.loops.MOST_IN_VAIN", 1.0)


def on(platform, monkeypatch):
    """Has steps traced as for such devices."""
    facts = {name: getattr(PLATFORMS[platform], name) for name in ("second_gather", "postpones", "prefetches")}
    monkeypatch.setitem(PLATFORMS, "cpu", PLATFORMS["cpu"]._replace(**facts))


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
    return shared.sharded(params, shared.sgd(0.1), prefetch_bytes=limit, precision=precision)


def carried_shapes(fn, *args):
    """The shapes that loops carry from turn to turn, one list for each loop with a gather in it."""
    found = []

    def search(jaxpr):
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
            if eqn.primitive.name == "scan" and "zero_gather" in str(eqn.params["jaxpr"]):
                consts, carry = compat.scan_groups(eqn)
                found.append([v.aval.shape for v in eqn.invars[consts : consts + carry]])
            for inner in compat.contained_jaxprs(eqn):
                search(inner)

    search(jax.make_jaxpr(fn)(*args))
    return found


def scan_in_a_scan(p, batch):
    inner = lambda h, w: (jnp.tanh(h @ w["w"] + w["b"][None]), None)
    outer = lambda h, _: (lax.scan(inner, h, p["stack"])[0], None)
    return engine_losses.out(p, lax.scan(outer, batch["x"], None, length=2)[0], batch)


def scan_with_everything(p, batch):
    """A constant with a gradient, an integer carry, integers and keys among the rows, results of both kinds."""
    keys = jax.random.split(jax.random.key(3, impl="unsafe_rbg"), 6)
    constant = jnp.cos(p["b"][None] * batch["x"])

    def layer(carry, row):
        h, count, total = carry
        w, i, key, scale = row
        h = jnp.tanh(h @ w["w"] + w["b"][None] * scale) + constant * h
        h = h * ((jax.random.bits(key, (1, D), jnp.uint8) > 25) * (i >= 0))
        return (h, count + i, total + h.mean()), (h.mean() * count, i * 2)

    rows = (p["stack"], jnp.arange(6), keys, jnp.linspace(0.5, 1.5, 6) * p["b"][:6])
    (h, count, total), (ys, numbers) = lax.scan(layer, (batch["x"], jnp.int32(1), jnp.float32(0)), rows)
    return engine_losses.out(p, h, batch) + ys.sum() * 1e-3 + total * count + numbers.sum()


def scan_casting_its_rows(p, batch):
    def layer(h, w):
        return jnp.tanh(h @ w["w"].astype(jnp.bfloat16).astype(jnp.float32) + w["b"][None]), None

    return engine_losses.out(p, lax.scan(layer, batch["x"], p["stack"])[0], batch)


def scan_of_remat_with_keys(p, batch):
    """What the loop keeps by turn may be keys, made in the turn."""

    @jax.checkpoint
    def dropped(h, w, key):
        return jnp.tanh(h @ w["w"] + w["b"][None]) * (jax.random.bits(key, (1, D), jnp.uint8) > 25)

    def layer(carry, row):
        h, i = carry
        w, key = row
        return (dropped(h, w, jax.random.fold_in(key, i)) * 2.0, i + 1), None

    rows = (p["stack"], jax.random.split(jax.random.key(3, impl="unsafe_rbg"), 6))
    return engine_losses.out(p, lax.scan(layer, (batch["x"], jnp.int32(0)), rows)[0][0], batch)


def scan_of_a_call(p, batch):
    layer = lambda h, w: (engine_losses._inner(w["w"], w["b"], h), None)
    return engine_losses.out(p, lax.scan(layer, batch["x"], p["stack"], reverse=True)[0], batch)


def one_after_another(p, batch):
    """Gathers outside of loops, which wait for each other where little may be ahead."""
    x = batch["x"]
    for i in range(3):
        x = jnp.tanh(x @ p["stack"]["w"][i] + p["stack"]["b"][i][None])
    return engine_losses.nested_jit(p, batch | {"x": x}) + scan_of_a_call(p, batch)


def together(p, batch):
    losses = scan_with_everything, scan_of_remat_with_keys, scan_in_a_scan
    return sum(loss(p, batch) for loss in losses) / len(losses)


@pytest.mark.parametrize(
    ("limit", "loss_fn"),
    [
        (AMPLE, together),
        (AMPLE, engine_losses.scan_reversed_with_outputs),
        (AMPLE, engine_losses.parameters_handed_on),
        (D * D * 4, one_after_another),
        slow(D * D * 4, together),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_gradients_equal_plain_jax(limit, loss_fn):
    state = engine_losses.sharded(3, 8, prefetch_bytes=limit)
    engine_losses.assert_equal(state, loss_fn, engine_losses.batch())


def test_a_gather_ahead_travels_in_the_dtype_that_the_layer_casts_to():
    lowered = jzero.make_train_step(scan_casting_its_rows).lower(
        engine_losses.sharded(3, 8, prefetch_bytes=AMPLE), engine_losses.batch()
    )
    gathers = [line for line in lowered.as_text().splitlines() if "stablehlo.all_gather" in line]
    whole = f"tensor<{D}x{D}x"
    of_stack = [line.rsplit("->", 1)[1] for line in gathers if whole in line.rsplit("->", 1)[1]]
    assert of_stack
    assert all("xbf16" in line for line in of_stack), of_stack


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
        (15, AMPLE, r"7680 bytes .* 8192\. Scan 16 "),
        (5, AMPLE, "2560 bytes ahead, .* Scan 16 "),
        (32, 8191, "`prefetch_bytes=8191`.* 8192 "),
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

    return engine_losses.out(p, layers(batch["x"], p["stack"]), batch)


@pytest.mark.parametrize("limit", [AMPLE, 0, pytest.param(None, marks=pytest.mark.smoke)])
def test_a_scan_inside_of_a_policy_gathers_ahead(limit, monkeypatch):
    """The policy sees whole parameters, and nothing of what loops carry for it."""
    on("gpu", monkeypatch)
    state, batch = engine_losses.sharded(3, 8, prefetch_bytes=limit), engine_losses.batch()
    if limit is None:
        engine_losses.assert_equal(state, scan_within_remat_with_policy, batch)
    loops = carried_shapes(jzero.value_and_grad(scan_within_remat_with_policy), state, batch)
    assert [(D, D) in shapes for shapes in (loops[0], loops[-1])] == [limit != 0] * 2
    assert len(loops) >= 2


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
    state = shared.sharded(params, optax.sgd(0.1), **options)
    batch = rng.normal(size=(16, 32)).astype(np.float32)
    loops = carried_shapes(jzero.value_and_grad(three_products), state, batch)
    found = {name for name, size in sizes.items() if any(size in shapes for shapes in loops)}
    assert found == ahead
    if len(ahead) > 1:  # `first`; three in a turn; what the backward pass gathers before its first turn waits for that
        assert gathers_of(jzero.value_and_grad(three_products), state, batch)[4].needs


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
        jaxpr, consts = compat.open_jaxpr(jaxpr)
        env = dict(zip(jaxpr.constvars, [none] * len(consts), strict=True))
        env |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atoms):
            return [none if compat.is_literal(v) else env[v] for v in atoms]

        for eqn in jaxpr.eqns:
            given = read(eqn.invars)
            inner = [x for x in compat.contained_jaxprs(eqn) if len(x.invars) == len(eqn.invars)]
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

    jaxpr, _ = compat.open_jaxpr(jax.make_jaxpr(fn)(*args))
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
    return shared.sharded(params, optax.sgd(0.1), prefetch_bytes=limit)


@pytest.mark.parametrize(
    ("loss_fn", "remat", "limit", "forward", "backward"),
    [
        (chain, "as_written", None, 8, 1),
        (chain, "as_written", 2, 2, 2),
        (chain, None, 0, 1, 1),
        (chain, None, 3, 3, 3),
        (recomputed_chain, None, None, 8, 1),
        (recomputed_chain, None, 1, 1, 1),
    ],
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
