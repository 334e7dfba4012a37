"""Virtual CPU devices, on which the examples run if there is no accelerator."""

import os

import jax

NUM_CPU_DEVICES = 8
NUM_THREADS = 4 * NUM_CPU_DEVICES


def use_virtual_cpu_devices() -> None:
    """Makes eight devices of the CPU; has no effect on accelerators. Call it before anything asks for a device."""
    # XLA runs these devices on as many threads as there are devices, or cores. A step that begins while the previous
    # one still runs may take the threads that that one needs, and both wait forever (seen with jax 0.10 on 2 cores).
    os.environ.setdefault("PJRT_NPROC", str(NUM_THREADS))
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
