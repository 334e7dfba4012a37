"""Saving and restoring beside plain Orbax on the same tree, and exports: `python benchmarks/checkpoint_throughput.py`.

Medians within one run, methods in turn, since machines are noisy: seconds, and CPU time over all threads. The last two
rows export the checkpoint, and the state itself. The tree has `--megabytes` of random fp32
numbers, in leaves whose dimensions the devices divide (`even`) or do not (`odd`). Of odd leaves plain Orbax is given
natural arrays on one device, since no sharded array has such shapes.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
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
            for action, times in measure(kind, options, pathlib.Path(directory)).items():
                medians = {who: np.median(np.array(rounds), axis=0) for who, rounds in times.items()}
                (_, ours), (_, other) = medians.items()
                each = "  ".join(f"{who} {x[0]:6.2f} s, CPU {x[1]:5.2f} s" for who, x in medians.items())
                print(f"{kind:4}  {action:7}  {each}  ratio {ours[0] / other[0]:5.2f}, CPU {ours[1] / other[1]:5.2f}  "
                      f"{options.megabytes / ours[0]:5.0f} MB/s")  # fmt: skip


def measure(
    kind: str, options: argparse.Namespace, directory: pathlib.Path
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Returns seconds, and seconds of CPU time, by direction and by who did it."""
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
    ours, orbax, exported = (directory / f"{kind}_{name}" for name in ("jzero", "orbax", "exported"))

    def save_plain() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(orbax, tree)

    def restore_plain() -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(orbax, shapes)

    doing: dict[str, dict[str, Callable[[], Any]]] = {
        "save": {"jzero": lambda: jzero.save_checkpoint(ours, state), "orbax": save_plain},
        "restore": {"jzero": lambda: jzero.restore_checkpoint(ours, like), "orbax": restore_plain},
        "export": {
            "of the checkpoint": lambda: jzero.export_checkpoint(ours, exported) and None,
            "of the state": lambda: jzero.export_params(state, exported) and None,
        },
    }
    times: dict[str, dict[str, list[tuple[float, float]]]] = {
        action: {who: [] for who in doing[action]} for action in doing
    }
    for number in range(options.rounds + 1):
        for action, runs in doing.items():
            for who, run in runs.items():
                started = time.perf_counter(), time.process_time()
                jax.block_until_ready(run())
                spent = time.perf_counter() - started[0], time.process_time() - started[1]
                if number:  # the first round compiles
                    times[action][who].append(spent)
                shutil.rmtree(exported, ignore_errors=True)
        for path in (ours, orbax):
            shutil.rmtree(path)
    return times


if __name__ == "__main__":
    main()
