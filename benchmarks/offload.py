"""What offload saves, and what it costs: `python -m benchmarks.offload`.

With `--topology v5p:2x2x2` (or `h200:8`) a step of a scanned GPT is compiled for that machine, which need not be there
(`pip install 'jzero[tpu]'` or `'jzero[gpu]'`): bytes per device and on the host, with the optimizer state on the
devices, on the host, on the host in larger chunks, and updated by the host's CPU, at once and one step later.

Without, a smaller one is trained on the devices that are there: time per step with and without offload in one run, the
bytes that travel, their rate, and that of a plain `jax.device_put` of as many bytes. On CPUs host memory and
device memory are the same, so the rates say nothing about a link.

With `--disk FOLDER`, records of optimizer state (`--gigabytes`, four times of which are taken there meanwhile) go
through the pipeline of a disk, by itself and with AdamW, beside plain reads and writes of the same bytes, in turns.

What late updates cost in loss: `python -m benchmarks.losses late`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common import GIB, MIB, parser_of

HEADER = f"{'offload':24}{'arguments':>12}{'temporaries':>13}{'peak':>10}{'host':>10}   MiB per device"


def make_model(options: argparse.Namespace) -> tuple[Any, Callable[..., Any]]:
    """Returns what makes the state from a key, and the loss."""
    import optax

    import jzero
    from benchmarks.engines import loss_of
    from benchmarks.family_models import gpt

    sizes = {name: getattr(options, name) for name in ("width", "layers", "vocab", "seq_len")}
    model = gpt(**sizes, scanned=True, tied=False, remat=True)
    return lambda key: jzero.TrainState.create(params=model.init(key), tx=optax.adamw(1e-4)), loss_of(model)


def variants(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what is compared."""
    import jzero

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
    import jax
    import jax.numpy as jnp

    import jzero
    from jzero.machines.topologies import topology_devices

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
            freed, peak = before.arguments - memory.arguments, before.peak - memory.peak
            saved = f"   at rest -{freed / MIB:.1f}, peak -{peak / MIB:.1f}" if memory.host else ""
            print(f"{name:24}{row}{saved}", flush=True)


def trained(options: argparse.Namespace, precision: str, mesh: Any) -> dict[str, dict[str, Any]]:
    """Returns, of each variant, its step, its plan, and its seconds per step in turns with the others."""
    import jax
    import numpy as np

    import jzero
    from benchmarks.turns import Training, in_turns

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


def least_traffic(plan: Any) -> tuple[int, int]:
    """Returns the bytes that a step moves at least to one device from its host, and back.

    Optimizer state moves there and back, parameters there for each of the two passes, and back. Not counted is the way
    of gradients to the host, which not all steps send there. If the host's CPU updates, no state moves.
    """
    host = plan.host_bytes_per_device
    state = host.opt_state if plan.config.offload.compute == "device" else 0
    return state + 2 * host.params, state + host.params


def measure(options: argparse.Namespace) -> None:
    """Trains, and prints times and rates."""
    import jax

    import jzero

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


def copy_rates(num_bytes: int, mesh: Any, repeats: int = 5) -> dict[str, float]:
    """Returns bytes per second of plain copies of so many bytes between each device and its host, all devices together.

    To the devices, from them, and both at once, with the bytes of both.
    """
    import jax
    import numpy as np

    from benchmarks.turns import in_turns

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


