"""The one interpreter of jaxprs: values flow through a program, equation by equation.

    evaluate(jaxpr, inputs, apply) -> list[T]
    propagate(program, inputs, apply, of_literal) -> list[T]

`apply` makes the values of an equation's results from those of its inputs: arrays (`evaluate`), or facts (`propagate`):

    { lambda ; a b. let c = sin a; d = add c b in (d,) },  sets of inputs:  {a}, {b}  ->  c: {a},  d: {a, b}

Other passes have loops over equations of their own: those that write a program (`edit`), and those that make a table of
all variables (`regions`, `jzero.core.update.split`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom

T = TypeVar("T")


class EquationLike(Protocol):
    """An equation, or a run of several."""

    @property
    def invars(self) -> Sequence[Atom]:
        """What it reads."""

    @property
    def outvars(self) -> Sequence[Var]:
        """What it makes."""


S = TypeVar("S", bound=EquationLike)
E_co = TypeVar("E_co", bound=EquationLike, covariant=True)


class Program(Protocol[E_co]):
    """An open jaxpr, or what has the same attributes."""

    @property
    def constvars(self) -> Sequence[Var]:
        """Constants."""

    @property
    def invars(self) -> Sequence[Var]:
        """Inputs."""

    @property
    def outvars(self) -> Sequence[Atom]:
        """Outputs."""

    @property
    def eqns(self) -> Sequence[E_co]:
        """Equations, in order."""


class Piece(NamedTuple, Generic[S]):
    """A program of some equations of another one, or of runs of them."""

    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[S]
    constvars: Sequence[Var] = ()


def open_program(jaxpr: AnyJaxpr | Program[JaxprEqn]) -> tuple[Program[JaxprEqn], Sequence[Any]]:
    """Returns `(program, consts)` of an open or closed jaxpr, or of another program."""
    return compat.open_jaxpr(jaxpr) if isinstance(jaxpr, Jaxpr | ClosedJaxpr) else (jaxpr, ())


def propagate(
    program: Program[S],
    inputs: Iterable[T],
    apply: Callable[[S, list[T]], Iterable[T]],
    of_literal: Callable[[Literal], T],
) -> list[T]:
    """Returns the values of a program's outputs; drops values after their last use.

    Args:
      program: An open jaxpr.
      inputs: One value for each of its constants and inputs.
      apply: Returns the values of an equation's outputs, given those of its inputs.
      of_literal: Returns the value of a literal.

    Example:
      >>> from jzero.core.jaxpr.interpret import propagate
      >>> jaxpr = jax.make_jaxpr(lambda a, b: (jnp.sin(a) + b, b))(1.0, 1.0).jaxpr
      >>> propagate(jaxpr, [{"a"}, {"b"}], lambda eqn, sets: [set().union(*sets)], lambda literal: set())[1]
      {'b'}
    """
    env: dict[Var, T] = dict(zip((*program.constvars, *program.invars), inputs, strict=True))

    def read(atom: Atom) -> T:
        return of_literal(atom) if isinstance(atom, Literal) else env[atom]

    eqns = program.eqns
    last_use = {v: i for i, eqn in enumerate(eqns) for v in eqn.invars if not isinstance(v, Literal)}
    last_use.update({v: len(eqns) for v in program.outvars if not isinstance(v, Literal)})
    for i, eqn in enumerate(eqns):
        env.update(zip(eqn.outvars, apply(eqn, [read(v) for v in eqn.invars]), strict=True))
        for v in {v for v in eqn.invars if not isinstance(v, Literal)}:
            if last_use[v] == i:
                del env[v]
    return [read(v) for v in program.outvars]


def evaluate(
    jaxpr: AnyJaxpr | Program[JaxprEqn], inputs: Iterable[T], apply: Callable[[JaxprEqn, list[T]], Iterable[T]]
) -> list[T]:
    """Evaluates a jaxpr by `apply(equation, inputs)`, each in its own context."""

    def in_context(eqn: JaxprEqn, values: list[T]) -> Iterable[T]:
        with compat.equation_context(eqn):
            return apply(eqn, values)

    program, consts = open_program(jaxpr)
    return propagate(program, [*consts, *inputs], in_context, compat.value_of)
