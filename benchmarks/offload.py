"""What offload saves, and what it costs: `python -m benchmarks.offload`.

With `--topology v5p:2x2x2` (or `h200:8`) a step of a scanned GPT is compiled for that machine, which need not be there
(`pip install 'jzero[tpu]'` or `'jzero[gpu]'`): bytes per device and on the host, with the optimizer state on the
devices, on the host, on the host in larger chunks, and updated by the host's CPU, at once and one step later.

Without, a smaller one is trained on the devices that are there: time per step with and without offload in one run, the
bytes that travel, their rate, and that of a plain `jax.device_put` of as many bytes each way. On CPUs host memory and
device memory are the same, so the rates say nothing about a link.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from benchmarks.gpt import GPT, Size, init_of, loss_of
from jzero.analysis.topologies import topology_devices

MIB = 2**20
HEADER = f"{'offload':24}{'arguments':>12}{'temporaries':>13}{'peak':>10}{'host':>10}   MiB per device"


def make_model(options: argparse.Namespace) -> tuple[Any, Callable[..., Any]]:
    """Returns what makes the state from a key, and the loss."""
    model = GPT(Size(options.width, options.layers, options.vocab))
    init = init_of(model)
    return lambda key: jzero.TrainState.create(params=init(key), tx=optax.adamw(1e-4)), loss_of(model)


def variants(options: argparse.Namespace) -> dict[str, jzero.Offload]:
    """Returns what is compared."""
    host = jzero.Offload(optimizer="host")
    large = dataclasses.replace(host, chunk_bytes=options.large_chunk)
    found = {"none": jzero.Offload(), "optimizer": host, f"in {options.large_chunk / MIB:g} MiB": large}
    if options.stage == 3:
        found["parameters, too"] = dataclasses.replace(host, params="host")
    found["updated by the CPU"] = dataclasses.replace(host, compute="host")
    found["one step later"] = dataclasses.replace(host, compute="host", delay=1)
    return {name: found[name] for name in options.only or found}


def compile_for(options: argparse.Namespace) -> None:
    """Prints what the compiler of a machine makes of each variant."""
    make_state, loss_fn = make_model(options)
    mesh = jzero.make_mesh(devices=topology_devices(options.topology))
    plain = jax.eval_shape(make_state, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((mesh.size * options.rows, options.seq_len + 1), jnp.int32)
    size = sum(x.size for x in jax.tree.leaves(plain.params))
    print(f"{size / 1e9:.3f}B parameters on {options.topology}, jax {jax.__version__}, stage {options.stage}")
    for precision in options.precision:
        print(f"\n{precision}\n{HEADER}")
        before = None
        for name, offload in variants(options).items():
            config = jzero.ZeroConfig(
                stage=options.stage, precision=precision, persistence_threshold=0, offload=offload
            )
            step = jzero.make_train_step(loss_fn)
            report = jzero.analyze(step, plain, batch, topology=options.topology, config=config)
            report.verify()
            memory = report.memory
            cells = (memory.arguments, memory.peak - memory.arguments, memory.peak, memory.host)
            row = "".join(f"{x / MIB:>{w}.1f}" for x, w in zip(cells, (12, 13, 10, 10), strict=True))
            before = before or memory
            saved = ""
            if memory.host:
                freed, peak = before.arguments - memory.arguments, before.peak - memory.peak
                saved = f"   at rest -{freed / MIB:.1f}, peak -{peak / MIB:.1f}"
            print(f"{name:24}{row}{saved}", flush=True)


def measure(options: argparse.Namespace) -> None:
    """Trains, and prints times and rates."""
    make_state, loss_fn = make_model(options)
    mesh = jzero.make_mesh()
    tokens = np.random.default_rng(0).integers(0, options.vocab, (mesh.size * options.rows, options.seq_len + 1))
    batch = tokens.astype(np.int32)
    device = jax.devices()[0]
    print(f"{mesh.size} x {device.device_kind}, jax {jax.__version__}, stage {options.stage}")
    for precision in options.precision:
        steps: dict[str, Any] = {}
        for name, offload in variants(options).items():
            config = jzero.ZeroConfig(
                stage=options.stage, precision=precision, persistence_threshold=0, offload=offload
            )
            step = jzero.make_train_step(loss_fn)
            state, metrics = step(jzero.init_train_state(make_state, jax.random.key(0), config=config), batch)
            jax.block_until_ready(metrics)
            plan = jzero.plan_of(state)
            stats = device.memory_stats() or {}
            steps[name] = (step, state, [], plan)
            peak = stats.get("peak_bytes_in_use")
            print(f"{precision} {name}: plan {plan.bytes_per_device.total / MIB:.1f} MiB on a device, "
                  f"{plan.host_bytes_per_device.total / MIB:.1f} MiB on its host; "
                  f"peak so far {'unknown' if peak is None else f'{peak / MIB:.1f} MiB'}")  # fmt: skip
        for _ in range(options.repeats):  # in turn, so that all meet the same machine
            for name, (step, state, times, plan) in steps.items():
                started = time.perf_counter()
                after, metrics = step(state, batch)
                jax.block_until_ready((after, metrics))
                times.append(time.perf_counter() - started)
                steps[name] = (step, after, times, plan)
        plain = statistics.median(steps["none"][2])
        for name, (_, _, times, plan) in steps.items():
            median, host = statistics.median(times), plan.host_bytes_per_device.total * mesh.size
            streams = host and plan.config.offload.compute == "device"
            rate = f", at least {2 * host / median / 1e9:.2f} GB/s both ways together" if streams else ""
            print(f"{precision} {name}: {1e3 * median:.1f} ms per step, {median / plain:.2f} of none{rate}")
        print(f"plain device_put of as many bytes: {transfer_rate(steps['optimizer'][3], mesh):.2f} GB/s")


def transfer_rate(plan: jzero.ZeroPlan, mesh: jax.sharding.Mesh) -> float:
    """Returns GB/s of bringing as much as the plan has on the host to the devices and back, all devices together."""
    count = max(1, plan.host_bytes_per_device.total // 4)
    near = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    away = near.with_memory_kind("pinned_host")
    x = jax.block_until_ready(jax.device_put(np.zeros((mesh.size, count), np.float32), away))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(jax.block_until_ready(jax.device_put(x, near)), away))
        times.append(time.perf_counter() - started)
    return 2 * x.nbytes / statistics.median(times) / 1e9


def main() -> None:
    """Compiles, or trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", help="compile for a machine such as v5p:2x2x2 in place of training here")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--rows", type=int, default=2, help="sequences per device")
    parser.add_argument("--large-chunk", type=int, default=64 * MIB, help="bytes of the larger chunks")
    parser.add_argument("--only", nargs="+", help="which of the rows")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    sizes = {"vocab": 50304, "width": 2048, "layers": 24, "seq_len": 1024}
    small = {"vocab": 8192, "width": 512, "layers": 8, "seq_len": 128}
    for name, value in (sizes if options.topology else small).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.topology:
        jax.config.update("jax_platforms", "cpu")
        compile_for(options)
    else:
        jax.config.update("jax_num_cpu_devices", 8)
        measure(options)


if __name__ == "__main__":
    main()
