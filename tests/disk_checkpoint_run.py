"""A program that saves and restores a state with optimizer state on disk, and prints by how much its memory grew.

`python -m tests.disk_checkpoint_run DIRECTORY`
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero

MEMORY_SHAPE = (2048, 2048)
MEMORY_RECORD = 1 << 20


def measure(directory: str) -> dict[str, int]:
    """Saves and restores; returns by how many bytes memory grew meanwhile."""

    def make(key: Any, num_params: int) -> jzero.TrainState:
        params = {f"{i}": jnp.full(MEMORY_SHAPE, 1.0 + i) for i in range(num_params)}  # files are not compressed
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


def status(field: str) -> int:
    line = next(x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    print(json.dumps(measure(sys.argv[1])))  # noqa: T201
