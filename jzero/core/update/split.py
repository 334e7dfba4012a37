"""Splits the jaxpr of an update: what needs only single elements of a parameter, their sums, and all the rest.

    split_update(jaxpr, fields) -> Split               the kind of each equation
    kernel_of(of, outputs, available) -> Kernel        computes results on arrays of any one shape: a shard, a record

A *field* is an array of its parameter's shape: a gradient, parameter, master or moment.

    g, m, p: fields            kernel_of(p'):  g, m, p, s -> p'     on chunks [C]
    s = sum(g * g)             kernel_of(g*g): g -> g * g           summed over chunks, to 0-d
    q, r = qr(m)               whole arrays; q is read by kernels like a field
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.typing import ArrayLike

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.jaxpr.interpret import Piece, propagate
from jzero.core.jaxpr.primitives import Trait, primitives_with

MOVES = frozenset("copy copy_p expand_dims reshape sharding_constraint squeeze".split())
"""Operations that return the elements of their operand in the same order."""

ELEMENTWISE = primitives_with(Trait.ELEMENTWISE) | {"bitcast_convert_type", "optimization_barrier", "threefry2x32"}


class Reducer(NamedTuple):
    """How an array becomes a number, part by part.

    Attributes:
      reduce: Reduces an array to a number.
      join: Joins the numbers of two parts.
      neutral: The number of an empty part.
    """

    reduce: Callable[..., jax.Array]
    join: Callable[..., jax.Array]
    neutral: float


REDUCTIONS = {
    "dot_general": Reducer(jnp.sum, lax.add, 0),  # of the product of the factors
    "reduce_and": Reducer(jnp.all, lax.bitwise_and, True),
    "reduce_max": Reducer(jnp.max, lax.max, -jnp.inf),
    "reduce_min": Reducer(jnp.min, lax.min, jnp.inf),
    "reduce_or": Reducer(jnp.any, lax.bitwise_or, False),
    "reduce_sum": Reducer(jnp.sum, lax.add, 0),
}
"""By primitive."""


class EquationKind(enum.Enum):
    """What an equation needs.

    Attributes:
      NUMBER: No field: numbers, counters, factored rows.
      FILL: A number as an array whose elements all equal it.
      ELEMENT: Elements of one parameter's fields at the same position.
      SUM: A sum, or the like, over a parameter's elements; its result is 0-d.
      WHOLE: Fields as a whole: products, sums over rows, loops.
      MIXED: Elements of several parameters.
    """

    NUMBER = enum.auto()
    FILL = enum.auto()
    ELEMENT = enum.auto()
    SUM = enum.auto()
    WHOLE = enum.auto()
    MIXED = enum.auto()


class Kernel(NamedTuple):
    """An elementwise function: from fields, arrays of their shape and numbers to arrays of their shape.

    Attributes:
      outs: The variables or literals that it returns.
    """

    reads: tuple[Var, ...]
    eqns: tuple[JaxprEqn, ...]
    outs: tuple[Atom, ...]

    def piece(self) -> Piece[JaxprEqn]:
        """Returns it in the form of an open jaxpr."""
        return Piece(self.reads, self.outs, self.eqns)

    def __call__(self, values: Sequence[jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
        """Returns its results on arrays of a shape; numbers among the `values` are 0-d."""

        def spread(atom: Atom, x: ArrayLike) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(x, compat.type_of(atom).dtype), shape)

        def apply(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
            if eqn.primitive.name in (*MOVES, "broadcast_in_dim"):
                return inputs[:1]
            if any(map(jnp.ndim, inputs)):  # numbers that were arrays become arrays again
                inputs = [
                    spread(v, x) if compat.type_of(v).shape else x for v, x in zip(eqn.invars, inputs, strict=True)
                ]
            with compat.equation_context(eqn):
                return compat.bind(eqn, inputs)

        results = propagate(self.piece(), values, apply, compat.value_of)
        return list(map(spread, self.outs, results))


class Split(NamedTuple):
    """An update's flat jaxpr, and the kinds of its equations.

    Attributes:
      jaxpr: The jaxpr, open and flat.
      kinds: The kind of each equation.
      elements: The parameter of each variable that is a field or computed from fields element by element; `None` for
        numbers in an array's shape.
      producers: For each variable, the number of the equation that makes it.
    """

    jaxpr: Jaxpr
    kinds: list[EquationKind]
    elements: dict[Var, int | None]
    producers: dict[Var, int]

    @property
    def mixed(self) -> list[str]:
        """The optax functions that mix the elements of several parameters."""
        return list(dict.fromkeys(self.maker(i) for i, kind in enumerate(self.kinds) if kind is EquationKind.MIXED))

    def maker(self, number: int) -> str:
        """Returns the optax function that made an equation, by its traceback or that of the closest equation."""
        numbers = sorted(range(len(self.jaxpr.eqns)), key=lambda i: (abs(i - number), i > number))
        names = filter(None, (_maker(self.jaxpr.eqns[i]) for i in numbers))  # those of jnp's functions tell nothing
        return next(names, str(self.jaxpr.eqns[number].primitive.name))


def split_update(jaxpr: Jaxpr, fields: Mapping[Var, int]) -> Split:
    """Splits a flat, open jaxpr; `fields` are its inputs that are fields, and the number of each one's parameter."""
    elements: dict[Var, int | None] = dict(fields)
    kinds: list[EquationKind] = []
    producers: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        kind, owner = _kind_of(eqn, elements)
        kinds.append(kind)
        producers.update((v, i) for v in eqn.outvars)
        if kind in (EquationKind.ELEMENT, EquationKind.FILL):
            elements.update((v, owner) for v in eqn.outvars)
    return Split(jaxpr, kinds, elements, producers)


