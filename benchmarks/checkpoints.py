"""Checkpoints, exports and published weights: `python -m benchmarks.checkpoints [orbax] [memory] [weights]`.

* orbax: saving and restoring beside plain Orbax on the same tree, and exports of the checkpoint and of the state beside
  safetensors' own `save_file` of the same arrays in memory, in turns: median seconds, and CPU time over all threads.
  `--gigabytes` of random fp32 numbers, in 16 leaves whose dimensions the devices divide (`even`) or do not (`odd`). Of
  odd leaves plain Orbax is given natural arrays on one device, since no sharded array has such shapes.
* memory: peak host memory of exporting such a checkpoint, and a restored state, in 16 leaves, as it is and as bf16,
  above what was resident before. The first export of a process includes what jax, Orbax and the allocator set up once.
* weights: loading and writing a published model of about so many bytes, a Llama with layers 2048 wide, into a scanned
  decoder at stage 3, on 8 devices of one process and on 2 of each of 4. Beside it, the same bytes by plain
  `load_params`, from a file that holds the parameters as they are; `int8` stores what is not trained, all but norms,
  as integers. The allocator returns what is freed.

Memory is anonymous resident memory. Each part of `memory` and `weights` is a process, and prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import GIB, MIB, Peak, free_port, parser_of, wait_for

NUM_PROCESSES, DEVICES, LEAVES = 4, 8, 16


def set_up(devices: int = DEVICES) -> None:
    """Makes virtual devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def state_of(gigabytes: float, *, odd: bool) -> Any:
    """Returns a state of random leaves, not sharded."""
    import jax
    import numpy as np
    import optax

    import jzero

    size = max(int((gigabytes * 1e9 / 4 / LEAVES) ** 0.5) // 64, 1) * 64 + 3 * odd
    rng = np.random.default_rng(0)
    params = {f"leaf_{i}": rng.standard_normal((size, size), np.float32) for i in range(LEAVES)}
    return jax.tree.map(jax.numpy.asarray, jzero.TrainState.create(params=params, tx=optax.sgd(0.1)))


def orbax(options: argparse.Namespace) -> None:
    """Prints one row per kind of leaves and direction."""
    set_up()
    import jax
    import orbax.checkpoint as ocp

    print(
        f"jax {jax.__version__}, orbax-checkpoint {ocp.__version__}, {options.gigabytes} GB, {options.rounds} rounds\n"
    )
    print("| leaves | what | s (CPU s) | of | s (CPU s) | ratio, of CPU | MB/s |\n|---|---|---|---|---|---|---|")
    for kind in ("even", "odd"):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            for (action, other), both in measure(kind, options, pathlib.Path(directory)).items():
                (ours, our_cpu), (theirs, their_cpu) = (
                    [statistics.median(y) for y in zip(*x, strict=True)] for x in both
                )
                cells = [f"{ours:.2f} ({our_cpu:.2f})", other, f"{theirs:.2f} ({their_cpu:.2f})"]
                cells += [f"{ours / theirs:.2f}, {our_cpu / their_cpu:.2f}", f"{1e3 * options.gigabytes / ours:.0f}"]
                print(f"| {kind} | {action} | {' | '.join(cells)} |", flush=True)


def measure(kind: str, options: argparse.Namespace, directory: pathlib.Path) -> dict[tuple[str, str], Any]:
    """Returns, by what is done and what it is compared with, the seconds and seconds of CPU time of both."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file

    import jzero

    plain = state_of(options.gigabytes, odd=kind == "odd")
    state = jzero.shard_train_state(plain, stage=3)
    like = jzero.abstract_train_state(state, stage=3)
    tree = state if kind == "even" else plain
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    ours, other, exported = (directory / name for name in ("jzero", "orbax", "exported"))

    def by_orbax(method: str, *args: Any) -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return getattr(checkpointer, method)(other, *args)

    def by_safetensors() -> None:
        exported.mkdir()
        save_file({name: np.asarray(x) for name, x in plain.params.items()}, exported / "model.safetensors")

    doing: dict[tuple[str, str], tuple[Callable[[], Any], Callable[[], Any]]] = {
        ("save", "Orbax"): (lambda: jzero.save_checkpoint(ours, state), lambda: by_orbax("save", tree)),
        ("restore", "Orbax"): (lambda: jzero.restore_checkpoint(ours, like), lambda: by_orbax("restore", shapes)),
        ("export of the checkpoint", "`save_file`"): (
            lambda: jzero.export_checkpoint(ours, exported) and None,
            by_safetensors,
        ),
        ("export of the state", "`save_file`"): (lambda: jzero.export_params(state, exported) and None, by_safetensors),
    }
    times: dict[tuple[str, str], Any] = {key: ([], []) for key in doing}
    for number in range(options.rounds + 1):
        for key, pair in doing.items():
            if "export" in key[0]:  # else the first of both pays for memory that a virtual machine has not used before
                by_safetensors()
                shutil.rmtree(exported)
            for run, spent in zip(pair, times[key], strict=True):
                started = time.perf_counter(), time.process_time()
                jax.block_until_ready(run())
                if number:  # the first round compiles
                    spent.append((time.perf_counter() - started[0], time.process_time() - started[1]))
                shutil.rmtree(exported, ignore_errors=True)
        for path in (ours, other):
            shutil.rmtree(path)
    return times


def memory(options: argparse.Namespace) -> None:
    """Runs the processes that write a checkpoint and export it."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for part in ("checkpoint", "export checkpoint", "export state"):
            start(options, directory, *part.split())


def weights(options: argparse.Namespace) -> None:
    """Makes the model, and runs the processes that load and write it."""
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        write_model(pathlib.Path(directory) / "hf", options.gigabytes)
        for part in ("plain", "load hf", "load int8", "load plain", "write hf"):
            start(options, directory, *part.split())
        for kind in ("hf", "plain"):
            port = str(free_port())
            running = [start(options, directory, "load", kind, str(i), port, wait=False) for i in range(NUM_PROCESSES)]
            wait_for(running)


def start(options: argparse.Namespace, *part: str, wait: bool = True) -> subprocess.Popen[bytes]:
    """Starts a part as a process of its own."""
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--gigabytes", str(options.gigabytes), "--part", *part]
    environment = {"PJRT_NPROC": "32"} | os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    process = subprocess.Popen(command, env=environment)
    if wait:
        wait_for([process])
    return process


def write_model(folder: pathlib.Path, gigabytes: float) -> None:
    """Writes `config.json` and random weights."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from jzero.hf import read_config
    from jzero.weights.families import tensor_shapes

    folder.mkdir()
    vocab = min(32000, round(32000 * gigabytes))
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": vocab}
    layers = max(round((gigabytes * GIB - 8192 * vocab) / 1.03e8), 1)
    config = {"model_type": "llama", "num_hidden_layers": layers, "torch_dtype": "bfloat16", **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(read_config(folder))
    tensors = {name: rng.random(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def decoder_state(folder: pathlib.Path, **options: Any) -> Any:
    """Returns a state of the parameters of the decoder of `examples/llm/`, all equal."""
    import jax
    import jax.numpy as jnp
    import optax

    import jzero
    from benchmarks.llm import decoder_of, shapes_of

    shapes = shapes_of(decoder_of(json.loads((folder / "config.json").read_text()))[0])

    def make(key: Any) -> jzero.TrainState:
        fill = lambda x: jnp.full(x.shape, jax.random.normal(key), jnp.bfloat16)  # XLA would fold constants
        return jzero.TrainState.create(params=jax.tree.map(fill, shapes), tx=optax.identity())

    config = jzero.ZeroConfig(stage=3, **options)
    return jzero.init_train_state(make, jax.random.key(0), config=config, trainable=".*scale")


def run(options: argparse.Namespace) -> None:
    """Does one part of `memory` or `weights`."""
    directory, part, kind, process, port = (*options.part, *("", "plain", "0", "")[len(options.part) - 1 :])
    folder, found = pathlib.Path(directory), {"run": f"{part} {kind}", "process": int(process)}
    set_up(DEVICES // (NUM_PROCESSES if port else 1))
    import jax

    import jzero

    if port:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", num_processes=NUM_PROCESSES, process_id=int(process))
    if part == "checkpoint":
        state = jzero.shard_train_state(state_of(options.gigabytes, odd=True), stage=3)
        jzero.save_checkpoint(folder / part, state)
    elif part == "export":
        like = jax.eval_shape(lambda: state_of(options.gigabytes, odd=True)) if kind == "state" else None
        state = like and jzero.restore_checkpoint(folder / "checkpoint", jzero.abstract_train_state(like, stage=3))
        for dtype in (None, "bfloat16"):
            with Peak() as peak:
                if state is None:
                    jzero.export_checkpoint(folder / "checkpoint", folder / "exported", dtype=dtype)
                else:
                    jzero.export_params(state, folder / "exported", dtype=dtype)
            shutil.rmtree(folder / "exported")
            found[f"{dtype or 'as it is'}: MiB above before"] = round((peak.bytes - peak.before) / MIB)
        print(json.dumps(found))
    else:
        found |= of_weights(folder, part, kind)
        print(json.dumps(found))


def of_weights(folder: pathlib.Path, part: str, kind: str) -> dict[str, Any]:
    """Does one part of `weights`."""
    import jax

    import jzero

    frozen = jzero.Quantization(frozen="int8" if kind == "int8" else "none")
    state = decoder_state(folder / "hf", quantization=frozen)
    if part == "plain":
        state = jzero.load_params(state, folder / "hf", mapping="auto", donate=True)
        return {"bytes": jzero.export_params(state, folder / part).num_bytes}
    mapping = None if kind == "plain" else "auto"
    source = folder / ("plain" if kind == "plain" else "hf")
    shards = sum(s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards)
    with Peak() as peak:
        begin, used = time.perf_counter(), time.process_time()
        if part == "load":
            jax.block_until_ready(jzero.load_params(state, source, mapping=mapping, donate=True))
        else:
            jzero.export_params(state, folder / "again", mapping=mapping, like=source)
        seconds, used = time.perf_counter() - begin, time.process_time() - used
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used, 2),
        "file_gib": round(sum(file.stat().st_size for file in source.glob("*.safetensors")) / GIB, 3),
        "peak_mib": round(peak.bytes / MIB),
        "of_which_shards": round(shards / MIB),
    }


CASES = {"orbax": orbax, "memory": memory, "weights": weights}


def main() -> None:
    """Measures the cases."""
    os.environ.setdefault("PJRT_NPROC", "32")  # XLA's CPU client needs more threads than devices
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", help="where to write; a temporary one by default")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no cases {sorted(unknown)}: choose of {', '.join(CASES)}")
    if options.part:
        run(options)
        return
    for name in options.cases or CASES:
        CASES[name](options)


if __name__ == "__main__":
    main()
