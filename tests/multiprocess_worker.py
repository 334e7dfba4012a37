"""One process of a run of two: `python -m tests.multiprocess_worker SCENARIOS PROCESS PORT DIRECTORY`.

Scenarios run one after another, since a process takes seconds to start. What each returns is printed as JSON. Some are
also run by the test itself, in one process.
"""

import dataclasses
import faulthandler
import gc
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import jzero
from jzero.checkpoint import lock
from jzero.core.disk.files import DiskError
from jzero.core.processes import agree as _processes
from jzero.core.processes import presence
from jzero.core.state.record_states import records_of
from jzero.weights import safetensors_files
from tests import data_worker, models
from tests.multiprocess_disagreements import BATCH, disagree, small_loss, small_state
from tests.multiprocess_memory import see_other_figures
from tests.multiprocess_states import (
    DEVICES_PER_PROCESS,
    LAMB,
    NUM_PROCESSES,
    ROWS,
    config,
    digest,
    loss_of_pair,
    make_pair,
    make_state,
    mesh,
    message,
    noisy_loss,
    sharded,
    step_of,
    train_from,
    whole,
    whole_values,
)


def train(folder: pathlib.Path | None = None) -> dict[str, Any]:
    """Trains at stage 3, with noise, from a state born sharded."""
    born = jzero.init_train_state(make_state, jax.random.key(0), config=config(3), mesh=mesh())
    state, found = train_from(born, noisy_loss, rng=jax.random.key(7))
    return {"steps": found, "end": whole_values(state)}


class Position:
    """An iterator that is at another place in each process."""

    def __init__(self, start: int) -> None:
        self.position = start

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def checkpoints(directory: pathlib.Path) -> dict[str, Any]:
    """Goes on from what one process wrote, saves, exports, loads, and notices damage that one process alone can see."""
    like = jzero.abstract_train_state(jax.eval_shape(make_state, jax.random.key(0)), config=config(3), mesh=mesh())
    state = jzero.restore_checkpoint(directory / "from_one", like)
    results = {"restored": whole(state)}
    step = step_of(noisy_loss)  # as above: compiled once
    with jzero.CheckpointManager(directory / "run", max_to_keep=2) as manager:
        for i in range(3):
            state, _ = step(state, models.mlp_batch(ROWS, seed=i), rng=jax.random.key(7))
            extra = {"rng": jax.random.key(i), "count": state.step}
            manager.save(state, data_iterator=Position(10 * i + jax.process_index()), extra=extra)
        results["trained"] = whole(state)
        at = Position(0)
        results["again"] = whole(manager.restore(like, data_iterator=at))
        results["position"], results["steps"] = at.position, manager.all_steps()
        jzero.export_params(state, directory / "exported.safetensors", dtype="bfloat16")
        jzero.export_params(state, directory / "whole.safetensors")
        multihost_utils.sync_global_devices("exported")
        alone = jax.process_index() == 1
        results["extra"] = message(
            lambda: jzero.save_checkpoint(directory / "bad", state, extra={"f": print if alone else 1})
        )
        results["count"] = int(manager.restore_extra()["count"])
        spread = next(x for x in jax.tree.leaves(state) if not x.is_fully_replicated)
        results["spread"] = message(lambda: jzero.save_checkpoint(directory / "bad", state, extra={"x": spread}))
        results["nowhere"] = message(lambda: jzero.export_params(state, "/proc/nowhere/x.safetensors"))
        missing = directory / ("missing" if alone else "from_one")
        results["missing"] = message(lambda: jzero.restore_checkpoint(missing, like))
        results["loaded"] = whole(jzero.load_params(manager.restore(like, step=2), directory / "whole.safetensors"))
        if jax.process_index() == 0:
            shutil.copytree(directory / "run" / "3", directory / "kept")
            for path in (directory / "run" / "3").rglob("ocdbt.process_1/d/*"):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        multihost_utils.sync_global_devices("damaged")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results["went back to"] = int(manager.restore(like).step)
        results["warning"] = str(caught[0].message)
    return {**results, **saved_wrongly(directory, state)}


MAPPING = jzero.Mapping(
    {
        "layers/w": jzero.From("h.*.w", (1, 0)),
        "layers/v": jzero.From("h.*.uv", (1, 0), section=(0, 40, 24)),
        "layers/u": jzero.From("h.*.uv", section=(0, 0, 40)),
        "odd": jzero.From("odd", (1, 0)),
    }
)
MAPPED = {"layers/w": (3, 64, 40), "layers/v": (3, 32, 24), "layers/u": (3, 40, 32), "odd": (19, 5)}


