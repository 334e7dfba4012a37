"""What offload saves, and what it costs: `python -m benchmarks.offload`.

With `--topology v5p:2x2x2` (or `h200:8`) a step of a scanned GPT is compiled for that machine, which need not be there
(`pip install 'jzero[tpu]'` or `'jzero[gpu]'`): bytes per device and on the host, with the optimizer state on the
devices, on the host, on the host in larger chunks, and updated by the host's CPU, at once and one step later.

Without, a smaller one is trained on the devices that are there: time per step with and without offload in one run, the
bytes that travel, their rate, and that of a plain `jax.device_put` of as many bytes. On CPUs host memory and
device memory are the same, so the rates say nothing about a link.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from benchmarks.gpt import GPT, Size, init_of, loss_of
from benchmarks.turns import Training, in_turns
from jzero.machines.topologies import topology_devices

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
    offloads = {"none": jzero.Offload(), "optimizer": host, f"in {options.large_chunk / MIB:g} MiB": large}
    if options.stage == 3:
        offloads["parameters, too"] = dataclasses.replace(host, params="host")
    offloads["updated by the CPU"] = dataclasses.replace(host, compute="host")
    offloads["one step later"] = dataclasses.replace(host, compute="host", delay=1)
    return {name: offloads[name] for name in options.only or offloads}


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


def trained(options: argparse.Namespace, precision: str, mesh: jax.sharding.Mesh) -> dict[str, dict[str, Any]]:
    """Returns, of each variant, its step, its plan, and its seconds per step in turns with the others."""
    make_state, loss_fn = make_model(options)
    tokens = np.random.default_rng(0).integers(0, options.vocab, (mesh.size * options.rows, options.seq_len + 1))
    runs: dict[str, dict[str, Any]] = {}
    for name, offload in variants(options).items():
        config = jzero.ZeroConfig(stage=options.stage, precision=precision, persistence_threshold=0, offload=offload)
        step = jzero.make_train_step(loss_fn)
        state = jzero.init_train_state(make_state, jax.random.key(0), config=config, mesh=mesh)
        run = Training(step, state, tokens.astype(np.int32))
        run()
        peak = (mesh.devices.flat[0].memory_stats() or {}).get("peak_bytes_in_use")
        runs[name] = {"run": run, "plan": jzero.plan_of(state), "peak_so_far": peak}
    times = in_turns({name: x["run"] for name, x in runs.items()}, options.repeats)
    return {name: {**x, "times": times[name]} for name, x in runs.items()}


def least_traffic(plan: jzero.ZeroPlan) -> tuple[int, int]:
    """Returns the bytes that a step moves at least to one device from its host, and back.

    Optimizer state moves there and back, parameters there for each of the two passes, and back. Not counted is the way
    of gradients to the host, which not all steps send there. If the host's CPU updates, no state moves.
    """
    host = plan.host_bytes_per_device
    state = host.opt_state if plan.config.offload.compute == "device" else 0
    return state + 2 * host.params, state + host.params


def measure(options: argparse.Namespace) -> None:
    """Trains, and prints times and rates."""
    mesh = jzero.make_mesh()
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, jax {jax.__version__}, stage {options.stage}")
    for precision in options.precision:
        runs = trained(options, precision, mesh)
        for name, x in runs.items():
            plan, peak = x["plan"], x["peak_so_far"]
            print(f"{precision} {name}: plan {plan.bytes_per_device.total / MIB:.1f} MiB on a device, "
                  f"{plan.host_bytes_per_device.total / MIB:.1f} MiB on its host; "
                  f"peak so far {'unknown' if peak is None else f'{peak / MIB:.1f} MiB'}")  # fmt: skip
        for name, x in runs.items():
            median, moved = statistics.median(x["times"]), sum(least_traffic(x["plan"])) * mesh.size
            rate = f", at least {moved / median / 1e9:.2f} GB/s both ways together" if moved else ""
            of_none = median / statistics.median(runs["none"]["times"])
            print(f"{precision} {name}: {1e3 * median:.1f} ms per step, {of_none:.2f} of none{rate}")
        rates = copy_rates(runs["optimizer"]["plan"].host_bytes_per_device.total, mesh)
        shown = ", ".join(f"{direction} {rate / 1e9:.2f} GB/s" for direction, rate in rates.items())
        print(f"plain device_put of as many bytes: {shown}")


def copy_rates(num_bytes: int, mesh: jax.sharding.Mesh, repeats: int = 5) -> dict[str, float]:
    """Returns bytes per second of plain copies of so many bytes between each device and its host, all devices together.

    To the devices, from them, and both at once, with the bytes of both.
    """
    near = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    away = near.with_memory_kind("pinned_host")
    x = jax.block_until_ready(jax.device_put(np.zeros((mesh.size, max(1, num_bytes // 4)), np.float32), away))
    y = jax.block_until_ready(jax.device_put(x, near))
    move = lambda *pairs: jax.block_until_ready([jax.device_put(*pair) for pair in pairs])
    copies = {"to devices": [(x, near)], "from devices": [(y, away)], "both at once": [(x, near), (y, away)]}
    runs = {direction: functools.partial(move, *pairs) for direction, pairs in copies.items()}
    for run in runs.values():
        run()
    times = in_turns(runs, repeats)
    return {
        direction: len(copies[direction]) * x.nbytes / statistics.median(seconds)
        for direction, seconds in times.items()
    }


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
