"""Programs that train with optimizer state on disk, and save: one is killed again and again, one measures memory.

`python -m tests.disk_checkpoint_run --kills 50` prints one line per kill, as `tests.fault_run` does, and ends with 1 if
a checkpoint was lost or space on the disk did not come back. Nobody else should write to that disk: `--scratch`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import pathlib
import sys
import tempfile
import warnings
from typing import Any

import numpy as np

from tests import fault_run

NUM_DEVICES = 2
RATE, DECAY = 2.0**-10, 0.5  # powers of two: with them a step rounds in no more than one place, however it is compiled
SHAPES = {"odd": (257, 509), "small": (3,)}
KEEP = 2
LITTLE = 1 << 20
"""Bytes that others may have taken on the disk meanwhile; a slot takes more."""


def setup(num_devices: int) -> Any:
    """Returns jax with some CPU devices."""
    import jax  # noqa: PLC0415  # not in the parent, which only starts and kills

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    return jax


def expected(step: int) -> tuple[np.float32, np.float32]:
    """Returns what each element of the parameters, and of their momentum, is after some steps."""
    param, momentum = np.float32(1), np.float32(0)
    for _ in range(step):
        momentum = np.float32(1) + np.float32(DECAY) * momentum
        param = param - np.float32(RATE) * momentum
    return param, momentum


def train(directory: str, scratch: str) -> None:
    """Goes on from the newest checkpoint for ever, and saves after each step."""
    warnings.filterwarnings("ignore", message=".* is memory, not a disk")
    jax = setup(NUM_DEVICES)
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import jzero  # noqa: PLC0415

    def make() -> jzero.TrainState:
        params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
        return jzero.TrainState.create(params=params, tx=optax.sgd(RATE, momentum=DECAY))

    offload = jzero.Offload(optimizer="disk", path=scratch, chunk_bytes=1 << 16)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=10, precision="bf16", offload=offload)
    like = jzero.abstract_train_state(jax.eval_shape(make), config=config)
    step = jzero.make_train_step(lambda params, batch: sum(x.sum() for x in params.values()) * batch.mean())
    batch = jnp.ones((NUM_DEVICES,))
    with jzero.CheckpointManager(f"{directory}/run", max_to_keep=KEEP) as manager:
        for found in manager.all_steps():
            whole = jzero.unshard_train_state(manager.restore(like, step=found))
            for tree, number in zip((whole.params, whole.opt_state[0].trace), expected(found), strict=True):
                for name, x in tree.items():
                    assert not (np.asarray(x) != number).any(), f"{name} at step {found}"
        state = manager.restore(like) if manager.all_steps() else jzero.shard_train_state(make(), config=config)
        fault_run.save_for_ever(manager, step, state, batch)


def run(directory: str, scratch: str, kills: int, seed: int) -> list[dict[str, int]]:
    """Starts and kills the program; its state is in the folder `scratch`."""
    command = ["tests.disk_checkpoint_run", "--train", directory, "--scratch", scratch]
    return fault_run.run(command, kills, seed, messages=2)


MEMORY_SHAPE = (2048, 2048)
MEMORY_RECORD = 1 << 20


def measure(directory: str) -> dict[str, int]:
    """Saves and restores; returns by how many bytes memory grew meanwhile."""
    jax = setup(2)
    import jax.numpy as jnp  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import jzero  # noqa: PLC0415

    def mixed(seed: int) -> jax.Array:
        """Numbers that do not compress, for a tenth of the work of random ones."""
        row, column = (jax.lax.broadcasted_iota(jnp.uint32, MEMORY_SHAPE, dim) for dim in (0, 1))
        bits = (row + np.uint32(seed << 16)) * np.uint32(0x9E3779B1) ^ column * np.uint32(0x85EBCA77)
        bits = (bits ^ bits >> 15) * np.uint32(0xC2B2AE3D)
        return jax.lax.bitcast_convert_type(bits >> 9 | np.uint32(0x3F800000), jnp.float32)  # between 1 and 2

    def make(key: Any, num_params: int) -> jzero.TrainState:
        params = {f"{i}": mixed(i) for i in range(num_params)}
        return jzero.TrainState.create(params=params, tx=optax.adamw(1e-3))

    os.makedirs(f"{directory}/scratch", exist_ok=True)
    offload = jzero.Offload(optimizer="disk", path=f"{directory}/scratch", chunk_bytes=MEMORY_RECORD)
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, precision="bf16", offload=offload)
    grew = {}
    for num_params in (1, 3):  # the first one so that everything is compiled
        state = jzero.init_train_state(functools.partial(make, num_params=num_params), jax.random.key(0), config=config)
        like, path = jzero.abstract_train_state(state, config=config), f"{directory}/{num_params}"
        grew["save"] = growth(functools.partial(jzero.save_checkpoint, path, state))
        grew["restore"] = growth(functools.partial(jzero.restore_checkpoint, path, like))
    plan = jzero.plan_of(state)
    return {
        "on_disk": plan.disk_bytes_per_device // 2 * plan.mesh.size,
        "save": grew["save"],
        "restore": grew["restore"] - 2 * sum(leaf.param.size for leaf in plan.leaves),  # the new parameters, in bf16
        "allowed": 16 * MEMORY_RECORD + (44 << 20),
    }


def growth(call: Any) -> int:
    """Returns how far the memory of this process grew while it made a call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed does not count as there
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    kept = call()
    grew = status("VmHWM") - before
    del kept
    return grew


def free_bytes(path: str) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def status(field: str) -> int:
    line = next(x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", metavar="DIRECTORY")
    parser.add_argument("--memory", metavar="DIRECTORY")
    parser.add_argument("--scratch", metavar="DIRECTORY", default=tempfile.gettempdir())
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.scratch)
    if options.memory:
        print(json.dumps(measure(options.memory)))  # noqa: T201
        return 0
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        before = free_bytes(scratch)
        rows = run(directory, scratch, options.kills, options.seed)
        left = sorted(os.listdir(scratch)), before - free_bytes(scratch)
    lost = fault_run.num_lost(rows)
    print(f"{options.kills} kills, {lost} lost checkpoints; left on the disk: {left[0]}, {left[1]:,} bytes")  # noqa: T201
    return 1 if lost or left[0] or left[1] > LITTLE else 0


if __name__ == "__main__":
    sys.exit(main())
