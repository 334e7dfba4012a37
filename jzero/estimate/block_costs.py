"""What the repeated blocks of a loss take, each by itself: as written, kept, and as `remat="cheap"` recomputes them.

    BlockCosts(jaxpr, plan, machine).of("kept") -> list[BlockCost]

Each different block is traced and differentiated alone, on one device, and only if somebody asks: as the function that
the step calls if it treats the block so, and in its context, so that jax does not differentiate it again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.engine.kept_blocks import blocks_of
from jzero.core.engine.recompute import Treatment, functions_of
from jzero.core.engine.trace import axis_env
from jzero.core.jaxpr.interpret import evaluate
from jzero.core.jaxpr.repeats import EquationRun, aval_bytes
from jzero.core.layout.set_mesh import set_if_explicit
from jzero.core.plan.plan import ZeroPlan
from jzero.estimate.footprint import footprint
from jzero.estimate.step_time import compute_seconds
from jzero.estimate.traced import trace_program
from jzero.machines.machine import Machine


class BlockCost(NamedTuple):
    """What both passes of a block take.

    Attributes:
      num_bytes: What lies between the passes: what the forward pass saves, and what other blocks made and the backward
        pass reads.
      seconds: The time of both, without collectives; 0 without a machine.
    """

    num_bytes: int
    seconds: float


class BlockCosts:
    """The costs of the blocks of a loss on GPUs, in their order; those of loops count as none.

    Args:
      jaxpr: The loss.
      plan: The plan of its parameters.
      machine: The machine, if it is known.
    """

    def __init__(self, jaxpr: AnyJaxpr, plan: ZeroPlan, machine: Machine | None) -> None:
        self._plan, self._machine = plan, machine
        blocks, self._functions = list(blocks_of(jaxpr, fuses_products=False)), functions_of(jaxpr)
        runs = [x for x in blocks if not isinstance(x, JaxprEqn)]
        self._made = {v for x in runs for v in x.outvars}
        self._numbers = [None if isinstance(x, JaxprEqn) else self._functions.number(x) for x in blocks]
        self._blocks = {n: x for n, x in zip(self._numbers, blocks, strict=True) if not isinstance(x, JaxprEqn)}

    def of(self, how: Treatment) -> list[BlockCost]:
        """Returns what each block takes if all are treated in one way."""
        costs = {n: self._cost(x, how) for n, x in self._blocks.items()}
        return [BlockCost(0, 0.0) if n is None else costs[n] for n in self._numbers]

    def _cost(self, block: EquationRun, how: Treatment) -> BlockCost:
        axes = axis_env(self._plan)

        def both_passes(inputs: list[jax.Array], cotangents: list[jax.Array]) -> object:
            outputs, pull_back = jax.vjp(lambda *inputs: evaluate(called, [*consts, *inputs], compat.bind), *inputs)
            grads = pull_back([x if _is_real(x) else np.zeros(x.shape, jax.dtypes.float0) for x in cotangents])
            return outputs, [grad for x, grad in zip(inputs, grads, strict=True) if _is_real(x)]

        with set_if_explicit(self._plan.loss_mesh):
            shapes = [list(map(compat.shape_struct_of, (v.aval for v in x))) for x in (block.invars, block.outvars)]
            # Of inputs of exactly these types, so that jax knows what it has traced.
            called, consts = compat.traced(
                lambda *inputs: self._functions.call_block(block, inputs, how), [v.aval for v in block.invars], axes
            )
            jaxpr = jax.make_jaxpr(both_passes, axis_env=axes)(*shapes)
        program = trace_program(jaxpr, [1] * len(jaxpr.jaxpr.invars))
        read = frozenset[int]().union(*(x.reads for x in program.operations if x.backward))
        others = [v for i, v in enumerate(block.invars) if i in read and v in self._made]
        num_bytes = sum(x.num_bytes for x in footprint(program, gpu=True).residuals)
        num_bytes += sum(aval_bytes(compat.type_of(v)) for v in others)
        return BlockCost(num_bytes, 0.0 if self._machine is None else compute_seconds(program, self._machine))


def _is_real(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