def published(directory: pathlib.Path) -> dict[str, Any]:
    """Loads transposed and stacked tensors, a half of the rows in each process, and writes them again."""
    params: dict[str, Any] = {"layers": {}}
    for path, shape in MAPPED.items():
        *outer, last = path.split("/")
        (params[outer[0]] if outer else params)[last] = jnp.zeros(shape)
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    state = sharded(plain, jzero.ZeroConfig(stage=3, persistence_threshold=0))
    rows: dict[str, int] = {}
    view = safetensors_files.TensorFile.view

    def counted(self: Any, index: Any) -> np.ndarray:
        found = view(self, index)
        rows[self.name] = rows.get(self.name, 0) + found.shape[0]
        return found

    safetensors_files.TensorFile.view = counted  # type: ignore[method-assign]
    state = jzero.load_params(state, directory, mapping=MAPPING, donate=True)
    safetensors_files.TensorFile.view = view  # type: ignore[method-assign]
    jzero.export_params(state, directory / "again", mapping=MAPPING)
    return {"params": whole(state), "rows": rows}


def saved_wrongly(directory: pathlib.Path, state: Any) -> dict[str, Any]:
    """Saves into folders that are not shared; returns what the processes are told."""
    own = directory / f"host{jax.process_index()}"
    lag, lock.LAG_S = lock.LAG_S, 0.2
    faulthandler.dump_traceback_later(30, exit=True)  # unless folders are compared, orbax waits for minutes
    results: dict[str, Any] = {}
    results["not shared"] = message(lambda: jzero.save_checkpoint(own / "c", state))
    results["not shared by managers"] = message(lambda: jzero.CheckpointManager(own / "run").save(state))
    faulthandler.cancel_dump_traceback_later()
    lock.LAG_S = lag
    results["left there"] = sorted(str(path) for path in own.rglob("*") if path.name != "jzero.lock")
    return results


def alone(directory: pathlib.Path) -> dict[str, Any]:
    """Calls in the first process what all must call, while the second one is in a collective of the next step."""
    _processes.LINGER_S = 0.1
    evaluate = jzero.make_eval_step(small_loss)
    state = small_state()
    evaluate(state, BATCH)
    if jax.process_index():
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("jzero").addHandler(handler)
        before = time.monotonic()
        jax.block_until_ready(evaluate(state, BATCH))  # nothing is compared: the program has run before
        return {"told": list(told), "in a collective": time.monotonic() - before}
    manager = jzero.CheckpointManager(directory / "x", check_processes=0.5)
    late = jzero.make_eval_step(small_loss, check_processes=0.5)
    results = {
        "saves with a manager": message(lambda: manager.save(state)),
        "saves": message(lambda: jzero.save_checkpoint(directory / "x", state, check_processes=0.5)),
        "evaluates": message(lambda: late(state, BATCH[:16])),
    }
    jax.block_until_ready(evaluate(state, BATCH))  # the second process has waited for this, and ends
    return {**results, "has ended": message(lambda: evaluate(state, BATCH[:16]))}


def records(folder: pathlib.Path) -> dict[str, Any]:
    """Goes on from what one process wrote, in records; a disk of the second process fails once, and both are told."""
    late = {"optimizer": "disk", "path": folder / "scratch", "chunk_bytes": 2048, "compute": "host", "delay": 1}
    far = dataclasses.replace(config(3), precision="bf16", offload=jzero.Offload(**late))
    like = jax.eval_shape(lambda: make_pair(LAMB))  # which makes sums over records first
    like = jzero.abstract_train_state(like, config=far, mesh=mesh())
    state = jzero.restore_checkpoint(folder / "from_one", like)
    results: dict[str, Any] = {"restored": whole(state)}
    step, numbers = step_of(loss_of_pair), {}
    with jzero.CheckpointManager(folder / "run") as manager:
        for i in range(4):
            batch = models.mlp_batch(ROWS, seed=i)
            if i == 2 and jax.process_count() > 1:
                assert "EIO" in failing(step, state, batch, "write")
            state, metrics = step(state, batch)
            numbers[f"loss {i}"] = float(metrics["loss"])
            if jax.process_count() > 1 and i % 2:
                manager.save(state)  # beside the next step
        state = jzero.apply_pending(state)
        results["numbers"] = numbers | digest("params", jzero.unshard_train_state(state).params)
        if jax.process_count() > 1:
            results |= saved_from_disk(folder, state, manager, like)
    return results


