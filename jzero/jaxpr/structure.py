"""Finds pieces of a program that are equal except for their names; see [Note: Repeated blocks].

Values without a reliable comparison are equal only if they are the same object. For example, each layer's `custom_vjp`
has new rules, so jzero traces such layers one by one. It compares the rules of a `custom_jvp`, such as that of
`jax.nn.relu`, by their traces.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero import _compat
from jzero._compat import AnyJaxpr
from jzero.jaxpr.identity import IdDict

FEWEST = 16
"""Fewest equations of a layer that becomes a call without being recomputed; with fewer, a call takes as long."""


def is_worth_a_call(jaxpr: Any) -> bool:
    """Whether a piece of a program is long enough to become a call, instead of being traced wherever it occurs."""
    return _num_equations(_compat.open_jaxpr(jaxpr)[0]) >= FEWEST


def _num_equations(jaxpr: Any) -> int:
    inner = (_num_equations(inner) for eqn in jaxpr.eqns for inner in _compat.contained_jaxprs(eqn))
    return len(jaxpr.eqns) + sum(inner)


class CanonicalJaxpr(NamedTuple):
    """An open jaxpr with scopes and fold-in constants factored out, so that repeated layers compare equal.

    Attributes:
      constvars: Constants, as in a jaxpr.
      invars: Inputs; those for `numbers` come last.
      outvars: Outputs.
      eqns: Equations, with `names` removed from their scopes.
      names: The scopes that all equations share.
      numbers: Literals folded into random keys, now inputs.
    """

    constvars: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Any]
    names: tuple[Any, ...]
    numbers: Sequence[Any]

    @classmethod
    def of(cls, jaxpr: Any) -> CanonicalJaxpr:
        """Splits an open jaxpr."""
        levels = zip(*map(_compat.names_of, jaxpr.eqns), strict=False)
        names = tuple(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
        literals = {id(x): x for eqn in jaxpr.eqns if eqn.primitive.name == "random_fold_in" for x in _literals(eqn)}
        eqns = [
            _compat.changed(
                eqn,
                inputs=[_Hole(x.aval, id(x)) if id(x) in literals else x for x in eqn.invars],
                names=_compat.names_of(eqn)[len(names) :],
            )
            for eqn in jaxpr.eqns
        ]
        holes = [_Hole(x.aval, id(x)) for x in literals.values()]
        numbers = [_compat.value_of(x) for x in literals.values()]
        return cls(jaxpr.constvars, [*jaxpr.invars, *holes], jaxpr.outvars, eqns, names, numbers)


class _Hole(NamedTuple):
    """A variable that replaces a literal."""

    aval: Any
    literal: int


def _literals(eqn: Any) -> list[Any]:
    return [x for x in eqn.invars if _compat.is_literal(x)]


class Structures:
    """Numbers jaxprs, so that those with equal operations in equally named scopes get the same number.

    Values without a reliable comparison are equal only if they are the same object.
    """

    def __init__(self, *, in_rule: bool = False) -> None:
        self._of_rules = None if in_rule else Structures(in_rule=True)  # in a rule, functions count without theirs
        self._numbers: dict[Any, int] = {}
        self._known: IdDict[AnyJaxpr | CanonicalJaxpr, int] = IdDict()

    def __call__(self, jaxpr: Any) -> int:
        """Returns the number of an open or closed jaxpr."""
        if jaxpr not in self._known:
            self._known[jaxpr] = self._numbers.setdefault(self._structure(jaxpr), len(self._numbers))
        return self._known[jaxpr]

    def _structure(self, jaxpr: Any) -> Any:
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
        numbers: dict[Any, int] = {}

        def made(variables: Sequence[Any]) -> Any:
            numbers.update({v: len(numbers) + i for i, v in enumerate(variables)})
            return tuple(v.aval for v in variables)

        def read(atom: Any) -> Any:
            return (atom.aval, _bits(atom.val)) if _compat.is_literal(atom) else numbers[atom]

        inputs = made([*jaxpr.constvars, *jaxpr.invars])
        eqns = tuple(
            (
                eqn.primitive,
                tuple(map(read, eqn.invars)),
                made(eqn.outvars),
                self._comparable(self._params(eqn)),
                eqn.ctx,
                _compat.names_of(eqn),
            )
            for eqn in jaxpr.eqns
        )
        return tuple(map(id, consts)), inputs, eqns, tuple(map(read, jaxpr.outvars))

    def _params(self, eqn: Any) -> dict[str, Any]:
        """Returns an equation's parameters, with the number of a tangent rule's jaxpr in place of the rule."""
        params = eqn.params
        is_manual = any(v.aval.manual_axis_type.varying for v in eqn.invars)  # a rule's results may vary less
        if eqn.primitive.name != "custom_jvp_call" or params["symbolic_zeros"] or is_manual:
            return params
        others = {k: v for k, v in params.items() if k != "jvp_jaxpr_fun"}
        if self._of_rules is None:
            return others
        moving = [i for i, v in enumerate(eqn.invars) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]

        def jvp(values: list[Any], tangents: list[Any]) -> Any:
            def fn(*some: Any) -> list[Any]:
                given = dict(zip(moving, some, strict=True))
                return _compat.bind(eqn, [given.get(i, x) for i, x in enumerate(values)])

            return jax.jvp(fn, [values[i] for i in moving], tangents)

        with _compat.where_traced(eqn):
            shapes = [_compat.shape_of(v.aval) for v in eqn.invars]
            rule = jax.make_jaxpr(jvp)(shapes, [shapes[i] for i in moving])
        return others | {"rule": self._of_rules(rule)}

    def _comparable(self, value: Any) -> Any:
        """Returns a hashable value; only equal parameters of equations get equal values.

        Objects of users and other libraries may differ and yet compare equal, so they compare by identity.
        """
        kind = type(value)
        if isinstance(value, dict):
            return kind, tuple((self._comparable(key), self._comparable(x)) for key, x in value.items())
        if isinstance(value, tuple | list):
            return kind, tuple(map(self._comparable, value))
        if hasattr(value, "eqns"):
            return kind, self(value)
        if isinstance(value, float | complex | np.generic):
            return _bits(value)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("jax."):
            return kind, tuple(self._comparable(getattr(value, field.name)) for field in dataclasses.fields(kind))
        return (kind, value) if isinstance(value, _COMPARED) else (kind, id(value))


_COMPARED = (
    bool,
    int,
    str,
    bytes,
    enum.Enum,
    np.dtype,
    jax.sharding.Sharding,
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
)
"""Types whose `==` is reliable."""


def _bits(value: Any) -> Any:
    """Returns a number's type, dtype and bytes, which tell -0.0 from 0.0 and make NaN equal to itself."""
    return type(value), np.asarray(value).dtype, np.asarray(value).tobytes()