def make_adamw() -> Callable[[int, Any], Callable[[Any], None]]:
    """Returns a visitor that updates a record, of master, mean and variance in fp32, by AdamW."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    tx = optax.adamw(1e-3)

    @jax.jit
    def update(fields: Any) -> Any:  # [3, E]
        master, mean, variance = fields
        (adam, *others) = tx.init(master)
        state = (adam._replace(count=jnp.int32(7), mu=mean, nu=variance), *others)
        updates, (adam, *_) = tx.update(0.01 * master, state, master)
        return jnp.stack([optax.apply_updates(master, updates), adam.mu, adam.nu])

    def visit(record: int, buffer: Any) -> Callable[[Any], None]:
        new = update(buffer.view(np.float32).reshape(3, -1))
        return lambda buffer: np.copyto(buffer.view(np.float32).reshape(3, -1), np.asarray(new))

    return visit


def measure_disk(options: argparse.Namespace) -> None:
    """Prints what a disk and the pipeline over it reach."""
    import numpy as np

    from benchmarks.turns import in_turns
    from jzero.core.disk.files import PAGE, check_folder
    from jzero.core.disk.pipeline import Pipeline
    from jzero.core.disk.rates import PlainFiles
    from jzero.core.disk.stores import DiskStore

    record = int(options.record_mebibytes * MIB) // (3 * PAGE) * 3 * PAGE
    records = max(1, round(options.gigabytes * 1e9 / record))
    store = DiskStore(check_folder(options.disk, "--disk"), [record] * records)
    plain = PlainFiles(store.folder, store.num_bytes, threads=2, block=record)
    pipeline, waited = Pipeline(store, 2), []

    def fill(record: int, buffer: Any) -> None:  # such that file systems cannot compress it
        buffer.view(np.float32)[:] = np.abs(np.random.default_rng(record).standard_normal(buffer.nbytes // 4))

    def run(visit: Any) -> None:
        stats = pipeline.run(visit)
        store.commit()
        waited.append(stats.waited_seconds / stats.seconds)

    def update_alone() -> None:
        for number in range(records):
            adamw(number, pipeline.buffers[0])(pipeline.buffers[0])

    for _ in range(2):  # both slots, since a first write takes longer
        pipeline.run(fill, reads=False)
        store.commit()
    adamw = make_adamw()
    adamw(0, pipeline.buffers[0])
    runs: dict[str, Callable[[], Any]] = {
        "plain reads": lambda: plain.seconds(read=True, write=False),
        "plain writes": lambda: plain.seconds(read=False, write=True),
        "plain, both at once": lambda: plain.seconds(read=True, write=True),
        "pipeline": lambda: run(lambda record, buffer: None),
        "pipeline with AdamW": lambda: run(adamw),
        "AdamW alone": update_alone,
    }
    times = in_turns(runs, options.repeats)
    print(
        f"{records} records of {record / MIB:.2f} MiB; the file system lacks {', '.join(store.fallbacks) or 'nothing'}"
    )
    print(f"the caller waits for {statistics.median(waited[1::2]):.2f} of the pipeline with AdamW\n")
    print("| | seconds | GiB/s each way | of plain, both at once |\n|---|---|---|---|")
    for name, seconds in times.items():
        of_plain = statistics.median(b / a for a, b in zip(seconds, times["plain, both at once"], strict=True))
        median = statistics.median(seconds)
        print(f"| {name} | {median:.2f} | {store.num_bytes / GIB / median:.2f} | {of_plain:.2f} |")
    plain.close()
    store.close()


def main() -> None:
    """Compiles, trains, or measures a disk."""
    parser = parser_of(__doc__)
    parser.add_argument("--topology", help="compile for a machine such as v5p:2x2x2 in place of training here")
    parser.add_argument("--disk", metavar="FOLDER", help="measure the disk with this folder")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"])
    for name in ("--vocab", "--width", "--layers", "--seq-len"):
        parser.add_argument(name, type=int)
    parser.add_argument("--rows", type=int, default=2, help="sequences per device")
    parser.add_argument("--large-chunk", type=int, default=64 * MIB, help="bytes of the larger chunks")
    parser.add_argument("--only", nargs="+", help="which of the rows")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=1, help="on the disk, in one of its two slots")
    parser.add_argument("--record-mebibytes", type=float, default=16)
    options = parser.parse_args()
    sizes = {"vocab": 50304, "width": 2048, "layers": 24, "seq_len": 1024}
    small = {"vocab": 8192, "width": 512, "layers": 8, "seq_len": 128}
    for name, value in (sizes if options.topology else small).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    import jax

    if options.topology or options.disk:
        jax.config.update("jax_platforms", "cpu")
    else:
        jax.config.update("jax_num_cpu_devices", 8)
    (compile_for if options.topology else measure_disk if options.disk else measure)(options)


if __name__ == "__main__":
    main()
