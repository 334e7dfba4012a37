"""Facts about programs: which equations an output needs, and what primitives do."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import pytest

from jzero import _compat
from jzero.jaxpr import primitives
from jzero.jaxpr.interpret import propagate
from jzero.jaxpr.liveness import find_needed


@pytest.mark.parametrize(
    ("wanted", "side_effects", "names", "inputs"),
    [
        ([0], True, ["sin", "mul", "debug_callback"], [True, True, False]),
        ([0], False, ["sin", "mul"], [True, True, False]),
        ([1], False, ["cos"], [False, False, True]),
        ([], False, [], [False, False, False]),
    ],
)
def test_needed_equations_are_those_that_wanted_outputs_depend_on(wanted, side_effects, names, inputs):
    def fn(a, b, c):
        unused = jnp.sin(a) * b
        jax.debug.callback(lambda x: None, a)
        return unused, jnp.cos(c)

    jaxpr, _ = _compat.open_jaxpr(jax.make_jaxpr(fn)(1.0, 2.0, 3.0))
    found = find_needed(jaxpr, [jaxpr.outvars[i] for i in wanted], side_effects=side_effects)
    assert [eqn.primitive.name for eqn, _ in found.equations] == names
    assert all(is_read == [True] for eqn, is_read in found.equations if eqn.outvars)
    read = [v in found.variables for v in jaxpr.invars]
    assert read == [x or (side_effects and i == 0) for i, x in enumerate(inputs)]


def test_every_primitive_has_one_row():
    """A name in two rows would silently have the traits of the last one."""
    names = [name for _, names in primitives._ROWS for name in names.split()]
    assert sorted(names) == sorted(primitives.TRAITS)
    assert primitives.CHEAP < primitives.LIGHT
    assert not primitives.LIGHT & primitives.primitives_with(primitives.Trait.MIXING | primitives.Trait.CALL)


def test_values_are_dropped_after_their_last_use():
    """A program in a chain holds what an equation reads, whatever its length."""

    class Value:
        pass

    alive, seen = weakref.WeakSet(), []

    def make():
        value = Value()
        alive.add(value)
        return value

    def apply(eqn, inputs):
        seen.append(len(alive))
        return [make()]

    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.tanh(jnp.exp(x)))))(1.0).jaxpr
    (last,) = propagate(jaxpr, (make() for _ in jaxpr.invars), apply, lambda literal: None)
    assert seen == [1, 1, 1, 1]
    assert list(alive) == [last]
