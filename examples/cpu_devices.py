"""Virtual CPU devices, on which the examples run if there is no accelerator, and what they do meanwhile."""

import logging
import os

import jax

NUM_CPU_DEVICES = 8
NUM_THREADS = 4 * NUM_CPU_DEVICES


def use_virtual_cpu_devices() -> None:
    """Makes eight devices of the CPU, and says what takes long. Call it before anything asks for a device.

    Accelerators stay what they are.
    """
    # XLA runs these devices on as many threads as there are devices, or cores. A step that begins while the previous
    # one still runs may take the threads that that one needs, and both wait forever (seen with jax 0.10 on 2 cores).
    os.environ.setdefault("PJRT_NPROC", str(NUM_THREADS))
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    say_what_takes_long()


def say_what_takes_long() -> None:
    """Prints jzero's log, such as that it compiles a step, to stderr."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("jzero").setLevel(logging.INFO)
