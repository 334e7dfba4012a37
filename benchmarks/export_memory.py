"""Peak host memory of exporting a model as safetensors: `python benchmarks/export_memory.py`.

A checkpoint of `--gigabytes` of fp32 parameters in equal leaves is written by one process; another one, without the
model, exports it (`jzero.export_checkpoint`, what `jzero export` does), and a third restores it and exports the state
(`jzero.export_params`). Memory is anonymous resident memory, sampled every 2 ms, above what was resident before the
export. The first export of a process includes what jax, Orbax and the allocator set up once.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PJRT_NPROC", "32")

NUM_DEVICES = 8


def main() -> None:
    """Runs the three processes, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--leaves", type=int, default=16)
    parser.add_argument("--part", choices=["write", "checkpoint", "state"])
    parser.add_argument("--directory")
    options = parser.parse_args()
    if options.part:
        run(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        for part in ("write", "checkpoint", "state"):
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--part", part, "--directory", directory], check=True
            )


def run(options: argparse.Namespace) -> None:
    """Does one part."""
    import jax
    import numpy as np
    import optax

    import jzero

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    directory = pathlib.Path(options.directory)
    columns = 4096
    rows = int(options.gigabytes * 2**30 / 4 / columns / options.leaves) + 1  # which eight does not divide

    def make(fill: bool) -> jzero.TrainState:
        rng = np.random.default_rng(0)
        shape = (rows, columns)
        params = {
            f"leaf_{i}": rng.standard_normal(shape, np.float32) if fill else jax.ShapeDtypeStruct(shape, np.float32)
            for i in range(options.leaves)
        }
        return jzero.TrainState(
            step=np.int32(0), params=params, opt_state=optax.identity().init({}), tx=optax.identity()
        )

    if options.part == "write":
        jzero.save_checkpoint(directory / "checkpoint", jzero.shard_train_state(make(fill=True), stage=3))
        return
    leaf = rows * columns * 4
    for dtype in (None, "bfloat16"):
        out = directory / f"{options.part}_{dtype}.safetensors"
        if options.part == "checkpoint":
            work = functools.partial(jzero.export_checkpoint, directory / "checkpoint", out, dtype=dtype)
        else:
            like = jzero.abstract_train_state(make(fill=False), stage=3)
            state = jzero.restore_checkpoint(directory / "checkpoint", like)
            work = functools.partial(jzero.export_params, state, out, dtype=dtype)
            del state
        before, peak = peak_of(work)
        print(
            f"export of a {options.part}, {options.leaves} leaves of {leaf / 2**20:.0f} MiB, dtype {dtype}: resident "
            f"{before / 2**20:.0f} MiB before, at most {(peak - before) / 2**20:.0f} MiB more, "
            f"{(peak - before) / leaf:.2f} leaves"
        )


def peak_of(work: Callable[[], Any]) -> tuple[int, int]:
    """Returns resident bytes before and at most while `work` runs."""
    before = resident()
    highest, done = before, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return before, max(highest, resident())


def resident() -> int:
    """Returns the resident bytes of this process that are not pages of files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
