"""Recomputation of a traced loss: loops whose passes are recomputed in the backward pass, or no recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jzero import _compat

__all__ = ["REMAT", "recomputes", "with_remat"]

REMAT = frozenset(["remat", "remat2", "checkpoint"])


def recomputes(eqn: Any) -> bool:
    """Whether an equation, or anything in it, is recomputed in the backward pass."""
    return eqn.primitive.name in REMAT or any(
        recomputes(inner) for jaxpr in _compat.contained_jaxprs(eqn) for inner in jaxpr.eqns
    )


def with_remat(jaxpr: Any, inputs: Sequence[Any], *, remat: bool) -> list[Any]:
    """Evaluates a jaxpr, with recomputation as `remat` says.

    Looks into `jit`, `cond`, `scan` and `jax.checkpoint`; whatever else holds code is evaluated as it is.

    Args:
      jaxpr: A closed jaxpr.
      inputs: Its inputs.
      remat: True: every pass of every scan that recomputes nothing yet keeps only what it is called with. False:
        nothing is recomputed, whatever the code says.

    Returns:
      Its outputs.
    """
    return _Rewrite(remat)(jaxpr, inputs)


@dataclasses.dataclass
class _Rewrite:
    """Evaluates jaxprs; calls stay calls, one function per jaxpr, which `jax.jit` caches."""

    remat: bool
    calls: dict[int, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        return _compat.evaluate(jaxpr, inputs, self._apply)

    def _apply(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        kind = eqn.primitive.name
        if kind in REMAT:
            return self._checkpoint(eqn, inputs)
        if kind in ("jit", "pjit"):
            return list(self._call(eqn)(*inputs))
        if kind == "cond":
            branches = [lambda *xs, branch=branch: self(branch, xs) for branch in eqn.params["branches"]]
            return list(lax.switch(inputs[0], branches, *inputs[1:]))
        if kind == "scan" and not (self.remat and recomputes(eqn)):
            return self._scan(eqn, inputs)
        return _compat.bind(eqn, inputs)

    def _call(self, eqn: Any) -> Callable[..., Any]:
        jaxpr = eqn.params["jaxpr"]
        if id(jaxpr) not in self.calls:

            def call(*xs: Any) -> list[Any]:
                return self(jaxpr, xs)

            call.__name__ = eqn.params.get("name", "jit")
            self.calls[id(jaxpr)] = jax.jit(call)
        return self.calls[id(jaxpr)]

    def _checkpoint(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        def body(*xs: Any) -> list[Any]:
            return self(eqn.params["jaxpr"], xs)

        if self.remat:
            body = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return list(body(*inputs))

    def _scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        num_consts, num_carry = _compat.scan_groups(eqn)
        jaxpr, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
        end = num_consts + num_carry
        consts, init, xs = inputs[:num_consts], inputs[num_consts:end], inputs[end:]
        # What is carried unchanged stays so in plain sight.
        fixed = [v is out for v, out in zip(jaxpr.invars[num_consts:end], jaxpr.outvars, strict=False)]

        def run(consts: list[Any], carry: list[Any], x: list[Any]) -> list[Any]:
            return self(eqn.params["jaxpr"], [*consts, *carry, *x])

        if self.remat:
            run = jax.checkpoint(run, prevent_cse=False)

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = run(consts, carry, x)
            new = [c if same else y for c, y, same in zip(carry, outputs, fixed, strict=False)]
            return new, outputs[num_carry:]

        carry, ys = lax.scan(body, init, xs, **{k: eqn.params[k] for k in ("length", "reverse", "unroll")})
        return [*carry, *ys]
