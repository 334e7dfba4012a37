"""Searches programs for equations: all of them, however deep, or those that read one input."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
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
