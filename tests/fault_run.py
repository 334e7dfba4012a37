"""Kills a program that trains and saves, again and again at random moments, and looks for what was lost.

`python -m tests.fault_run --kills 50` prints one line per kill and ends with 1 if a checkpoint was lost. A program that
is started after a kill goes on from the newest checkpoint. Nothing is lost if that is not older than what the killed
program had reported as complete, and if every checkpoint that is there holds, to the bit, what its step must have.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings

ROOT = pathlib.Path(__file__).parents[1]
NUM_DEVICES = 4
RATE = 2.0**-10  # of a power of two every step is exact
SHAPES = {"even": (256, 512), "odd": (257, 509), "small": (3,)}
KEEP = 2


def train(directory: str, scratch: str | None = None) -> None:
    """Goes on from the newest checkpoint for ever, and saves after each step. `scratch` is for state on disk."""
    import jax  # noqa: PLC0415  # not in the parent, which only starts and kills

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import jzero  # noqa: PLC0415

    def make() -> jzero.TrainState:
        params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
        return jzero.TrainState.create(params=params, tx=optax.sgd(RATE))

    config = jzero.ZeroConfig(stage=3, persistence_threshold=10)
    if scratch is not None:
        warnings.filterwarnings("ignore", message=".* is memory, not a disk")
        offload = jzero.Offload(optimizer="disk", path=scratch, chunk_bytes=1 << 16)
        config = dataclasses.replace(config, precision="bf16", offload=offload)  # its masters are in records
    like = jzero.abstract_train_state(jax.eval_shape(make), config=config)
    step = jzero.make_train_step(lambda params, batch: sum(x.sum() for x in params.values()) * batch.mean())
    batch = jnp.ones((NUM_DEVICES,))
    with jzero.CheckpointManager(directory, max_to_keep=KEEP) as manager:
        for found in manager.all_steps():
            params = jzero.unshard_train_state(manager.restore(like, step=found)).params
            for name, x in params.items():
                wrong = np.asarray(x) != np.float32(-found * RATE)
                assert not wrong.any(), f"{name} at step {found}"
        state = manager.restore(like) if manager.all_steps() else jzero.shard_train_state(make(), config=config)
        start = int(state.step)
        while True:
            state, _ = step(state, batch)
            count = int(state.step)
            manager.save(state)
            _say("start" if count == start + 1 else "complete", count - 1)  # `save` waits for the one before
            if count % 3 == 0:
                manager.wait()
                _say("complete", count)


def _say(what: str, step: int) -> None:
    print(what, step, flush=True)  # noqa: T201  # for the parent, which reads it


def run(directory: str, kills: int, seed: int, *options: str) -> list[dict[str, int]]:
    """Starts and kills a program so often; returns what it went on from, and what it had reported, each time."""
    moments = random.Random(seed)
    complete = 0
    rows = []
    command = [sys.executable, "-W", "error", "-m", "tests.fault_run", "--train", directory, *options]
    for number in range(kills + 1):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first = process.stdout.readline().split()
            if first[:1] != ["start"]:
                raise AssertionError(f"After kill {number} the program does not start: {process.stderr.read()}")
            lines = []
            while number == 0 and (line := process.stdout.readline()):  # else a slow machine kills nothing but starts
                lines.append(line)
                if line == "complete 1\n":
                    break
            if number < kills:
                time.sleep(moments.uniform(0, 0.6))
            os.kill(process.pid, signal.SIGKILL)
            lines += process.stdout.read().splitlines(keepends=True)
            words = [line.split() for line in lines if line.endswith("\n")]
        rows.append({"kill": number, "went_on_from": int(first[1]), "was_complete": complete})
        complete = max([complete, int(first[1]), *(int(step) for what, step in words)])
    return rows


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", metavar="DIRECTORY")
    parser.add_argument("--scratch", metavar="DIRECTORY", help="for state on a disk; by default it is in memory")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.scratch)
    with tempfile.TemporaryDirectory() as directory:
        away = [] if options.scratch is None else ["--scratch", options.scratch]
        rows = run(directory, options.kills, options.seed, *away)
        left = sorted(os.listdir(directory))
    for row in rows:
        print(row)  # noqa: T201
    lost = sum(row["went_on_from"] < row["was_complete"] for row in rows)
    print(f"{options.kills} kills, {lost} lost checkpoints; left in the directory: {left}")  # noqa: T201
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
