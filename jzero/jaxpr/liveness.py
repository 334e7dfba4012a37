"""Which equations of a jaxpr are needed for some of its outputs.

In: a jaxpr and the outputs that are wanted. Out: the equations that they depend on, in order, with which of their own
outputs somebody reads, and all variables that they depend on, the jaxpr's inputs among them:

    { lambda ; a b. let c = sin a; d = cos b in (c, d) },  wanted: c    ->    [c = sin a],  {a, c}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from jzero import _compat

__all__ = ["Needed", "needed"]

Equation = Any
Atom = Any


class Needed(NamedTuple):
    """What some outputs of a jaxpr depend on.

    Attributes:
      equations: The equations, in order; for each output of an equation, whether anything reads it.
      variables: The variables, the wanted outputs themselves included.
    """

    equations: list[tuple[Equation, list[bool]]]
    variables: set[Any]


def needed(jaxpr: Any, wanted: Iterable[Atom], *, side_effects: bool = True) -> Needed:
    """Returns what some variables of an open jaxpr depend on.

    Args:
      jaxpr: An open jaxpr.
      wanted: Variables or literals of it.
      side_effects: Whether equations with side effects, such as printing, are needed whoever reads their outputs.
    """
    variables = {v for v in wanted if not _compat.is_literal(v)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        is_read = [v in variables for v in eqn.outvars]
        if any(is_read) or (side_effects and _compat.has_side_effects(eqn)):
            equations.append((eqn, is_read))
            variables.update(v for v in eqn.invars if not _compat.is_literal(v))
    return Needed(equations[::-1], variables)
