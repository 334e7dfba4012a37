"""Programs under construction: a pass appends equations, old and new, to an `Editor`.

An equation that stays keeps its variables, so a pass costs what it changes, and most of a program is not traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom
from jzero.core.base.types import Params, PyTree
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import CALLS, REMAT


class Editor:
    """A program under construction.

    Attributes:
      eqns: The equations so far.
      stands_for: For variables of the old program, what replaces them.
    """

    def __init__(self, stands_for: Mapping[Var, Atom] | None = None) -> None:
        self.eqns: list[JaxprEqn] = []
        self.stands_for: dict[Var, Atom] = dict(stands_for or {})

    def read(self, atom: Atom) -> Atom:
        """Returns what replaces an atom; itself if nothing does."""
        return atom if isinstance(atom, Literal) else self.stands_for.get(atom, atom)

    def keep(self, eqn: JaxprEqn) -> None:
        """Appends an old equation, which keeps its results."""
        inputs = [self.read(v) for v in eqn.invars]
        is_same = all(a is b for a, b in zip(inputs, eqn.invars, strict=True))
        self.eqns.append(eqn if is_same else eqn.replace(invars=inputs))

    def bind(
        self,
        primitive: Primitive,
        inputs: Sequence[Atom],
        outputs: Sequence[Var],
        scope: JaxprEqn | None,
        **params: object,
    ) -> None:
        """Appends a new equation, in the scopes of another one."""
        self.eqns.append(compat.new_equation(primitive, inputs, outputs, params, scope))

    def trace(self, fn: Callable[..., PyTree], inputs: Sequence[Atom], scope: JaxprEqn | None) -> list[Atom]:
        """Appends the equations of a function of arrays, in the scopes of an equation; returns its results."""
        jaxpr, consts = compat.traced(fn, [v.aval for v in inputs])
        constants: list[Atom] = [compat.literal(x, v.aval) for v, x in zip(jaxpr.constvars, consts, strict=True)]

        def append(eqn: JaxprEqn, values: list[Atom]) -> list[Var]:
            outs = [compat.variable(v.aval) for v in eqn.outvars]
            self.eqns.append(compat.moved(eqn, values, outs, scope))
            return outs

        return propagate(jaxpr, [*constants, *inputs], append, lambda literal: literal)


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether an equation is a block that `jax.checkpoint` recomputes in the backward pass, or a call of one."""
    if eqn.primitive.name in CALLS:
        return any(map(is_recomputed, next(compat.contained_jaxprs(eqn)).eqns))
    return eqn.primitive.name in REMAT and bool(eqn.params["differentiated"])


def params_of_call(eqn: JaxprEqn, jaxpr: AnyJaxpr, is_changed: Sequence[bool] = ()) -> Params:
    """Returns the parameters of a call, recomputed block or loop that runs another jaxpr.

    Args:
      eqn: The equation.
      jaxpr: What it runs.
      is_changed: For each result, whether its shape changes, so that a call's sharding no longer holds; default: none.
    """
    name = next(name for name in ("jaxpr", "call_jaxpr") if name in eqn.params)
    params = {**eqn.params, name: jaxpr}
    if is_changed and "out_shardings" in params:
        for key, default in (("out_shardings", compat.UNSPECIFIED), ("out_layouts", None)):
            pairs = zip(params[key], is_changed, strict=True)
            params[key] = tuple(default if changed else x for x, changed in pairs)
    return params


def params_retraced(eqn: JaxprEqn, function_of: Callable[[Jaxpr], Callable[..., PyTree]]) -> Params:
    """Returns the parameters of an equation that hold jaxprs, each traced again, as `function_of` it, by the caller."""

    def anew(jaxpr: Jaxpr) -> AnyJaxpr:
        closed = jax.make_jaxpr(function_of(jaxpr))(*map(compat.shape_struct_of, jaxpr.in_avals))
        return closed if hasattr(jaxpr, "consts") else compat.open_jaxpr(closed)[0]

    holding = {k: v for k, v in eqn.params.items() if any(jaxprs_in_params({k: v}))}
    return dict(jax.tree.map(anew, holding))
