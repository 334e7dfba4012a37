"""Makes a flat program: calls are inlined, and a branch over the matrices of several parameters becomes one for each.

    flattened(jaxpr, *, chooses) -> ClosedJaxpr

It computes the same, but each result depends on its own operands alone:

    a, b = cond(p, (a, b))     becomes     a = cond(p, a);  b = cond(p, b)

SOAP has one `cond` around its whole update, with another one around the bases of all parameters inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.jaxpr.interpret import evaluate, propagate
from jzero.core.jaxpr.primitives import RUNS, called_jaxpr
from jzero.core.jaxpr.sizes import mixes

FEW = 64
"""Operands of up to so many elements do not join the outputs of a `cond`: coefficients that all parameters share."""


def flattened(jaxpr: AnyJaxpr, *, chooses: bool = False) -> ClosedJaxpr:
    """Returns the flat closed jaxpr of a closed one, without dead equations.

    Args:
      jaxpr: The jaxpr.
      chooses: Whether a `cond` without matrix work becomes its branches and a choice between their results. Otherwise
        it stays as it is.
    """

    def apply(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        name = eqn.primitive.name
        if name in RUNS and not eqn.effects:
            return evaluate(called_jaxpr(eqn), inputs, apply)
        if name == "cond" and not eqn.effects and mixes(eqn):
            return _split(eqn, inputs)
        if name == "cond" and not eqn.effects and chooses:
            results = [evaluate(branch, inputs[1:], apply) for branch in eqn.params["branches"]]
            return [
                x[0] if all(y is x[0] for y in x) else lax.select_n(inputs[0], *x) for x in zip(*results, strict=True)
            ]
        return compat.bind(eqn, inputs)

    opened, _ = compat.open_jaxpr(jaxpr)
    shapes = [compat.shape_struct_of(v.aval) for v in opened.invars]
    flat = jax.make_jaxpr(lambda *xs: evaluate(jaxpr, xs, apply))(*shapes)
    return compat.with_outputs(flat, [True] * len(opened.outvars))


def _split(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
    """Computes a `cond` by several, one for each group of outputs that depend on common operands."""
    index, *operands = inputs
    branches = [flattened(branch) for branch in eqn.params["branches"]]
    reads = [set().union(*of_branches) for of_branches in zip(*map(_operands_of_outputs, branches), strict=True)]
    large = {k for k, x in enumerate(operands) if math.prod(jnp.shape(x)) > FEW}
    outputs: dict[int, jax.Array] = {}
    for group in _groups([read & large for read in reads]):
        used = sorted(set().union(*(reads[k] for k in group)))
        fns = [_part(branch, group, used) for branch in branches]
        for k, x in zip(group, lax.switch(index, fns, *(operands[k] for k in used)), strict=True):
            outputs[k] = x
    return [outputs[k] for k in range(len(eqn.outvars))]


def _groups(sets: Sequence[set[int]]) -> Iterable[list[int]]:
    """Returns the positions of sets in groups, so that sets with a common element are in one."""
    groups: list[tuple[set[int], list[int]]] = []
    for k, members in enumerate(sets):
        touching = [g for g in groups if g[0] & members]
        groups = [g for g in groups if not any(g is t for t in touching)]
        groups.append((members.union(*(g[0] for g in touching)), [*(i for g in touching for i in g[1]), k]))
    return (sorted(positions) for _, positions in groups)


def _operands_of_outputs(jaxpr: AnyJaxpr) -> list[set[int]]:
    """Returns for each output the numbers of the inputs that it depends on."""
    opened, _ = compat.open_jaxpr(jaxpr)

    def apply(eqn: JaxprEqn, read: list[set[int]]) -> list[set[int]]:
        return [set().union(*read)] * len(eqn.outvars)

    inputs = [*(set() for _ in opened.constvars), *({k} for k in range(len(opened.invars)))]
    return propagate(opened, inputs, apply, lambda literal: set())


def _part(jaxpr: AnyJaxpr, outputs: Sequence[int], used: Sequence[int]) -> Callable[..., list[jax.Array]]:
    """Returns the function from the operands in `used` to some outputs of a branch."""
    opened, _ = compat.open_jaxpr(jaxpr)
    part = compat.with_outputs(jaxpr, [k in outputs for k in range(len(opened.outvars))])

    unread = cast("jax.Array", None)  # stands for operands that the part does not read

    def run(*operands: jax.Array) -> list[jax.Array]:
        by_number = dict(zip(used, operands, strict=True))
        return evaluate(part, [by_number.get(k, unread) for k in range(len(opened.invars))], compat.bind)

    return run
