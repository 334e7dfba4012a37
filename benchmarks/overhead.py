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
    plain = jax.device_get(jzero.TrainState.create(params=params, tx=tx))
    batch = jax.device_put(np.ones((mesh.size, 8), np.float32), NamedSharding(mesh, PartitionSpec(AXIS)))
    whole = NamedSharding(mesh, PartitionSpec())

    def plain_step(state: Any, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    print(f"\n{mesh.size} devices, a state of {len(jax.tree.leaves(plain))} small leaves\n")
    print(
        "| | call, ms | with the wait, ms | more than the same in `jax.jit`, ms | of that call |\n|---|---|---|---|---|"
    )
    calls, waits, _ = _calls([jax.jit(plain_step, donate_argnums=0)], jax.device_put(plain, whole), batch, repeats)
    print(f"| jax.jit | {calls[0]:.2f} | {waits[0]:.2f} | | |")
    for stage in (1, 3):
        state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=stage, persistence_threshold=0), mesh=mesh)
        step = jzero.make_train_step(loss_fn)
        in_jit = jax.jit(step, donate_argnums=0)  # nothing looks at the state before each call
        calls, waits, (more,) = _calls([in_jit, step], state, batch, repeats)
        print(f"| jzero, stage {stage} | {calls[1]:.2f} | {waits[1]:.2f} | {more:+.2f} | {more / calls[0]:+.1%} |")


def _calls(steps: list[Any], state: Any, batch: Any, repeats: int) -> tuple[list[float], list[float], list[float]]:
    """Returns, in ms, the median call of each step, that until it is done, and what each but the first takes more.

    They step the same state in turns, forwards and backwards, since what ran before is in the caches; two calls each,
    of which the second counts, as in a training loop.
    """
    calls: list[list[float]] = [[] for _ in steps]
    waits: list[list[float]] = [[] for _ in steps]
    for i in range(repeats * 40):
        for j in sorted(range(len(steps)), reverse=bool(i % 2)):
            state, _ = jax.block_until_ready(steps[j](state, batch))
            started = time.perf_counter()
            state, metrics = steps[j](state, batch)
            called = time.perf_counter()
            jax.block_until_ready((state, metrics))
            if i >= repeats:
                calls[j].append(1e3 * (called - started))
                waits[j].append(1e3 * (time.perf_counter() - started))
    more = [statistics.median(b - a for a, b in zip(calls[0], x, strict=True)) for x in calls[1:]]
    return list(map(statistics.median, calls)), list(map(statistics.median, waits)), more


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
    for devices in (jax.devices(), jax.devices()[:1]):
        dispatch(jzero.make_mesh(devices=devices), options.repeats)


if __name__ == "__main__":
    main()
