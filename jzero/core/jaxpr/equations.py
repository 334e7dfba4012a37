"""Searches programs for equations: all of them, however deep, or those that read one input.

    find_needed(jaxpr, outputs, *, side_effects, available) -> Needed

It finds the equations that these outputs depend on, in order, each with a flag per result that says whether anything
reads it; and all variables that they depend on, inputs of the jaxpr included:

    { lambda ; a b. let c = sin a; d = cos b in (c, d) },  outputs: c    ->    [c = sin a],  {a, c}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom
from jzero.core.jaxpr.primitives import RUNS, called_jaxpr


def equations_of(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """Yields all equations of a jaxpr, and those of the jaxprs that they contain."""
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        yield from equations_in(eqn)


def equations_in(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields an equation, and all equations of the jaxprs that it contains."""
    yield eqn
    for jaxpr in compat.contained_jaxprs(eqn):
        yield from equations_of(jaxpr)


def reads_of(jaxpr: Jaxpr, var: Var) -> Iterator[JaxprEqn]:
    """Yields the equations that read a variable; of calls and recomputed blocks, those in them."""
    for eqn in jaxpr.eqns:
        for i, x in enumerate(eqn.invars):
            if x is not var:
                continue
            if eqn.primitive.name in RUNS:
                body, _ = compat.open_jaxpr(called_jaxpr(eqn))
                yield from reads_of(body, body.invars[i])
            else:
                yield eqn


class Needed(NamedTuple):
    """The equations and variables that some outputs of a jaxpr depend on.

    Attributes:
      equations: The equations in order, each with one flag per output: whether anything reads it.
      variables: The variables, including the outputs.
    """

    equations: list[tuple[JaxprEqn, list[bool]]]
    variables: set[Var]


def find_needed(
    jaxpr: AnyJaxpr, outputs: Iterable[Atom], *, side_effects: bool = True, available: Collection[Atom] = ()
) -> Needed:
    """Returns the equations and variables that some variables of an open jaxpr depend on.

    Args:
      jaxpr: An open jaxpr.
      outputs: Variables or literals of the jaxpr.
      side_effects: Whether equations with side effects, such as printing, are needed even if their outputs are unread.
      available: Variables whose values exist, so that no equation has to make them.
    """
    variables = {v for v in outputs if not compat.is_literal(v)}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        is_read = [v in variables and v not in available for v in eqn.outvars]
        if any(is_read) or (side_effects and compat.has_side_effects(eqn)):
            equations.append((eqn, is_read))
            variables.update(v for v in eqn.invars if not compat.is_literal(v))
    return Needed(equations[::-1], variables)
