"""Saving and restoring beside plain Orbax on the same tree: `python benchmarks/checkpoint_throughput.py`.

Ratios of medians within one run, methods in turn, since machines are noisy. The tree has `--megabytes` of random fp32
numbers, in leaves whose dimensions the devices divide (`even`) or do not (`odd`). Of odd leaves plain Orbax is given
natural arrays on one device, since no sharded array has such shapes.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PJRT_NPROC", "32")  # XLA's CPU client needs more threads than devices

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import jzero

NUM_DEVICES = 8
LEAVES = 16


def main() -> None:
    """Prints one row per kind of leaves and direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", default=None, help="where to write; a temporary one by default")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    print(f"jax {jax.__version__}, orbax-checkpoint {ocp.__version__}, {options.megabytes} MB, {options.rounds} rounds")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for kind in ("even", "odd"):
            for what, times in measure(kind, options, pathlib.Path(directory)).items():
                ours, plain = (statistics.median(times[who]) for who in ("jzero", "orbax"))
                rate = options.megabytes / ours
                print(f"{kind:4}  {what:8}  jzero {ours:6.2f} s  orbax {plain:6.2f} s  "
                      f"ratio {ours / plain:5.2f}  {rate:6.0f} MB/s")  # fmt: skip


def measure(kind: str, options: argparse.Namespace, directory: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """Returns seconds by direction and by who did it."""
    size = int((options.megabytes * 1e6 / 4 / LEAVES) ** 0.5)
    size = size // 64 * 64 + (0 if kind == "even" else 3)
    rng = np.random.default_rng(0)
    params = {f"leaf_{i}": rng.standard_normal((size, size), np.float32) for i in range(LEAVES)}
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    plain = jax.tree.map(jax.numpy.asarray, plain)
    state = jzero.shard_train_state(plain, stage=3)
    like = jzero.abstract_train_state(state, stage=3)
    tree = state if kind == "even" else plain
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

    def save_plain(path: pathlib.Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)

    def restore_plain(path: pathlib.Path) -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, shapes)

    doing: dict[str, dict[str, Callable[[pathlib.Path], Any]]] = {
        "save": {"jzero": lambda path: jzero.save_checkpoint(path, state), "orbax": save_plain},
        "restore": {"jzero": lambda path: jzero.restore_checkpoint(path, like), "orbax": restore_plain},
    }
    times: dict[str, dict[str, list[float]]] = {what: {"jzero": [], "orbax": []} for what in doing}
    for number in range(options.rounds + 1):
        for who in ("jzero", "orbax"):
            path = directory / f"{kind}_{who}"
            for what in ("save", "restore"):
                started = time.perf_counter()
                jax.block_until_ready(doing[what][who](path))
                if number:  # the first round compiles
                    times[what][who].append(time.perf_counter() - started)
            shutil.rmtree(path)
    return times


if __name__ == "__main__":
    main()
