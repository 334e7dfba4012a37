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
    ("jzero/core/engine/walk.py", "Walk", "depth: int = 1"): "depths are compared with each other alone",
    (
        "jzero/cli/doctor.py",
        "_offload",
        'return _train_step(mesh, Offload(optimizer="host", chunk_bytes=2049)) + ", optimizer state on the host"',
    ): "any small chunks do",
    ("jzero/estimate/buffers.py", "BufferOperation", "gathers: bool = True"): (
        "only of transfers is it read, and these are all made with it"
    ),
    ("jzero/estimate/step_time.py", "CollectiveTraffic", "seconds: float = 1.0"): (
        "without a machine, for which this stands, nobody reads the seconds"
    ),
    (
        "jzero/cli/doctor.py",
        "_collectives",
        "sent = ((31 * np.arange(count)[:, None] - 17 * np.arange(count))) % 251 # [N, N], one row per device",
    ): "any rows that differ do",
    ("jzero/core/engine/gradients.py", "MicroBatches", "reduce_last: bool = True"): (
        "only of several micro-batches is it read, and these are all made with it"
    ),
    (
        "jzero/analysis/step_programs.py",
        "_StepPrograms._step_program",
        "self, name: str, traced: jax.stages.Traced, live: int = 1, *, takes_params: bool = False",
    ): "a program has arguments of more than a byte, which are taken from it",
}
"""Why, by file, function around, and the lines with the fault."""


def key(fault: Fault) -> tuple[str, str, str]:
    """What a fault has to be to be excused."""
    return fault.file, fault.function, fault.lines
