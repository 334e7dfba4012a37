"""How a program reads one of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jzero import _compat
from jzero.jaxpr.primitives import RUNS, called_jaxpr


def reads_of(jaxpr: Jaxpr, var: Var) -> Iterator[JaxprEqn]:
    """Yields the equations that read a variable; of calls and recomputed blocks, those in them."""
    for eqn in jaxpr.eqns:
        for i, x in enumerate(eqn.invars):
            if x is not var:
                continue
            if eqn.primitive.name in RUNS:
                body, _ = _compat.open_jaxpr(called_jaxpr(eqn))
                yield from reads_of(body, body.invars[i])
            else:
                yield eqn
