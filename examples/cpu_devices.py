"""Virtual CPU devices for the examples to run on where there is no accelerator."""

import os

import jax

NUM_CPU_DEVICES = 8
NUM_THREADS = 4 * NUM_CPU_DEVICES


def use_virtual_cpu_devices() -> None:
    """Makes eight devices of the CPU; without effect on accelerators. Before anything asks for a device."""
    # XLA runs these devices on as many threads as there are, or cores. A step that begins while the one before still
    # runs may then take the threads that this one needs to end, and both wait for ever: seen with jax 0.10 on 2 cores.
    os.environ.setdefault("PJRT_NPROC", str(NUM_THREADS))
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
