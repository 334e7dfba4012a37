"""Which gradients would be reduced more than once, if each use of a parameter reduced its own: of tied ones, say."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jzero import _compat
from jzero._lazy import Bundle, Lazy, defer, is_lazy, on_shard
from jzero._remat import REMAT
from jzero._walk import grouped, is_sliceable, only_indexed

__all__ = ["reduced_repeatedly"]

Equation = Any
Jaxpr = Any


@dataclasses.dataclass(frozen=True)
class _Parameter(Lazy):
    """A parameter without arrays, that knows which one it is.

    Attributes:
      index: Its place among the parameters.
    """

    index: int = 0


def reduced_repeatedly(jaxpr: Jaxpr, params: Sequence[Lazy | None]) -> frozenset[int]:
    """Returns the parameters of whose gradients more elements would be reduced than they have.

    Args:
      jaxpr: The loss.
      params: Its first inputs, of which the arrays are not read; `None` for one that is not asked about.
    """
    inputs: list[Any] = [v.aval for v in _compat.open_jaxpr(jaxpr)[0].invars]
    for i, x in enumerate(params):
        if x is not None:
            inputs[i] = _Parameter(None, None, None, x.cut, x.wire, x.wire_dtype, x.dtype, i)
    counter = _Counter()
    for y in counter.walk(jaxpr, inputs, 1):
        counter.use([y], 1)
    return frozenset(i for i, x in enumerate(params) if x is not None and counter.elements[i] > math.prod(x.shape))


class _Counter:
    """Counts what a walk over a loss would reduce; what depends on more than parameters is an aval to it.

    Attributes:
      elements: The elements that the walk so far reduces of each parameter.
    """

    def __init__(self) -> None:
        self.elements: collections.Counter[int] = collections.Counter()

    def use(self, values: Sequence[Any], times: int) -> None:
        """Notes one use of some values, together."""
        for x in Bundle.of(values).leaves:
            if isinstance(x, _Parameter):
                self.elements[x.index] += times * math.prod(x.shape)

    def walk(self, jaxpr: Jaxpr, inputs: Sequence[Any], times: int) -> list[Any]:
        """Goes through what is done `times` times; returns its results, lazy as they are."""

        def apply(eqn: Equation, inputs: list[Any]) -> list[Any]:
            if not any(map(is_lazy, inputs)):
                return [v.aval for v in eqn.outvars]
            if eqn.primitive.name == "sharding_constraint":
                return inputs
            kept = on_shard(eqn, inputs) or defer(eqn, inputs)
            if kept is not None:
                return [kept]
            name = eqn.primitive.name
            if name in ("jit", "pjit"):
                # What comes out of a call is another parameter than what went in, for all that is known outside.
                outputs = Bundle.of(self.walk(eqn.params["jaxpr"], inputs, times))
                return outputs.map(lambda x: dataclasses.replace(x) if is_lazy(x) else x).values()
            if name in REMAT:
                for y in self.walk(eqn.params["jaxpr"], inputs, times):
                    self.use([y], times)
            elif name == "scan":
                self._scan(eqn, inputs, times)
            else:
                self.use(inputs, times)
            return [v.aval for v in eqn.outvars]

        return _compat.evaluate(jaxpr, inputs, apply)

    def _scan(self, eqn: Equation, inputs: Sequence[Any], times: int) -> None:
        jaxpr, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        num_consts, num_carry = _compat.scan_groups(eqn)
        consts, init, xs = grouped(inputs, num_consts, num_carry)
        lazily = [is_lazy(x) and only_indexed(jaxpr, v) for x, v in zip(consts, jaxpr.invars, strict=False)]
        self.use([None if lazy else x for x, lazy in zip(consts, lazily, strict=True)] + init, times)
        values: list[Any] = [v.aval for v in jaxpr.invars]
        for i, (x, lazy) in enumerate(zip(consts, lazily, strict=True)):
            values[i] = x if lazy else values[i]
        for i, x in enumerate(xs, num_consts + num_carry):
            if is_sliceable(x):
                values[i] = x.drop_leading()
            else:
                self.use([x], times)
        times *= eqn.params["length"]
        for y in self.walk(jaxpr, values, times):
            self.use([y], times)