def _kind_of(eqn: JaxprEqn, elements: Mapping[Var, int | None]) -> tuple[EquationKind, int | None]:
    """Returns the kind of an equation, and the parameter of its elements."""
    name, outs = eqn.primitive.name, list(map(compat.type_of, eqn.outvars))
    read = [v for v in eqn.invars if not compat.is_literal(v) and v in elements]
    shaped = [v for v in eqn.invars if getattr(v.aval, "shape", ())]
    params = {elements[v] for v in read} - {None}
    if not params:
        spreads = name == "broadcast_in_dim" or (shaped and _is_elementwise(eqn, compat.type_of(shaped[0]).shape))
        is_fill = spreads and len(read) == len(shaped) and outs[0].shape
        return (EquationKind.FILL if is_fill else EquationKind.NUMBER), None
    if len(params) > 1:
        return EquationKind.MIXED, None
    (owner,) = params
    shape = next(compat.type_of(v).shape for v in read if elements[v] is not None)
    if _is_elementwise(eqn, shape):
        return EquationKind.ELEMENT, owner
    is_sum = name in REDUCTIONS and outs[0].shape == () and all(compat.type_of(v).shape == shape for v in shaped)
    is_bounded = name not in ("reduce_max", "reduce_min") or jnp.issubdtype(outs[0].dtype, jnp.inexact)
    return (EquationKind.SUM if is_sum and is_bounded else EquationKind.WHOLE), owner


def _is_elementwise(eqn: JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Whether an equation computes each element of its results from elements at the same position."""
    if eqn.primitive.name in MOVES:
        return math.prod(compat.type_of(eqn.outvars[0]).shape) == math.prod(shape)
    same = all(compat.type_of(v).shape in ((), shape) for v in eqn.invars) and all(
        compat.type_of(v).shape == shape for v in eqn.outvars
    )
    return eqn.primitive.name in ELEMENTWISE and same


def kernel_of(of: Split, outputs: Sequence[Atom], available: Collection[Var] = ()) -> Kernel:
    """Returns the function of some variables: elements, arrays of their parameter's shape, or literals.

    Args:
      of: The split.
      outputs: What it returns.
      available: Variables that it reads even if it could compute them.
    """
    reads: dict[Var, None] = {}
    needed: set[int] = set()
    waiting = [v for v in outputs if not compat.is_literal(v)]
    while waiting:
        v = waiting.pop()
        i = of.producers.get(v)
        if i is None or v in available or v not in of.elements:
            reads[v] = None
        elif i not in needed:
            needed.add(i)
            waiting += [x for x in of.jaxpr.eqns[i].invars if not compat.is_literal(x)]
    return Kernel(tuple(reads), tuple(of.jaxpr.eqns[i] for i in sorted(needed)), tuple(outputs))


def _maker(eqn: JaxprEqn) -> str:
    """Returns the name of the optax function that made an equation; an empty string if that is unknown."""
    traceback = eqn.source_info.traceback
    frames: Sequence[Any] = traceback.frames if traceback else ()
    for frame in frames:
        if "optax" in frame.file_name and ".update" in frame.function_name:
            return str(frame.function_name).split(".")[0]
    return ""
