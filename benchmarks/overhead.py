"""What a step of jzero costs beside its arithmetic, against plain `jax.jit` of the same training: `python -m
benchmarks.overhead`.

* Tracing and lowering: seconds of `step.lower(state, batch)`, of jzero at each stage and of replicated `jax.jit`, in
  turns, nothing cached; and the size of the lowered and of the compiled program.
* Dispatch: CPU time of the calling thread per call of a step that does next to nothing, beside the same program called
  by `jax.jit(step)`, which leaves out what a step checks before a call. With 302 and 1001 arrays in the state, and a
  batch on the mesh, in NumPy arrays, and in arrays of one device.
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
from benchmarks.turns import in_turns


def medians(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Returns the median seconds of each, measured in turns."""
    return {name: statistics.median(x) for name, x in in_turns(runs, repeats, before=gc.collect).items()}


def instructions(compiled: Any) -> int:
    """Returns how many instructions a compiled program has."""
    return sum(" = " in line for line in compiled.as_text().splitlines())


def lowering(mesh: jax.sharding.Mesh, model: GPT, repeats: int) -> None:
    """Prints what it takes to trace and lower a step."""
    tokens = jax.ShapeDtypeStruct((2 * mesh.size, 129), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(AXIS)))
    programs = {"jax.jit": ("replicated", 0), **{f"jzero, stage {stage}": ("jzero", stage) for stage in (1, 2, 3)}}
    if not model.remat:
        programs["jzero, stage 3, as written"] = ("jzero as written", 3)
    engines = {name: make_engine(engine, model, stage, mesh) for name, (engine, stage) in programs.items()}

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
    loss_fn = lambda params, batch: sum(jnp.sum(x[0] * batch["x"].mean()) for x in jax.tree.leaves(params))
    host = {"x": np.ones((mesh.size, 8), np.float32), "y": np.ones((mesh.size,), np.int32)}
    batches = {
        "on the mesh": jax.device_put(host, NamedSharding(mesh, PartitionSpec(AXIS))),
        "NumPy": host,
        "on one device": jax.tree.map(jnp.asarray, host),
    }
    print(f"\n{mesh.size} devices, stage 3\n")
    print("| leaves | batch | `jax.jit(step)`, ms | step, ms | more, ms | of that call |\n|---|---|---|---|---|---|")
    for num_params in (100, 333):
        params = {f"w{i}": np.ones((64, 8), np.float32) for i in range(num_params)}
        plain = jax.device_get(jzero.TrainState.create(params=params, tx=optax.adamw(1e-3)))
        state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, persistence_threshold=0), mesh=mesh)
        step = jzero.make_train_step(loss_fn, check_rows=False)
        in_jit = jax.jit(step, donate_argnums=0)  # nothing looks at the state before each call
        for name, batch in batches.items():
            (jitted, ours), more, state = _calls([in_jit, step], state, batch, repeats)
            num_leaves = len(jax.tree.leaves(state))
            print(f"| {num_leaves} | {name} | {jitted:.2f} | {ours:.2f} | {more:+.2f} | {more / jitted:+.1%} |")


def _calls(steps: list[Any], state: Any, batch: Any, repeats: int) -> tuple[list[float], float, Any]:
    """Returns, in ms, the median call of two steps and what the second takes more; and the last state.

    They step the same state in turns, forwards and backwards, since what ran before is in the caches; two calls each,
    of which the second counts, as in a training loop.
    """
    calls: list[list[float]] = [[] for _ in steps]
    for i in range(repeats * 40):
        for j in sorted(range(len(steps)), reverse=bool(i % 2)):
            state, _ = jax.block_until_ready(steps[j](state, batch))
            started = time.thread_time()
            state, metrics = steps[j](state, batch)
            took = time.thread_time() - started
            jax.block_until_ready((state, metrics))
            if i >= repeats:
                calls[j].append(1e3 * took)
    more = statistics.median(b - a for a, b in zip(*calls, strict=True))
    return list(map(statistics.median, calls)), more, state


def main() -> None:
    """Measures everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dispatch", action="store_true", help="measure only calls")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = jzero.make_mesh()
    size = SIZES["124M"]  # of a smaller one most parameters would be below the persistence threshold
    print(f"jax {jax.__version__}, {size}")
    for scan, remat in () if options.dispatch else itertools.product((True, False), (True, False)):
        lowering(mesh, GPT(size, scan=scan, remat=remat), options.repeats)
    if not options.dispatch:
        lowering(jzero.make_mesh(devices=jax.devices()[:1]), GPT(size, scan=True, remat=True), options.repeats)
    for devices in (jax.devices(), jax.devices()[:1]):
        dispatch(jzero.make_mesh(devices=devices), options.repeats)


if __name__ == "__main__":
    main()
