"""The matrix work of an update: which equations belong to one parameter, between which values, in which order."""

import jax
import jax.numpy as jnp
import numpy as np

from jzero.core.base import compat
from jzero.core.jaxpr import primitives
from jzero.core.jaxpr.flat import flattened
from jzero.core.jaxpr.regions import find_regions, flow_of
from jzero.core.jaxpr.sizes import cost_of, mixes
from tests.drawn import to_jax

A, B = (4, 6), (5, 3)


def flat(fn, *shapes):
    return compat.open_jaxpr(
        flattened(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))
    )[0]


def regions_of(fn, *shapes, anchors=()):
    """Returns the jaxpr, the regions and the reasons; each input belongs to the parameter of its position."""
    jaxpr = flat(fn, *shapes)
    owners = {v: frozenset([k]) for k, v in enumerate(jaxpr.invars)}
    known = {*shapes, *anchors}
    return jaxpr, *find_regions(jaxpr, owners, lambda v, owner: tuple(v.aval.shape) in known)


def drawn(*shapes):
    rng = np.random.default_rng(0)
    return [to_jax(rng.normal(size=shape), jnp.float32) for shape in shapes]


def gram(x):
    return (x @ x.T) @ x


def test_state_of_a_known_shape_bounds_a_region_and_another_one_does_not():
    def fn(a, q):
        return gram(a), q @ (a @ a.T)

    jaxpr = flat(fn, A, (4, 4))
    owners = dict.fromkeys(jaxpr.invars, frozenset([0]))
    (region,), refused = find_regions(jaxpr, owners, lambda v, owner: tuple(v.aval.shape) in {A, (4, 4)})
    assert not refused
    assert sorted(v.aval.shape for v in region.outputs) == [(4, 4), A]
    none, refused = find_regions(jaxpr, owners, lambda v, owner: tuple(v.aval.shape) == A)
    assert not none
    assert {why for _, why in refused.values()} == {"a result of shape (4, 4) has no layout"}


def test_regions_that_need_each_other_are_refused():
    def fn(a, b):
        x, y = gram(a), gram(b)
        return gram(x * jnp.linalg.norm(y)), gram(y * jnp.linalg.norm(x))

    _, regions, refused = regions_of(fn, A, B)
    assert not regions
    assert {why for _, why in refused.values()} == {"matrices depend on each other"}


def test_a_branch_over_several_parameters_becomes_one_for_each():
    def fn(p, a, b):
        turned = lambda a, b: (gram(a), gram(b))
        return jax.lax.cond(p[0] > 0, turned, lambda a, b: (a, b), a, b)

    jaxpr = flat(fn, (1,), (9, 12), (11, 10))  # more elements than coefficients that parameters may share
    assert [eqn.primitive.name for eqn in jaxpr.eqns if mixes(eqn)] == ["cond", "cond"]
    flow = flow_of(jaxpr, dict(zip(jaxpr.invars, map(frozenset, ([], [0], [1])), strict=True)))
    assert [flow[v] for v in jaxpr.outvars] == [{0}, {1}]
    plain = flat(lambda p, a, b: jax.lax.cond(p[0] > 0, lambda a, b: (a, b), lambda a, b: (2 * a, b), a, b), (1,), A, B)
    assert sum(eqn.primitive.name == "cond" for eqn in plain.eqns) == 1


def test_costs_are_those_of_products_in_loops_and_of_the_longest_branch():
    x = jnp.ones((4, 6))
    product = 2 * 4 * 6 * 4 + 24  # and the transposition
    cost = cost_of(jax.make_jaxpr(lambda x: x @ x.T)(x))
    assert cost == product
    loop = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c, x @ x.T), 0.0, length=7)[1])(x)
    assert cost_of(loop) == 7 * product
    branch = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x.T, lambda: jnp.ones((4, 4))))(x)
    assert product <= cost_of(branch) <= product + 100


def test_every_primitive_has_one_row():
    """A name in two rows would silently have the traits of the last one."""
    names = [name for _, names in primitives._ROWS for name in names.split()]
    assert sorted(names) == sorted(primitives.TRAITS)
    assert primitives.CHEAP < primitives.LIGHT
    assert not primitives.LIGHT & primitives.primitives_with(primitives.Trait.MIXING | primitives.Trait.CALL)
