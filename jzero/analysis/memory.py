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
      host: Arguments, outputs that are no arguments, and temporaries in the memory of the host. Always 0 for
        compile-only GPUs, whose host buffers count as the device's.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int


def memory_of(compiled: Any, platform: str) -> Memory:
    """Returns the memory of a compiled program, such as `jax.jit(...).lower(...).compile()`, for `cpu` or another."""
    stats = compiled.memory_analysis()

    def size(name: str) -> int:
        return int(getattr(stats, f"{name}_size_in_bytes", 0))

    arguments, outputs, aliased, temporaries = (size(name) for name in ("argument", "output", "alias", "temp"))
    # What jaxlib calls the peak leaves temporaries out on CPU devices.
    stated = 0 if platform == "cpu" else int(getattr(stats, "peak_memory_in_bytes", 0))
    return Memory(
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        peak=stated or arguments + outputs - aliased + temporaries,
        host=size("host_argument") + size("host_output") - size("host_alias") + size("host_temp"),
    )
