"""What each of two processes does with files of unequal counts, and others that go on."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
import jzero.data
from tests.multiprocess_states import message

DEVICES_PER_PROCESS = 2
COUNTS = (11, 3, 8, 0, 9, 5, 6)
"""Examples of each file; 42, which a batch of 12 does not divide."""

BATCH_SIZE = 12
STEPS_BEFORE = 2
TX = optax.sgd(0.1)  # one, so that steps are compiled once


def write_files(directory: pathlib.Path) -> None:
    """Writes files of examples that are numbered through."""
    first = 0
    for i, count in enumerate(COUNTS):
        (directory / f"{i}.txt").write_text("".join(f"{x}\n" for x in range(first, first + count)))
        first += count


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    for line in pathlib.Path(path).read_text().split():
        yield {"id": int(line), "x": np.full(4, int(line) / 42, np.float32)}


def train_first(directory: pathlib.Path) -> dict[str, Any]:
    """Goes through an epoch with files of unequal numbers in each process; then trains on a part of one and saves."""
    paths = sorted(directory.glob("*.txt"))
    mine = paths[:1] if jax.process_index() == 0 else paths[1:]
    lanes = DEVICES_PER_PROCESS * jax.process_count()
    opened: list[str] = []

    def read(path: str) -> Iterator[dict[str, Any]]:
        opened.append(pathlib.Path(path).name)
        yield from read_lines(path)

    source = jzero.data.FileSource(mine, read=read, interleave=lanes)
    results: dict[str, Any] = {"counted": sorted(opened), "together": list(source.counts)}
    by_lane = jzero.data.make_loader(source, batch_size=lanes, prefetch=0)
    results["opened for the first example"] = opened[len(results["counted"]) :]
    opened.clear()
    results["first rounds"] = [local_ids(batch) for _, batch in zip(range(3), by_lane, strict=False)]
    results["opened for them"] = sorted(opened)
    results["epoch"] = [local_ids(batch) for batch in jzero.data.make_loader(source, batch_size=BATCH_SIZE)]
    for name, shuffled in (("in order", False), ("shuffled", True)):
        results[name] = train_and_save(directory, name, shuffled)
    results["disagree"] = message(
        lambda: jzero.data.make_loader(source, batch_size=BATCH_SIZE, seed=jax.process_index())
    )
    alone = [directory / "missing.txt"] if jax.process_index() == 1 else paths
    results["missing"] = message(lambda: jzero.data.FileSource(alone, read=read))
    odd = [{"id": 1}] * (12 if jax.process_index() else 0)
    results["empty in one"] = message(lambda: jzero.data.make_loader(odd, batch_size=BATCH_SIZE))
    return results


def train_rest(directory: pathlib.Path) -> dict[str, Any]:
    """Goes on from what was saved, to the end of the second epoch."""
    results = {}
    for name, shuffled in (("in order", False), ("shuffled", True)):
        batches = iter(make_loader(directory, shuffled, batch_size=8))
        like = jzero.abstract_train_state(jax.eval_shape(make_state), stage=2)
        with jzero.CheckpointManager(directory / f"run {name}") as manager:
            state = manager.restore(like, data_iterator=batches)
        results[name] = train(state, batches, num_steps=1000)[1]
    return results


def train_and_save(directory: pathlib.Path, name: str, shuffled: bool) -> list[list[int]]:
    state = jzero.shard_train_state(make_state(), stage=3)
    with (
        jzero.CheckpointManager(directory / f"run {name}") as manager,
        iter(make_loader(directory, shuffled, batch_size=BATCH_SIZE)) as batches,
    ):
        state, seen = train(state, batches, num_steps=STEPS_BEFORE)
        manager.save(state, data_iterator=batches)
    return seen


def make_loader(directory: pathlib.Path, shuffled: bool, batch_size: int) -> jzero.data.Loader:
    how = {"open_file": lambda path: list(read_lines(path))} if shuffled else {"read": read_lines}
    source = jzero.data.FileSource(sorted(directory.glob("*.txt")), interleave=3, **how)
    return jzero.data.make_loader(source, batch_size=batch_size, shuffle=shuffled, num_epochs=2)


def train(state: Any, batches: Any, num_steps: int) -> tuple[Any, list[list[int]]]:
    """Returns the state after some steps, and the examples of this process in each."""
    step, seen = make_step(), []
    for _, batch in zip(range(num_steps), batches, strict=False):
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])
        seen.append(local_ids(batch))
    return state, seen


@functools.cache
def make_step() -> Any:
    return jzero.make_train_step(loss_fn)


def make_state() -> jzero.TrainState:
    return jzero.TrainState.create(params={"w": jnp.zeros(4)}, tx=TX)


def loss_fn(params: Any, batch: Any) -> jzero.Weighted:
    losses = (batch["x"] @ params["w"] - 1) ** 2
    return jzero.Weighted((losses * batch["weights"]).sum(), batch["weights"].sum())


def local_ids(batch: Any) -> list[int]:
    """Returns the examples that this process's devices hold, without padding."""
    found = []
    for rows, weights in zip(batch["id"].addressable_shards, batch["weights"].addressable_shards, strict=True):
        found += np.asarray(rows.data)[np.asarray(weights.data) == 1].tolist()
    return found