def saved_from_disk(folder: pathlib.Path, state: Any, manager: Any, like: Any) -> dict[str, Any]:
    """Returns what was saved, what is saved of edited parameters, and what is said of a bit that flipped on disk."""
    results: dict[str, Any] = {"trained": whole(state), "again": whole(manager.restore(like))}
    params = jax.tree.map(lambda x: x * 2, state.params)
    jzero.save_checkpoint(folder / "edited", state.replace(params=params))
    results["edited"] = whole(jzero.restore_checkpoint(folder / "edited", like))
    if jax.process_index() == 1:
        store = records_of(state).pipeline.store
        fd = os.open(f"/proc/self/fd/{store._files[store.slot]._fd}", os.O_RDWR)
        os.pwrite(fd, b"\xff\x01", 8)
        os.close(fd)
    try:
        jzero.save_checkpoint(folder / "flipped", state)
    except (jzero.CheckpointError, DiskError) as error:
        results["flipped"] = str(error)
    return results | {"left": os.listdir(folder / "scratch")}


def failing(step: Any, state: Any, batch: Any, what: str) -> str:
    """Returns what a step says while the second process cannot "read" or "write"."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise DiskError("The disk failed: EIO.")

    store = records_of(state).pipeline.store
    if jax.process_index() == 1:
        setattr(store, what, fail)
    try:
        step(state, batch)
    except RuntimeError as error:  # a `DiskError` where it happened
        return str(error)
    finally:
        vars(store).pop(what, None)
    raise AssertionError("it did not fail")


def one_dies(directory: pathlib.Path) -> None:
    """Saves twice; the second process is killed while the second checkpoint is written."""
    state = sharded(make_pair(), config(3))
    with jzero.CheckpointManager(directory) as manager:
        manager.save(state, step=1)
        manager.wait()
        manager.save(state, step=2)
        if jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def preempted(directory: pathlib.Path) -> Any:
    """Saves again and again until one of the processes is told to end; returns the exit status that both then ask for.

    Only the second checkpoint is due to the signal.
    """
    state = sharded(make_state(jax.random.key(0)), config(1))
    with jzero.CheckpointManager(directory, save_interval_steps=1000) as manager:
        for i in range(1, 10_000):
            try:
                manager.save(state, step=i)
            except SystemExit as end:
                return end.code
            time.sleep(0.02)
            if i == 20 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    return "never told"


def rows(folder: pathlib.Path) -> dict[str, float]:
    """Trains with parameters on disk; a row of the second process cannot be read once, and both are told."""
    shape = (3, 29, 29)
    params = {"layers": np.float32(np.random.default_rng(0).normal(size=shape) / 6)}
    away = jzero.Offload(optimizer="disk", params="disk", path=folder, chunk_bytes=2048)
    rules = {"layers": jzero.LeafRule(scan_dim=0)}
    far = jzero.ZeroConfig(precision="bf16", persistence_threshold=50, rules=rules, offload=away)
    plain = jzero.TrainState.create(params=params, tx=optax.adamw(1e-2))
    state, step, numbers = sharded(plain, far), jzero.make_train_step(scanned_loss), {}
    for i in range(3):
        batch = np.random.default_rng(i).normal(size=(ROWS, 29)).astype(np.float32)
        if i == 2 and jax.process_count() > 1:
            assert "EIO" in failing(step, state, batch, "read")
        state, metrics = step(state, batch)
        numbers[f"loss {i}"] = float(metrics["loss"])
    return numbers | digest("params", jzero.unshard_train_state(state).params)


def scanned_loss(params: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(
        lambda x, w: (x + jnp.tanh(x @ w), None), batch.astype(params["layers"].dtype), params["layers"]
    )
    return jnp.square(x.astype(jnp.float32).sum(1) - 1).mean()


RESULT = "result:"
SCENARIOS = {
    f.__name__: f
    for f in (
        train,
        disagree,
        see_other_figures,
        checkpoints,
        published,
        records,
        rows,
        data_worker.train_first,
        preempted,
        alone,
        one_dies,
    )
}


def main() -> None:
    scenarios, process, port, directory = sys.argv[1:]
    presence.LISTEN_S = 0.1
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES_PER_PROCESS)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=NUM_PROCESSES,
        process_id=int(process),
        initialization_timeout=300,
        heartbeat_timeout_seconds=10,
    )
    assert jax.local_device_count() == DEVICES_PER_PROCESS
    for scenario in scenarios.split(","):
        result = SCENARIOS[scenario](pathlib.Path(directory) / scenario)
        print(RESULT, json.dumps(result), flush=True)  # noqa: T201  # on a line among those of gloo
    gc.freeze()  # Python would search all that jax holds for garbage before it ends


if __name__ == "__main__":
    main()
