"""Finds which rows of stacks a loop's body gathers, without a trace of it.

    first_gathers(jaxpr, inputs) -> {stack: dtype}

In the body

    { lambda ; x:f32[8,512] v:f32[512,512] w:f32[512,512]. let
        a:bf16[512,512] = convert_element_type[new_dtype=bfloat16] w
        b:f32[8,512] = dot_general[...] x a
        c:f32[8,512] = dot_general[...] b v
      in (c,) }

the row `w` is gathered first, in bf16, then `v`. Values that the walk keeps lazy, here `a`, are lazy here, too. Where
it decides otherwise, a turn gathers a row ahead in vain, or at its use: no result changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.types import DType
from jzero.core.engine.shard_rules import runs_on_shards, widens
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import CHEAP, RUNS, called_jaxpr


class LazyValue(NamedTuple):
    """A value made of rows and literals.

    Attributes:
      dtypes: The dtype in which each row is gathered, by its stack.
      stored: The dtype of the shard, if the value is a row, or a part of one, and so may be cast before the gather.
    """

    dtypes: Mapping[int, DType] = {}
    stored: DType | None = None


def first_gathers(jaxpr: AnyJaxpr, inputs: Sequence[LazyValue | None]) -> dict[int, DType]:
    """Returns the stacks whose rows a body gathers, in their order, each with the dtype of its first gather.

    Args:
      jaxpr: The body.
      inputs: Its inputs; `None` for arrays.
    """
    gathers: dict[int, DType] = {}

    def gather(values: Sequence[LazyValue | None]) -> None:
        for x in values:
            gathers.update({} if x is None else {j: dtype for j, dtype in x.dtypes.items() if j not in gathers})

    def apply(eqn: JaxprEqn, values: list[LazyValue | None]) -> Sequence[LazyValue | None]:
        name = eqn.primitive.name
        if name in RUNS:
            return run(called_jaxpr(eqn), values)
        if name in ("optimization_barrier", "reshard", "sharding_constraint"):
            return values
        result = _result(eqn, values)
        if result is None:  # a loop inside gathers its own rows
            gather(values[: sum(compat.scan_groups(eqn))] if name == "scan" else values)
        return [result, *[None] * (len(eqn.outvars) - 1)]

    def run(jaxpr: AnyJaxpr, inputs: Sequence[LazyValue | None]) -> list[LazyValue | None]:
        opened, consts = compat.open_jaxpr(jaxpr)
        return propagate(opened, [*[None] * len(consts), *inputs], apply, lambda _: LazyValue())

    run(jaxpr, inputs)
    return gathers


def _result(eqn: JaxprEqn, values: Sequence[LazyValue | None]) -> LazyValue | None:
    """Returns the result of an equation, if it is lazy, as `apply_on_shard` and `defer` decide."""
    if eqn.primitive.name not in CHEAP or len(eqn.outvars) != 1:
        return None
    arrays = [v for v, x in zip(eqn.invars, values, strict=True) if x is None]
    if len(arrays) == len(values) > 0 or any(math.prod(compat.type_of(v).shape) != 1 for v in arrays):
        return None
    dtypes = {j: dtype for x in values if x is not None for j, dtype in x.dtypes.items()}
    first = values[0] if values and runs_on_shards(eqn) else None
    if first is None or first.stored is None or eqn.primitive.name != "convert_element_type":
        return LazyValue(dtypes, first and first.stored)
    old, new = (jnp.dtype(compat.type_of(v).dtype) for v in (eqn.invars[0], eqn.outvars[0]))
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return LazyValue(dtypes)
    if widens(old, new):
        return first
    is_as_stored = {old} == {first.stored, *dtypes.values()}
    return LazyValue(dict.fromkeys(dtypes, new), first.stored) if is_as_stored else LazyValue(dtypes)
