"""Facts about programs: what primitives do, and how long values are held."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp

from jzero.jaxpr import primitives
from jzero.jaxpr.interpret import propagate


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
