"""Finds pieces of a program that are equal except for their names; see [Note: Repeated blocks].

Values without a reliable comparison are equal only if they are the same object. The rules of a `custom_jvp`, such as
that of `jax.nn.relu`, and of a `custom_vjp`, such as that of a kernel, are new objects in each layer, so jzero compares
their traces.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom, Scopes
from jzero.core.base.types import Params
from jzero.core.jaxpr.equations import equations_in
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import Program, open_program

FEWEST = 16
"""Fewest equations of a layer that becomes a call without being recomputed; with fewer, a call takes as long."""


def is_worth_a_call(jaxpr: AnyJaxpr | Program[JaxprEqn]) -> bool:
    """Whether a piece of a program is long enough to become a call, instead of being traced wherever it occurs."""
    eqns = (x for eqn in open_program(jaxpr)[0].eqns for x in equations_in(eqn))
    return next(itertools.islice(eqns, FEWEST - 1, None), None) is not None


class CanonicalJaxpr(NamedTuple):
    """An open jaxpr with scopes and fold-in constants factored out, so that repeated layers compare equal.

    Attributes:
      invars: Inputs; those for `numbers` come last.
      eqns: Equations, with `names` removed from their scopes.
      names: The scopes that all equations share.
      numbers: Literals folded into random keys, now inputs.
    """

    constvars: Sequence[Var]
    invars: Sequence[Var]
    outvars: Sequence[Atom]
    eqns: Sequence[JaxprEqn]
    names: Scopes
    numbers: Sequence[jax.Array]

    @classmethod
    def of(cls, jaxpr: Program[JaxprEqn]) -> CanonicalJaxpr:
        """Splits an open jaxpr."""
        levels = zip(*map(compat.names_of, jaxpr.eqns), strict=False)
        names = tuple(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
        literals = {id(x): x for eqn in jaxpr.eqns if eqn.primitive.name == "random_fold_in" for x in _literals(eqn)}
        eqns = [
            compat.changed(
                eqn,
                inputs=[_hole(x) if id(x) in literals else x for x in eqn.invars],
                names=compat.names_of(eqn)[len(names) :],
            )
            for eqn in jaxpr.eqns
        ]
        holes = list(map(_hole, literals.values()))
        numbers = [compat.value_of(x) for x in literals.values()]
        return cls(jaxpr.constvars, [*jaxpr.invars, *holes], jaxpr.outvars, eqns, names, numbers)


class _Hole(NamedTuple):
    """A variable that replaces a literal: equal wherever that is the same."""

    aval: jax.core.AbstractValue
    literal: int


def _hole(literal: Atom) -> Var:
    return cast("Var", _Hole(literal.aval, id(literal)))


def _literals(eqn: JaxprEqn) -> list[Literal]:
    return [x for x in eqn.invars if compat.is_literal(x)]


class Structures:
    """Numbers jaxprs, so that those with equal operations in equally named scopes get the same number.

    Values without a reliable comparison are equal only if they are the same object.
    """

    def __init__(self, *, in_rule: bool = False) -> None:
        self._of_rules = None if in_rule else Structures(in_rule=True)  # in a rule, functions count without theirs
        self._numbers: dict[Hashable, int] = {}
        self._ids: IdDict[AnyJaxpr | Program[JaxprEqn], int] = IdDict()

    def __call__(self, jaxpr: AnyJaxpr | Program[JaxprEqn]) -> int:
        """Returns the number of an open or closed jaxpr."""
        if jaxpr not in self._ids:
            self._ids[jaxpr] = self._numbers.setdefault(self._structure(jaxpr), len(self._numbers))
        return self._ids[jaxpr]

    def _structure(self, jaxpr: AnyJaxpr | Program[JaxprEqn]) -> Hashable:
        program, consts = open_program(jaxpr)
        numbers: dict[Var, int] = {}

        def define(variables: Sequence[Var]) -> Hashable:
            numbers.update({v: len(numbers) + i for i, v in enumerate(variables)})
            return tuple(compat.type_to_compare(v.aval) for v in variables)

        def read(atom: Atom) -> Hashable:
            return (compat.type_to_compare(atom.aval), _bits(atom.val)) if compat.is_literal(atom) else numbers[atom]

        inputs = define([*program.constvars, *program.invars])
        eqns = tuple(
            (
                eqn.primitive,
                tuple(map(read, eqn.invars)),
                define(eqn.outvars),
                self._comparable(self._params(eqn)),
                eqn.ctx,
                compat.names_of(eqn),
            )
            for eqn in program.eqns
        )
        return tuple(map(id, consts)), inputs, eqns, tuple(map(read, program.outvars))

    def _params(self, eqn: JaxprEqn) -> Params:
        """Returns an equation's parameters, with the number of a rule's jaxpr in place of the rule."""
        params, kind = eqn.params, eqn.primitive.name
        if kind not in _RULES or params["symbolic_zeros"]:
            return params
        if any(compat.type_of(v).manual_axis_type.varying for v in eqn.invars):  # a rule's results may vary less
            return params
        others = {k: v for k, v in params.items() if k not in _RULES[kind]}
        if self._of_rules is None:
            return others
        floats = [i for i, v in enumerate(eqn.invars) if jnp.issubdtype(compat.type_of(v).dtype, jnp.inexact)]
        closed_over = params["num_consts"] if kind == "custom_vjp_call" else 0  # such have no derivative
        differentiable = [i for i in floats if i >= closed_over]

        def derivative(values: list[jax.Array], given: list[jax.Array]) -> tuple[Any, Any]:
            def fn(*some: jax.Array) -> list[jax.Array]:
                changed = dict(zip(differentiable, some, strict=True))
                return compat.bind(eqn, [changed.get(i, x) for i, x in enumerate(values)])

            at = [values[i] for i in differentiable]
            if kind == "custom_jvp_call":
                return jax.jvp(fn, at, given)
            results, pull = jax.vjp(fn, *at)
            return results, pull(given)

        with compat.where_traced(eqn):
            shapes = [compat.shape_struct_of(v.aval) for v in eqn.invars]
            given = [shapes[i] for i in differentiable]
            if kind == "custom_vjp_call":
                given = [compat.shape_struct_of(v.aval) for v in eqn.outvars]
                if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in given):
                    return params
            rule = jax.make_jaxpr(derivative)(shapes, given)
        return others | {"rule": self._of_rules(rule)}

    def _comparable(self, value: object) -> Hashable:
        """Returns a hashable value; only equal parameters of equations get equal values.

        Objects of users and other libraries may differ and yet compare equal, so they compare by identity.
        """
        kind = type(value)
        if kind in _PLAIN or (isinstance(value, tuple) and kind is tuple and {type(x) for x in value} <= _PLAIN):
            return kind, value
        if isinstance(value, Mapping):
            return kind, tuple((self._comparable(key), self._comparable(x)) for key, x in value.items())
        if isinstance(value, tuple | list):
            return kind, tuple(map(self._comparable, value))
        if isinstance(value, Jaxpr | ClosedJaxpr):
            return kind, self(value)
        if isinstance(value, compat.HighPrimitive):  # its class and parameters say all of it
            return kind, self._comparable(value.params)
        if isinstance(value, float | complex | np.generic):
            return _bits(value)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("jax."):
            return kind, tuple(self._comparable(getattr(value, field.name)) for field in dataclasses.fields(kind))
        return (kind, value) if isinstance(value, _COMPARED) else (kind, id(value))


_RULES = {"custom_jvp_call": {"jvp_jaxpr_fun"}, "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"}}
"""The parameters that are rules of derivatives."""
_PLAIN = frozenset([int, str, type(None)])
"""Types whose `==` is reliable, in tuples, too, where a `bool` would be equal to an `int`."""
_COMPARED = (
    bool,
    int,
    str,
    bytes,
    enum.Enum,
    np.dtype,
    jax.core.AbstractValue,
    jax.tree_util.PyTreeDef,
    jax.sharding.Sharding,
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    *compat.GROUPS_OF_INPUTS,
)
"""Types whose `==` is reliable by themselves."""


def _bits(value: float | complex | np.generic) -> Hashable:
    """Returns a number's type, dtype and bytes, which tell -0.0 from 0.0 and make NaN equal to itself."""
    return type(value), np.asarray(value).dtype, np.asarray(value).tobytes()
