"""What a step of jzero costs beside its arithmetic, against plain `jax.jit` of the same training: `python -m
benchmarks.overhead`.

* Tracing and lowering: seconds of `step.lower(state, batch)`, of jzero at each stage and of replicated `jax.jit`, in
  turns, nothing cached; and the size of the lowered and of the compiled program.
* Dispatch: seconds per call of a step that does next to nothing, as long as it is not the devices that are waited for;
  beside plain `jax.jit` the same program called by `jax.jit(step)`, which leaves out what a step checks before a call.
* One device: the compiled program of jzero at stage 3 beside that of plain `jax.jit`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from benchmarks.engines import make_engine
from benchmarks.gpt import AXIS, GPT, SIZES

SAME = "in `jax.jit`: "


def medians(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Returns the median seconds of each, measured in turns."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            gc.collect()
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(x) for name, x in times.items()}


def instructions(compiled: Any) -> int:
    """Returns how many instructions a compiled program has."""
    return sum(" = " in line for line in compiled.as_text().splitlines())


def lowering(mesh: jax.sharding.Mesh, model: GPT, repeats: int) -> None:
    """Prints what it takes to trace and lower a step."""
    tokens = jax.ShapeDtypeStruct((2 * mesh.size, 129), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(AXIS)))
    wanted = {"jax.jit": ("replicated", 0), **{f"jzero, stage {stage}": ("jzero", stage) for stage in (1, 2, 3)}}
    if not model.remat:
        wanted["jzero, stage 3, as written"] = ("jzero as written", 3)
    engines = {name: make_engine(engine, model, stage, mesh) for name, (engine, stage) in wanted.items()}

    def lower(name: str) -> Any:
        jax.clear_caches()
        engine = engines[name]
        if hasattr(engine.step, "clear_cache"):
            engine.step.clear_cache()
        return engine.step.lower(engine.like, tokens)

    seconds = medians({name: (lambda name=name: lower(name)) for name in engines}, repeats)
    print(f"\n{mesh.size} devices, {'scanned' if model.scan else 'unrolled'}, remat {model.remat}\n")
    print("| | trace and lower, s | of `jax.jit` | lowered, lines | compiled, instructions | of `jax.jit` |")
    print("|---|---|---|---|---|---|")
    sizes = {}
    for name in engines:
        lowered = lower(name)
        sizes[name] = instructions(lowered.compile())
        ratio = seconds[name] / seconds["jax.jit"]
        lines = len(lowered.as_text().splitlines())
        size = sizes[name] / sizes["jax.jit"]
        print(f"| {name} | {seconds[name]:.2f} | {ratio:.2f} | {lines} | {sizes[name]} | {size:.2f} |")


def dispatch(mesh: jax.sharding.Mesh, repeats: int) -> None:
    """Prints what it takes to call a step of a state with many leaves, whose arithmetic is next to nothing."""
    params = {f"w{i}": np.ones((64, 8), np.float32) for i in range(100)}
    tx = optax.adamw(1e-3)
    loss_fn = lambda params, batch: sum(jnp.sum(x[0] * batch.mean()) for x in jax.tree.leaves(params))
    plain = jzero.TrainState.create(params=params, tx=tx)
    batch = jax.device_put(np.ones((mesh.size, 8), np.float32), NamedSharding(mesh, PartitionSpec(AXIS)))
    whole = NamedSharding(mesh, PartitionSpec())

    def plain_step(state: Any, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    steps: dict[str, Any] = {"jax.jit": jax.jit(plain_step, donate_argnums=0)}
    states = {"jax.jit": jax.device_put(plain, whole)}
    for stage in (1, 3):
        config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
        step = jzero.make_train_step(loss_fn)
        for name, called in ((f"jzero, stage {stage}", step), (f"{SAME}jzero, stage {stage}", None)):
            states[name] = jzero.shard_train_state(plain, config=config, mesh=mesh)
            steps[name] = called or jax.jit(step, donate_argnums=0)  # nothing looks at the state before each call

    calls: dict[str, list[float]] = {name: [] for name in steps}
    waits: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(repeats * 10):
        for name, step in steps.items():
            started = time.perf_counter()
            states[name], metrics = step(states[name], batch)
            called = time.perf_counter()
            jax.block_until_ready((states[name], metrics))
            if i >= repeats:
                calls[name].append(called - started)
                waits[name].append(time.perf_counter() - started)
    print(f"\n{mesh.size} devices, a state of {len(jax.tree.leaves(plain))} small leaves\n")
    print(
        "| | call, ms | with the wait, ms | more than the same in `jax.jit`, ms (median of turns) |\n|---|---|---|---|"
    )
    for name in steps:
        same = calls.get(SAME + name)
        more = (
            ""
            if same is None
            else f"{1e3 * statistics.median(a - b for a, b in zip(calls[name], same, strict=True)):+.2f}"
        )
        call, wait = (1e3 * statistics.median(times[name]) for times in (calls, waits))
        print(f"| {name} | {call:.2f} | {wait:.2f} | {more} |")


def main() -> None:
    """Measures everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = jzero.make_mesh()
    size = SIZES["124M"]  # of a smaller one most parameters would be below the persistence threshold
    print(f"jax {jax.__version__}, {size}")
    for scan, remat in itertools.product((True, False), (True, False)):
        lowering(mesh, GPT(size, scan=scan, remat=remat), options.repeats)
    lowering(jzero.make_mesh(devices=jax.devices()[:1]), GPT(size, scan=True, remat=True), options.repeats)
    dispatch(mesh, options.repeats)


if __name__ == "__main__":
    main()
