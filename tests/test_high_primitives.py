"""Operations that jax turns into others when it lowers a program: `jnp.searchsorted` in jax 0.12, and users' own.

jax looks for them where a jaxpr says that it holds some, so the passes of the engine must keep what it says.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.core.base import compat
from jzero.core.jaxpr.structure import Structures
from tests import shared
from tests.shared import whole
from tests.test_prefetch import on

WIDTH, LAYERS = 19, 3
EDGES = np.linspace(-3, 3, 8, dtype=np.float32)


class Scaled(compat.HighPrimitive):
    """With a derivative for backward passes alone."""

    def __init__(self, x, factor):
        self.in_avals, self.out_aval, self.params = (x,), x, {"factor": factor}
        super().__init__()

    def expand(self, x):
        return x * self.factor

    def vjp_fwd(self, nonzero, x):
        return self(x), None

    def vjp_bwd_retval(self, _, g):
        return (g * self.factor,)


class Doubled(Scaled):
    """With one for `jax.checkpoint`, too."""

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0] * self.factor


def doubled(x, kind=Doubled):
    return kind(jax.typeof(x), 2.0)(x)


def slots(x):
    """All that this version of jax knows of a program or an equation."""
    found = {name: getattr(x, name) for name in type(x).__slots__ if name != "__weakref__"}
    return {name: slots(value) if name == "source_info" else value for name, value in found.items()}


@pytest.mark.smoke
def test_a_rewritten_program_keeps_what_jax_knows_of_it():
    def program(x):
        jax.debug.print("{}", x[0])
        return jax.jit(doubled)(x) + np.arange(3.0)

    closed = jax.make_jaxpr(program)(jnp.ones(3))
    opened, consts = compat.open_jaxpr(closed)
    assert opened.is_high
    assert opened.effects
    assert consts
    new = compat.with_equations(closed, opened.invars, opened.outvars, opened.eqns)
    assert type(new) is type(closed)
    assert all(a is b for a, b in zip(compat.open_jaxpr(new)[1], consts, strict=True))
    assert slots(compat.open_jaxpr(new)[0]) == slots(opened)
    for eqn in opened.eqns:
        assert slots(compat.moved(eqn, eqn.invars, eqn.outvars, None)) == slots(eqn)
        assert slots(compat.changed(eqn, inputs=eqn.invars, names=compat.names_of(eqn))) == slots(eqn)


@pytest.mark.smoke
def test_operations_of_one_class_with_the_same_parameters_are_the_same():
    def traced(kind, factor):
        return compat.open_jaxpr(jax.make_jaxpr(lambda x: kind(jax.typeof(x), factor)(x))(jnp.ones(3)))[0]

    structures = Structures()
    made = [(Scaled, 2.0), (Scaled, 2.0), (Scaled, 3.0), (Doubled, 2.0)]
    first, same, of_another_factor, of_another_class = (structures(traced(*x)) for x in made)
    assert same == first
    assert len({first, of_another_factor, of_another_class}) == 3


def in_calls(x):
    return jax.jit(lambda x: jax.jit(doubled)(x) + jnp.interp(x, EDGES, EDGES))(x)


def in_a_loop(x):
    return lax.fori_loop(0, 3, lambda i, y: y * jnp.searchsorted(EDGES, y) / 4, x)


def in_a_branch(x):
    return lax.cond(x.size > 0, doubled, jnp.sin, x)


def in_a_search(x):
    state = (0, lax.stop_gradient(x))
    return x * lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, doubled(c[1]) / 3), state)[1]


def every_way(x):
    return sum(fn(x) for fn in (in_calls, in_a_loop, in_a_branch, in_a_search))


def without_jvp(x):
    """As a class of the user's often is: a recomputed layer would not train."""
    return doubled(doubled(x, Scaled))


@pytest.mark.smoke
@pytest.mark.parametrize(("fn", "platform"), [(every_way, "cpu"), (every_way, "gpu"), (without_jvp, "gpu")])
def test_layers_with_such_operations_train_at_stage_3(fn, platform, monkeypatch):
    """On GPUs backward passes wait for gradients, and what waits is written anew."""
    on(platform, monkeypatch)
    turn = lambda x, w: (jnp.tanh(fn(x @ w)), None)

    def loss_fn(params, batch):
        x = batch
        for w in params["layers"]:
            x, _ = turn(x, w)
        return jnp.square(lax.scan(turn, x, params["stack"])[0]).mean()

    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / 5).astype(np.float32)
    params = {"layers": [draw(WIDTH, WIDTH) for _ in range(LAYERS)], "stack": draw(LAYERS, WIDTH, WIDTH)}
    batch = draw(16, WIDTH)
    state = shared.sharded(params, optax.sgd(1.0), 3)
    new, metrics = jzero.make_train_step(loss_fn)(state, batch)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    moved = jax.tree.map(np.subtract, params, whole(new.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), moved, grads)
