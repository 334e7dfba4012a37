"""What a step of jzero costs beside its arithmetic: `python -m benchmarks.overhead [tracing] [dispatch] [agreement]`.

* tracing: CPU seconds of tracing and lowering a step at stage 3 on 8 devices, beside the same training by plain
  `jax.jit`, in turns, nothing cached, the best of `--repeats`; for `--models` of `benchmarks/models.py`. With
  `--topology h200:8` on devices that are not there, for which a step chooses what it keeps.
* dispatch: CPU time of the calling thread per call of a step that does next to nothing, beside the same program called
  by `jax.jit(step)`, which leaves out what a step checks before a call. With 302 and 1001 arrays in the state
  (`--params`), and a batch on the mesh, in NumPy arrays, and in arrays of one device.
* agreement: what comparing processes adds to the first call. Two processes of four CPU devices each, with gloo over
  loopback, shard a GPT of `--layers` of 1024 (20 have 1 GB of fp32 parameters, and twice that of moments), and compile
  and run a first step. The checks are the checksums of all values and the fingerprint of the program.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import free_port, parser_of, wait_for

TRACED = ("llama_125m", "llama_1b", "dit", "t5", "gpt_48_layers", "gpt_2_layers", "mlp")
PROCESSES, DEVICES = 2, 4


def tracing(options: argparse.Namespace) -> None:
    """Prints what tracing and lowering takes."""
    import jax

    import jzero
    from benchmarks.engines import AXIS, batch_of, jzero_step, plain_step
    from benchmarks.models import MODELS
    from jzero.machines.topologies import topology_devices

    devices = None if options.topology is None else topology_devices(options.topology)
    mesh = jzero.make_mesh(devices=devices, **{AXIS: -1})
    print(f"jax {jax.__version__}, {mesh.devices.flat[0].device_kind}, {mesh.size} devices, stage 3\n")
    print("| | plain `jax.jit`, CPU s | jzero, CPU s | ratio |\n|---|---|---|---|")
    for name in options.models:
        family = MODELS[name]()
        makers = {
            "plain": lambda family=family: (
                plain_step(family, devices and mesh),
                batch_of(family, mesh) if devices else family.batch(family.rows),
            ),
            "jzero": lambda family=family: (jzero_step(family, 3, mesh), batch_of(family, mesh)),
        }
        best = dict.fromkeys(makers, math.inf)
        for _, (key, make) in itertools.product(range(options.repeats), makers.items()):
            engine, batch = make()
            jax.clear_caches()
            gc.collect()
            started = time.process_time()
            engine.step.lower(engine.like, batch)
            best[key] = min(best[key], time.process_time() - started)
        print(
            f"| {name} | {best['plain']:.2f} | {best['jzero']:.2f} | {best['jzero'] / best['plain']:.2f} |", flush=True
        )


def dispatch(options: argparse.Namespace) -> None:
    """Prints what it takes to call a step of a state with many leaves, whose arithmetic is next to nothing."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import jzero

    loss_fn = lambda params, batch: sum(jnp.sum(x[0] * batch["x"].mean()) for x in jax.tree.leaves(params))
    print(
        f"\njax {jax.__version__}, stage 3\n\n| devices | leaves | batch | `jax.jit(step)`, ms | step, ms | more, ms |"
    )
    print("|---|---|---|---|---|---|")
    for devices, num_params in itertools.product((jax.devices(), jax.devices()[:1]), options.params):
        mesh = jzero.make_mesh(devices=devices)
        host = {"x": np.ones((mesh.size, 8), np.float32), "y": np.ones((mesh.size,), np.int32)}
        batches = {
            "on the mesh": jax.device_put(host, NamedSharding(mesh, PartitionSpec("data"))),
            "NumPy": host,
            "on one device": jax.tree.map(jnp.asarray, host),
        }
        params = {f"w{i}": np.ones((64, 8), np.float32) for i in range(num_params)}
        plain = jax.device_get(jzero.TrainState.create(params=params, tx=optax.adamw(1e-3)))
        state = jzero.shard_train_state(plain, config=jzero.ZeroConfig(stage=3, persistence_threshold=0), mesh=mesh)
        step = jzero.make_train_step(loss_fn, check_rows=False)
        in_jit = jax.jit(step, donate_argnums=0)  # nothing looks at the state before each call
        leaves = len(jax.tree.leaves(state))
        for name, batch in batches.items():
            (jitted, ours), more, state = _calls([in_jit, step], state, batch, options.repeats)
            print(f"| {mesh.size} | {leaves} | {name} | {jitted:.2f} | {ours:.2f} | {more:+.2f} |", flush=True)


def _calls(steps: list[Any], state: Any, batch: Any, repeats: int) -> tuple[list[float], float, Any]:
    """Returns, in ms, the median call of two steps and what the second takes more; and the last state.

    They step the same state in turns, forwards and backwards, since what ran before is in the caches; two calls each,
    of which the second counts, as in a training loop.
    """
    import jax

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


def agreement(options: argparse.Namespace) -> None:
    """Prints a row for each of two processes."""
    print(f"\n| process | {' | '.join(f'shard and first step, {x}s | checks | share' for x in ('', 'CPU '))} |")
    print("|" + "---|" * 7, flush=True)
    command = [sys.executable, "-m", "benchmarks.overhead", "--layers", str(options.layers), "--port", str(free_port())]
    processes = [subprocess.Popen([*command, "--worker", str(i)]) for i in range(PROCESSES)]
    wait_for(processes)


def work(options: argparse.Namespace) -> None:
    """Shards and trains a step as one of the processes, and prints what that took."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{options.port}", PROCESSES, options.worker)
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jzero
    from benchmarks.engines import loss_of
    from benchmarks.family_models import gpt
    from jzero.core.processes import fingerprints
    from jzero.core.state import gather
    from jzero.core.step import agreement

    model = gpt(layers=options.layers, scanned=True, seq_len=8, vocab=2048, width=1024, tied=False)
    drawn = 0.02 * np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(np.resize(drawn, x.shape)), shapes)
    plain = jax.block_until_ready(jzero.TrainState.create(params=params, tx=optax.adamw(1e-3)))
    checks = [0.0, 0.0]

    def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter(), time.thread_time()
            result = fn(*args)
            checks[0] += time.perf_counter() - started[0]
            checks[1] += time.thread_time() - started[1]
            return result

        return call

    gather.describe_value = timed(fingerprints.describe_value)
    agreement.describe_program = timed(fingerprints.describe_program)
    started = time.perf_counter(), time.process_time()
    state = jax.block_until_ready(jzero.shard_train_state(plain, stage=3))
    step = jzero.make_train_step(loss_of(model))
    jax.block_until_ready(step(state, np.zeros((PROCESSES * DEVICES, 9), np.int32)))
    took = time.perf_counter() - started[0], time.process_time() - started[1]
    cells = [f"{x:.2f} | {check:.2f} | {check / x:.1%}" for x, check in zip(took, checks, strict=True)]
    print(f"| {options.worker} | {' | '.join(cells)} |", flush=True)


CASES = {"tracing": tracing, "dispatch": dispatch, "agreement": agreement}


def main() -> None:
    """Measures the cases."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--models", nargs="+", default=TRACED)
    parser.add_argument("--topology", help="of tracing: a machine that is not there")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--params", type=int, nargs="+", default=[100, 333], help="numbers of parameters: of dispatch")
    parser.add_argument("--layers", type=int, default=20, help="of agreement")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no cases {sorted(unknown)}: choose of {', '.join(CASES)}")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name in options.cases or CASES:
        CASES[name](options)


if __name__ == "__main__":
    main()
