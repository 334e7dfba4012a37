"""Time per step against DeepSpeed and FSDP2: `python -m benchmarks.torch_peers --torch PYTHON`.

Four processes with one CPU device each, gloo over loopback, one thread per process; the model, weights and batches of
`benchmarks/peers/`. `PYTHON` has torch and deepspeed (`peers/train.py` says how to install them). jzero and the peers
run in turns, `--rounds` times; the table has the median of the rounds, the best, and the ratio of the
medians. The first steps do not count. Losses after the last step stand beside.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import free_port, parser_of

ROOT = pathlib.Path(__file__).parents[1]
WARM = 5
THREADS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
RUNS = {
    "jzero, stage 2": ("jzero", 2),
    "DeepSpeed, stage 2": ("deepspeed", 2),
    "jzero, stage 3": ("jzero", 3),
    "DeepSpeed, stage 3": ("deepspeed", 3),
    "FSDP2, stage 3": ("fsdp2", 3),
}


def work(options: argparse.Namespace) -> None:
    """Trains as one of the processes, and prints its times and losses as JSON."""
    import jax  # only workers need it, after their environment is set
    import numpy as np
    import optax
    from jax.experimental import multihost_utils

    import jzero
    from benchmarks import peers
    from tests import deepspeed_model

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{options.port}", peers.PROCESSES, options.worker)
    weights = peers.weights()
    blocks = {name: [weights.pop(f"blocks.{i}.{name}") for i in range(peers.LAYERS)] for name in peers.BLOCK}
    params = deepspeed_model.nested(weights | {f"blocks.{name}": np.stack(x) for name, x in blocks.items()})
    (b1, b2), others = peers.ADAMW["betas"], {name: x for name, x in peers.ADAMW.items() if name != "betas"}
    plain = jzero.TrainState.create(params=params, tx=optax.adamw(peers.LEARNING_RATE, b1, b2, **others))
    config = jzero.ZeroConfig(stage=options.stage, precision=options.dtype, persistence_threshold=0)
    state = jzero.shard_train_state(plain, config=config)
    loss_fn = lambda params, batch: deepspeed_model.loss_fn(params, batch, peers.HEADS)
    step = jzero.make_train_step(loss_fn, clip_norm=peers.CLIP, remat="as_written")  # peers keep activations
    sharding = jax.sharding.NamedSharding(jzero.plan_of(state).mesh, jax.sharding.PartitionSpec("data"))
    times, losses = [], []
    for rows in peers.tokens(options.steps).astype(np.int32):
        batch = jax.make_array_from_process_local_data(sharding, rows[peers.own_rows(options.worker)])
        multihost_utils.sync_global_devices("step")
        started = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        times.append(time.perf_counter() - started)
    if options.worker == 0:
        print(json.dumps({"times": times, "losses": losses}))


def run(engine: str, stage: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the times and losses that the first of four processes prints."""
    arguments = ["--stage", str(stage), "--dtype", options.dtype, "--steps", str(options.steps)]
    port, environment = str(free_port()), {**os.environ, **THREADS}
    if engine == "jzero":
        flags = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        commands = [
            [sys.executable, "-m", "benchmarks.torch_peers", *arguments, "--port", port, "--worker", str(i)]
            for i in range(4)
        ]
    else:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-addr", "127.0.0.1"]
        launch += ["--master-port", port, "-m", "benchmarks.peers.train", "--engine", engine]
        commands = [[options.torch, *launch, *arguments]]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(x, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) for x in commands]
    outputs = [process.communicate() for process in started]
    for path in pathlib.Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):  # what DeepSpeed leaves is memory
        path.unlink()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{process.args} failed:\n{errors[-2000:]}")
    (line,) = [x for x in outputs[0][0].splitlines() if x.startswith("{")]
    found = json.loads(line)
    return {**found, "median": statistics.median(found["times"][WARM:] or found["times"])}


def main() -> None:
    """Runs everything in turns and prints a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--torch", metavar="PYTHON", help="a Python with torch and deepspeed; without, only jzero runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of rows, such as FSDP2")
    for name in ("--stage", "--worker", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    runs = {name: x for name, x in RUNS.items() if options.torch or x[0] == "jzero"}
    runs = {name: x for name, x in runs.items() if not options.only or any(y in name for y in options.only)}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, (engine, stage) in runs.items():
            results[name].append(run(engine, stage, options))
            print(f"{name}: {1e3 * results[name][-1]['median']:.0f} ms", file=sys.stderr, flush=True)
    print(f"\n| {options.dtype} | ms per step, median of rounds (best) | of jzero | loss after {options.steps} steps |")
    print("|---|---|---|---|")
    for name, rounds in results.items():
        times = [x["median"] for x in rounds]
        peers = [x["median"] for x in results.get(f"jzero, stage {RUNS[name][1]}", [])]
        ratio = f"{statistics.median(times) / statistics.median(peers):.2f}" if peers else ""
        median, best = 1e3 * statistics.median(times), 1e3 * min(times)
        print(f"| {name} | {median:.0f} ({best:.0f}) | {ratio} | {rounds[0]['losses'][-1]:.6f} |")


if __name__ == "__main__":
    main()
