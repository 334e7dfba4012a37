"""Recomputation of a traced loss: loops whose passes are recomputed in the backward pass, or no recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jzero import _compat

__all__ = ["has_remat", "with_remat"]

REMAT = frozenset(["remat", "remat2", "checkpoint"])


def has_remat(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr is recomputed in the backward pass."""
    jaxpr, _ = _compat.open_jaxpr(jaxpr)
    return any(
        eqn.primitive.name in REMAT or any(has_remat(inner) for inner in _compat.contained_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def with_remat(jaxpr: Any, inputs: Sequence[Any], *, remat: bool) -> list[Any]:
    """Evaluates a jaxpr, with recomputation as `remat` says.

    Args:
      jaxpr: A closed jaxpr.
      inputs: Its inputs.
      remat: True: every pass of every loop that recomputes nothing yet keeps only what it is called with. False:
        nothing is recomputed, whatever the code says.

    Returns:
      Its outputs.
    """
    jaxpr, consts = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        with _compat.equation_context(eqn):
            outputs = _apply(eqn, [read(v) for v in eqn.invars], remat=remat)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, inputs: list[Any], *, remat: bool) -> list[Any]:
    kind = eqn.primitive.name
    if kind in REMAT and not remat:
        return with_remat(eqn.params["jaxpr"], inputs, remat=remat)
    if kind in ("jit", "pjit"):
        jaxpr = eqn.params["jaxpr"]

        def call(*xs: Any) -> list[Any]:
            return with_remat(jaxpr, xs, remat=remat)

        call.__name__ = eqn.params.get("name", "jit")
        return list(jax.jit(call)(*inputs))
    if kind == "scan" and not (remat and has_remat(eqn.params["jaxpr"])):
        return _scan(eqn, inputs, remat=remat)
    return _compat.bind(eqn, inputs)


def _scan(eqn: Any, inputs: list[Any], *, remat: bool) -> list[Any]:
    num_consts, num_carry = _compat.scan_groups(eqn)
    consts, init, xs = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )

    def run(consts: list[Any], carry: list[Any], x: list[Any]) -> list[Any]:
        return with_remat(eqn.params["jaxpr"], [*consts, *carry, *x], remat=remat)

    if remat:
        run = jax.checkpoint(run, prevent_cse=False)

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run(consts, carry, x)
        return outputs[:num_carry], outputs[num_carry:]

    carry, ys = lax.scan(body, init, xs, **{k: eqn.params[k] for k in ("length", "reverse", "unroll")})
    return [*carry, *ys]
