"""Writes the golden checkpoint: `python -m tests.golden`."""

import jax

from tests import golden

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    golden.write()
