"""The memory of a compiled program on one device."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, according to the compiler.

    Attributes:
      arguments: The inputs: state and batch.
      outputs: The outputs, including aliased arguments.
      aliased: Outputs that reuse the memory of (donated) arguments.
      temporaries: Everything else: activations, gathered parameters, gradients.
      peak: The maximum at any time. If the compiler does not report it, the sum of arguments, outputs and temporaries,
        with aliased ones counted once.
      host: Arguments, outputs that are not arguments, and temporaries in host memory. No other attribute counts them.
        Programs for CPUs and compile-only GPUs do not distinguish them; there it is the state that the plan keeps on
        the host for a training step, and 0 for anything else.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int

    @property
    def allocated(self) -> int:
        """Arguments, outputs and temporaries, aliased ones once: on GPUs, fragments make it more than the peak."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def compiled_memory(compiled: jax.stages.Compiled, platform: str, host_state: int = 0) -> Memory:
    """Returns the memory of a compiled program.

    Args:
      compiled: Such as `jax.jit(...).lower(...).compile()`.
      platform: The platform of the devices, such as "cpu".
      host_state: Bytes of state in host memory, used if the compiler does not report them.
    """
    stats = compiled.memory_analysis()

    def size(name: str) -> int:
        return int(getattr(stats, f"{name}_in_bytes", 0))

    arguments, outputs, aliased, temporaries = (
        size(f"{name}_size") for name in ("argument", "output", "alias", "temp")
    )
    # jaxlib's peak leaves out temporaries on CPU devices, and includes host memory on all others.
    stated = 0 if platform == "cpu" else size("peak_memory")
    host = size("host_argument_size") + size("host_output_size") - size("host_alias_size") + size("host_temp_size")
    if not host and host_state:
        host = host_state
        arguments -= host
        if aliased >= host:  # else the program does not return that state
            outputs, aliased = outputs - host, aliased - host
    if stated:
        stated -= host
    memory = Memory(
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        peak=stated,
        host=host,
    )
    return dataclasses.replace(memory, peak=stated or memory.allocated)
