"""Evaluates equations whose operands must be whole on all devices: each gathers them, and all compute the same.

    Everywhere(plan)(eqn, operands) -> results      arrays in natural shape

Matrix work that cannot be divided runs so, see
[Note: Matrices on one device each], also inside of a `cond`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.interpret import evaluate
from jzero.core.jaxpr.primitives import RUNS, called_jaxpr
from jzero.core.jaxpr.products import mixes
from jzero.core.layout.mesh import batch_axes
from jzero.core.plan.plan import ZeroPlan


class Everywhere:
    """Applies equations to arrays on the devices of a plan, to whole ones if they mix elements."""

    def __init__(self, plan: ZeroPlan) -> None:
        self.plan = plan
        self._gathered: IdDict[jax.Array, jax.Array] = IdDict()

    def __call__(self, eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        """Returns the results of an equation."""
        if not mixes(eqn):
            return compat.bind(eqn, inputs)
        if eqn.primitive.name in RUNS:
            return evaluate(called_jaxpr(eqn), inputs, self)
        if eqn.primitive.name == "cond":
            return list(lax.switch(inputs[0], [self._function(x) for x in eqn.params["branches"]], *inputs[1:]))
        fn = jax.shard_map(
            lambda *xs: tuple(compat.bind(eqn, xs)),
            mesh=self.plan.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=set(batch_axes(self.plan.config)),
            check_vma=False,
        )
        return list(fn(*map(self._gather, inputs)))

    def _function(self, jaxpr: AnyJaxpr) -> Callable[..., list[jax.Array]]:
        return lambda *inputs: evaluate(jaxpr, inputs, self)

    def _gather(self, x: jax.Array) -> jax.Array:
        """Returns an array whole on every device; the same one for each use."""
        if not jnp.ndim(x):
            return x
        if x not in self._gathered:
            self._gathered[x] = lax.with_sharding_constraint(x, self.plan.whole_sharding)
        return self._gathered[x]
