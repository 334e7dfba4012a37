"""Facts about the values of one program: which equations make and read them, and whether they are zero.

    DefUse(jaxpr, reductions)

`gradient_rules` ask it before they let an equation run on shards; `reductions` are of the inputs that are shards.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.engine.gradient_exits import Reduction
from jzero.core.jaxpr.equations import equations_in
from jzero.core.jaxpr.products import mixes

RELABELS = frozenset(
    ["broadcast_in_dim", "convert_element_type", "copy", "reshard", "sharding_constraint", "transpose"]
)


class DefUse:
    """The values of a program, with the equations that make and read them.

    Attributes:
      eqns: The equations.
      reductions: The inputs that are shards of gradients, each with its reduction.
    """

    def __init__(self, jaxpr: Jaxpr, reductions: Mapping[Var, Reduction]) -> None:
        atoms = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
        # An output is a use, too: a value that is returned and read elsewhere cannot be a shard.
        self._uses = collections.Counter(v for v in atoms if not isinstance(v, Literal))
        self._definitions = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._first: dict[Var, int] = {}  # caches `_find_first_definition`
        self.eqns, self.reductions = jaxpr.eqns, reductions

    def is_free(self, atom: Atom) -> bool:
        """Whether nothing else reads a value, so that it can be a shard."""
        return (
            not isinstance(atom, Literal)
            and self._uses[atom] == 1
            and (atom in self._definitions or atom in self.reductions)
        )

    def find(self, atom: Atom) -> JaxprEqn | None:
        """Returns the equation that made a value; `None` for literals and inputs."""
        return (
            None if isinstance(atom, Literal) or atom not in self._definitions else self.eqns[self._definitions[atom]]
        )

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero."""
        if isinstance(atom, Literal):
            return not compat.type_of(atom).shape and bool(compat.value_of(atom) == 0)
        maker = self.find(atom)
        return maker is not None and maker.primitive.name == "broadcast_in_dim" and self.is_zero(maker.invars[0])

    @functools.cached_property
    def _loops(self) -> list[int]:
        nested = ((i, equations_in(eqn)) for i, eqn in enumerate(self.eqns) if any(compat.contained_jaxprs(eqn)))
        return [i for i, eqns in nested if any(x.primitive.name == "scan" and mixes(x) for x in eqns)]

    def is_loop_between(self, x: Atom, y: Atom) -> bool:
        """Whether a loop with products stands between the equations that made two gradients, or makes the second."""
        first, second = sorted(map(self._find_first_definition, (x, y)))
        return any(first < i <= second for i in self._loops)  # `<=`: the second may come out of the loop

    def _find_first_definition(self, atom: Atom) -> int:
        """Returns the index of the first equation that made a summand of a gradient; -1 for inputs and literals."""
        if isinstance(atom, Literal) or atom not in self._definitions:
            return -1
        if atom not in self._first:
            eqn = self.eqns[self._definitions[atom]]
            relabels = eqn.primitive.name in RELABELS or eqn.primitive.name == "add_any"
            self._first[atom] = (
                min(map(self._find_first_definition, eqn.invars)) if relabels else self._definitions[atom]
            )
        return self._first[atom]
