"""What a compiled program takes of one device's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Memory", "memory_of"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler states them.

    Attributes:
      arguments: What is passed in: state and batch.
      outputs: What is returned, aliased arguments included.
      aliased: Outputs that take the memory of (donated) arguments.
      temporaries: Everything else that the program needs: activations, gathered parameters, gradients.
      peak: The most at any time. Where the compiler does not state it, arguments, outputs and temporaries, aliased
        ones counted once.
      host: Arguments, outputs that are no arguments, and temporaries in the memory of the host. They count in none of
        the others. Programs for CPUs and compile-only GPUs do not tell them apart; there it is, of a training step, the
        state that the plan keeps on the host, and 0 of anything else.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int


def memory_of(compiled: Any, platform: str, host_state: int = 0) -> Memory:
    """Returns the memory of a compiled program.

    Args:
      compiled: Such as `jax.jit(...).lower(...).compile()`.
      platform: Of the devices, such as "cpu".
      host_state: Bytes of donated state in the memory of the host, in case that the compiler does not tell.
    """
    stats = compiled.memory_analysis()

    def size(name: str) -> int:
        return int(getattr(stats, f"{name}_in_bytes", 0))

    arguments, outputs, aliased, temporaries = (
        size(f"{name}_size") for name in ("argument", "output", "alias", "temp")
    )
    # What jaxlib calls the peak leaves temporaries out on CPU devices, and has host memory in it on all others.
    stated = 0 if platform == "cpu" else size("peak_memory")
    host = size("host_argument_size") + size("host_output_size") - size("host_alias_size") + size("host_temp_size")
    if not host and host_state:
        host = host_state
        arguments, outputs, aliased = (num_bytes - host for num_bytes in (arguments, outputs, aliased))
    if stated:
        stated -= host
    return Memory(
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        peak=stated or arguments + outputs - aliased + temporaries,
        host=host,
    )
