"""Does one part of the GPU pack, in a process of its own: `benchmarks.gpu` starts it."""

from __future__ import annotations

import argparse
import pathlib

import jax

from benchmarks.gpu import link, machine, rates, steps
from benchmarks.gpu.job import Job

PARTS = {"machine": machine.run, "rates": rates.run, "offload": link.run, "steps": steps.run}


def main() -> None:
    """Does the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--lines", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--models", nargs="*", default=[])
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # where there is nothing but a CPU
    # A program is compiled to be looked at, and once more to be run: the second time it comes from here.
    jax.config.update("jax_compilation_cache_dir", options.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    job = Job(options.part, options.lines, options.seconds, options.small, tuple(options.models))
    PARTS[options.part.partition("/")[0]](job)


if __name__ == "__main__":
    main()
