"""Meshes in equations, and sharding constraints inside the step.

    MeshFacts.in_equation(eqn) -> Meshes

An equation that names mesh axes, or has a mesh in a type, must be walked.

[Note: Meshes in types]
The loss is traced and differentiated outside the step's `shard_map`. The result of a sharding constraint carries its
mesh in its type, where ZeRO's axes are automatic like all others, and so does everything computed from it. Inside the
`shard_map`, ZeRO's axes are manual. An equation without jaxprs takes the types of its new inputs. An equation that
contains jaxprs keeps their types, which then do not match. So the walk enters these equations, or traces them again
inside the step.

If the mesh has Explicit axes, the loss is traced and differentiated on one that has them, too, and one device along
ZeRO's: each device has its own rows. So a line of the model may name ZeRO's axes as in a program without jzero, and as
jax leaves axes of one device out of types, it need not. In the walk all other axes are Auto: `reshard`, and what a line
says as `out_sharding`, become sharding constraints over these. No jaxpr may keep the mesh of the trace, since XLA ends
the process where a mesh of another size is in a program.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import NamedSharding

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.engine.lazy import is_lazy
from jzero.core.engine.placed import PLACED
from jzero.core.engine.shard_rules import constrain_lazy
from jzero.core.engine.shared_leaves import LazyRows, Value
from jzero.core.jaxpr.identity import IdDict


class Meshes(NamedTuple):
    """Facts about some jaxprs.

    Attributes:
      named: One names mesh axes, in a constraint or a `shard_map`, so everything around it must be walked.
      carried: One has a mesh in a type, or depends on the mesh of its trace, see [Note: Meshes in types].
    """

    named: bool
    carried: bool


class MeshFacts:
    """Facts about the meshes in the jaxprs of one trace; looks at each jaxpr once."""

    def __init__(self) -> None:
        self._facts: IdDict[Jaxpr, Meshes] = IdDict()

    def in_equation(self, eqn: JaxprEqn) -> Meshes:
        """Returns facts about the jaxprs in an equation."""
        inner = [self.of(jaxpr) for jaxpr in compat.contained_jaxprs(eqn)]
        return Meshes(any(x.named for x in inner), any(x.carried for x in inner)) if inner else Meshes(False, False)

    def of(self, jaxpr: AnyJaxpr) -> Meshes:
        """Returns facts about a jaxpr."""
        opened, _ = compat.open_jaxpr(jaxpr)
        if opened not in self._facts:
            inside = [self.in_equation(eqn) for eqn in opened.eqns]
            named = any(map(names_mesh, opened.eqns)) or any(x.named for x in inside)
            atoms = itertools.chain(opened.constvars, opened.invars, *((*e.invars, *e.outvars) for e in opened.eqns))
            # The lowering of these reads the manual axes off the mesh of the trace.
            asks = any(eqn.primitive in PLACED or eqn.primitive.name == "axis_index" for eqn in opened.eqns)
            carried = named or asks or any(x.carried for x in inside) or any(map(compat.has_mesh, atoms))
            self._facts[opened] = Meshes(named, carried)
        return self._facts[opened]


def names_mesh(eqn: JaxprEqn) -> bool:
    """Whether an equation itself names axes of the mesh."""
    if eqn.primitive.name in ("sharding_constraint", "shard_map"):
        return True
    if eqn.primitive.name == "reshard":
        return compat.sharding_said(eqn) is not None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))  # those of a `jit`
    return any(isinstance(s, NamedSharding) for s in shardings)


def constrain(x: Value, sharding: object) -> Value:
    """Applies a sharding constraint over the axes that are not manual: inside the step, ZeRO's are."""
    spec = compat.free_spec(sharding.spec) if isinstance(sharding, NamedSharding) else None
    if spec is None or isinstance(x, LazyRows):
        return x
    # The constraint of a lazy parameter applies to its shard, [D/N, F].
    return constrain_lazy(x, spec) if is_lazy(x) else lax.with_sharding_constraint(x, spec)
