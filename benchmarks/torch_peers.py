"""Time per step against DeepSpeed and FSDP2: `python -m benchmarks.torch_peers --scripts DIR --torch PYTHON`.

Four processes with one CPU device each, gloo over loopback, one thread per process; the same model, weights, batches.
`DIR` holds `model_spec.py`, `run_deepspeed.py` and `run_fsdp2.py` (the runs that `tests/data/deepspeed_runs.json` was
recorded with); `PYTHON` has torch and deepspeed. jzero and the peers run in turns, `--rounds` times; the table has the
best round of each and the ratio of the medians of the rounds. Losses of the first steps are compared.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

PROCESSES, WARM = 4, 5
THREADS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def model_spec(scripts: pathlib.Path) -> Any:
    """Returns the module that describes model and batches."""
    spec = importlib.util.spec_from_file_location("model_spec", scripts / "model_spec.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(options: argparse.Namespace) -> None:
    """Trains as one of the processes, and prints its times and losses as JSON."""
    import jax  # only workers need it, after their environment is set
    import numpy as np
    import optax
    from jax.experimental import multihost_utils

    import jzero
    from tests import deepspeed_model

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{options.port}", PROCESSES, options.worker)
    spec = model_spec(options.scripts)
    config, opt = spec.CONFIGS["bench"], spec.OPT
    weights = spec.init_weights(config)
    tokens = spec.make_tokens(config, steps=options.steps)
    names = [name.removeprefix("blocks.0.") for name in weights if name.startswith("blocks.0.")]
    stacked = {
        f"blocks.{name}": np.stack([weights.pop(f"blocks.{i}.{name}") for i in range(config["layers"])])
        for name in names
    }
    params = deepspeed_model.nested(weights | stacked)
    tx = optax.adamw(opt["lr"], *opt["betas"], eps=opt["eps"], weight_decay=opt["weight_decay"])
    state = jzero.TrainState.create(params=params, tx=tx)
    state = jzero.shard_train_state(
        state, config=jzero.ZeroConfig(stage=options.stage, precision=options.dtype, persistence_threshold=0)
    )
    loss_fn = lambda params, batch: deepspeed_model.loss_fn(params, batch, config["heads"])
    step = jzero.make_train_step(loss_fn, clip_norm=opt["clip"], remat="as_written")  # peers keep activations
    rows = tokens.shape[1] // PROCESSES
    mine = slice(options.worker * rows, (options.worker + 1) * rows)
    sharding = jax.sharding.NamedSharding(jzero.plan_of(state).mesh, jax.sharding.PartitionSpec("data"))
    times, losses = [], []
    for rows_of_step in tokens:
        batch = jax.make_array_from_process_local_data(sharding, np.asarray(rows_of_step[mine], np.int32))
        multihost_utils.sync_global_devices("step")
        started = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        times.append(time.perf_counter() - started)
    if options.worker == 0:
        print(json.dumps({"median_s": statistics.median(times[WARM:]), "losses": losses}))


def run_jzero(stage: int, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the first of four jzero processes prints."""
    port = free_port()
    flags = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1"
    environment = {**os.environ, **THREADS, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.torch_peers", "--scripts", str(options.scripts)]
    command += ["--stage", str(stage), "--dtype", dtype, "--steps", str(options.steps), "--port", str(port)]
    workers = [
        subprocess.Popen([*command, "--worker", str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(PROCESSES)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"A process of jzero failed: {[worker.returncode for worker in workers]}")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def run_torch(script: str, arguments: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Returns times and losses of a peer."""
    with tempfile.TemporaryDirectory() as folder:
        spec = model_spec(options.scripts)
        config = spec.CONFIGS["bench"]
        data = pathlib.Path(folder)
        import numpy as np

        np.savez(data / "bench_init.npz", **spec.init_weights(config))
        np.savez(data / "bench_tokens.npz", tokens=spec.make_tokens(config, steps=options.steps))
        environment = {**os.environ, **THREADS, "ORACLE_OUT": folder, "ORACLE_DATA": folder}
        launch = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(PROCESSES)]
        launch += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        tail = ["--variant", "bench", "--no-params", "--steps", str(options.steps)]
        command = [options.torch, *launch, str(options.scripts / script), *arguments, *tail]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        for path in glob.glob("/dev/shm/deepspeed_allreduce_buffer_*"):  # what DeepSpeed leaves behind is memory
            pathlib.Path(path).unlink()
        results = list(data.glob("*.json"))
        if done.returncode or not results:
            raise RuntimeError(f"{script} failed:\n{done.stderr[-2000:]}")
        report = json.loads(results[0].read_text())
        return {"median_s": report["step_time"]["median_s"], "losses": report["losses"]}


def main() -> None:
    """Runs everything in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", type=pathlib.Path, required=True)
    parser.add_argument("--torch", help="a Python with torch and deepspeed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--stage", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    dtype = ["--dtype", options.dtype]
    runs = {
        "jzero, stage 2": lambda: run_jzero(2, options.dtype, options),
        "DeepSpeed, stage 2": lambda: run_torch("run_deepspeed.py", ["--stage", "2", *dtype], options),
        "jzero, stage 3": lambda: run_jzero(3, options.dtype, options),
        "DeepSpeed, stage 3": lambda: run_torch("run_deepspeed.py", ["--stage", "3", *dtype], options),
        "FSDP2": lambda: run_torch("run_fsdp2.py", ["--mode", "fsdp", *dtype], options),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            results[name].append(run())
            print(f"{name}: {1e3 * results[name][-1]['median_s']:.0f} ms", file=sys.stderr, flush=True)
    print(f"\n| {options.dtype} | ms per step, median of rounds (best) | of jzero | loss after {options.steps} steps |")
    print("|---|---|---|---|")
    for name, rounds in results.items():
        peers = results["jzero, stage 2" if name.endswith("2") and "FSDP" not in name else "jzero, stage 3"]
        times = [r["median_s"] for r in rounds]
        ratio = statistics.median(times) / statistics.median(r["median_s"] for r in peers)
        median, best = 1e3 * statistics.median(times), 1e3 * min(times)
        print(f"| {name} | {median:.0f} ({best:.0f}) | {ratio:.2f} | {rounds[0]['losses'][-1]:.6f} |")


if __name__ == "__main__":
    main()
