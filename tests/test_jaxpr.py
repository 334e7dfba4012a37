"""Facts about programs: what primitives do, and how long values are held."""

from __future__ import annotations

from jzero.jaxpr import primitives


def test_every_primitive_has_one_row():
    """A name in two rows would silently have the traits of the last one."""
    names = [name for _, names in primitives._ROWS for name in names.split()]
    assert sorted(names) == sorted(primitives.TRAITS)
    assert primitives.CHEAP < primitives.LIGHT
    assert not primitives.LIGHT & primitives.primitives_with(primitives.Trait.MIXING | primitives.Trait.CALL)
