"""Faults that nobody can see, with why. Each entry excuses one: no other in its function, nor the same elsewhere."""

from __future__ import annotations

from tests.mutants.drawn import Fault

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "jzero/core/engine/waits.py",
        "_carried",
        "starts = zip(eqn.invars[num_consts:], body.outvars, own, strict=False)",
    ): "whether two values are one is asked of both in either order",
    (
        "jzero/core/state/init.py",
        "_zero_of",
        "return lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(16)), jnp.uint32(17))",
    ): "no bit is left of 32 after 33 places either",
}
"""Why, by file, function around, and the lines with the fault."""


def key(fault: Fault) -> tuple[str, str, str]:
    """What a fault has to be to be excused."""
    return fault.file, fault.function, fault.lines
