"""Pieces of a program that are the same but for their names, see [Note: Repeated blocks].

What cannot be compared is the same only if it is one object: a `custom_vjp`, say, has rules that are new in each layer,
and such layers are traced one by one. Rules of a `custom_jvp`, such as that of `jax.nn.relu`, are compared by what they
trace to.
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

__all__ = ["Common", "Structures", "is_worth_a_call"]

FEWEST = 16
"""Equations of a layer that becomes a call though it is not recomputed; of fewer a call takes as long."""


def is_worth_a_call(jaxpr: Any) -> bool:
    """Whether a piece of a program is long enough to be called, rather than traced wherever it occurs."""
    return _num_equations(_compat.open_jaxpr(jaxpr)[0]) >= FEWEST


def _num_equations(jaxpr: Any) -> int:
    inner = (_num_equations(inner) for eqn in jaxpr.eqns for inner in _compat.contained_jaxprs(eqn))
    return len(jaxpr.eqns) + sum(inner)


class Common(NamedTuple):
    """What an open jaxpr has in common with others, and what is its own.

    Attributes:
      constvars: Constants, as in a jaxpr.
      invars: Inputs, those for `numbers` last.
      outvars: Outputs.
      eqns: Equations, without `names`.
      names: The scopes that all equations are in.
      numbers: Literals that random keys are folded with, inputs instead.
    """

    constvars: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Any]
    names: tuple[Any, ...]
    numbers: Sequence[Any]

    @classmethod
    def of(cls, jaxpr: Any) -> Common:
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
    """The variable in place of a literal."""

    aval: Any
    literal: int


def _literals(eqn: Any) -> list[Any]:
    return [x for x in eqn.invars if _compat.is_literal(x)]


class Structures:
    """Numbers jaxprs: equal numbers go to those that do the same in scopes of the same names.

    What cannot be compared is the same only if it is the same object.
    """

    def __init__(self, *, in_rule: bool = False) -> None:
        self._of_rules = None if in_rule else Structures(in_rule=True)  # there functions count without their rules
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}  # with the jaxpr itself: no other gets its id

    def __call__(self, jaxpr: Any) -> int:
        """Returns the number of an open or closed jaxpr."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._numbers.setdefault(self._structure(jaxpr), len(self._numbers))
        return self._known[id(jaxpr)][1]

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
        """Returns an equation's parameters, with the jaxpr of a rule for tangents in place of the rule."""
        params = eqn.params
        is_manual = any(v.aval.manual_axis_type.varying for v in eqn.invars)  # a rule may make less of what varies
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
        """Returns a hashable value that is equal for equal parameters of equations alone.

        Objects of other libraries and of users may be equal and differ, so these are taken for what they are.
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
"""What says by `==` whether it is the same."""


def _bits(value: Any) -> Any:
    """Returns a number as what tells -0.0 from 0.0, and is equal to itself if it is not a number."""
    return type(value), np.asarray(value).dtype, np.asarray(value).tobytes()
