"""Loading and writing a published model of `--gigabytes`: `python -m benchmarks.weights`.

A Llama of 2048 wide layers with random bf16 weights is loaded into the parameters of a scanned decoder at stage 3: on
8 devices of one process, and on 2 devices of each of 4 processes. Beside it, the same bytes by plain `load_params`,
from a file that holds the parameters as they are; `int8` stores what is not trained, all but norms, as integers.
`pages` is the share of the file's pages of 4 KiB that slices cover, each counted as often as a slice covers it. Memory
is anonymous resident memory, sampled every 5 ms, by an allocator that returns what is freed. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

os.environ.setdefault("PJRT_NPROC", "32")
NUM_PROCESSES, DEVICES = 4, 8
PAGE = 4096


def main() -> None:
    """Makes the model, then starts each run as a program of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--part", nargs="*")
    options = parser.parse_args()
    if options.part:
        print(json.dumps(run(*options.part)))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_model(pathlib.Path(directory) / "hf", options.gigabytes)
        for part in ("export", "load hf", "load int8", "load plain", "write hf"):
            start(directory, *part.split())
        for part in ("load hf", "load plain"):
            port = free_port()
            running = [start(directory, *part.split(), str(i), str(port), wait=False) for i in range(NUM_PROCESSES)]
            assert not any(process.wait() for process in running)


def start(directory: str, *part: str, wait: bool = True) -> subprocess.Popen[bytes]:
    """Starts a run."""
    command = [sys.executable, "-m", "benchmarks.weights", "--part", directory, *part]
    process = subprocess.Popen(command, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)})
    assert not wait or process.wait() == 0
    return process


def free_port() -> int:
    """Returns a port that no program listens to."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def write_model(folder: pathlib.Path, gigabytes: float) -> None:
    """Writes `config.json` and random weights."""
    import ml_dtypes
    from safetensors.numpy import save_file

    from jzero.hf import read_config
    from jzero.weights.families import tensor_shapes

    folder.mkdir()
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 32000}
    layers = max(round((gigabytes * 2**30 - 2.6e8) / 1.03e8), 1)
    config = {"model_type": "llama", "num_hidden_layers": layers, "torch_dtype": "bfloat16", **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(read_config(folder))
    tensors = {name: rng.random(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def make_state(folder: pathlib.Path, **options: Any) -> Any:
    """Returns a state of the decoder's parameters, all equal."""
    import jax
    import jax.numpy as jnp
    import optax

    import jzero
    from jzero.hf import read_config

    c = read_config(folder)
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    kernels = {"q": (c.d_model, q), "k": (c.d_model, kv), "v": (c.d_model, kv), "o": (q, c.d_model)}
    kernels |= {"gate": (c.d_model, c.d_hidden), "up": (c.d_model, c.d_hidden), "down": (c.d_hidden, c.d_model)}
    layers: dict[str, Any] = {name: {"kernel": (c.num_layers, *shape)} for name, shape in kernels.items()}
    layers |= {name: {"scale": (c.num_layers, c.d_model)} for name in ("attention_norm", "mlp_norm")}
    shapes = {
        "embed": {"embedding": (c.vocab_size, c.d_model)},
        "head": {"kernel": (c.d_model, c.vocab_size)},
        "norm": {"scale": (c.d_model,)},
        "layers": layers,
    }

    def make(key: Any) -> jzero.TrainState:
        fill = lambda shape: jnp.full(shape, jax.random.normal(key), jnp.bfloat16)  # XLA would fold constants
        params = jax.tree.map(fill, shapes, is_leaf=lambda x: isinstance(x, tuple))
        return jzero.TrainState.create(params=params, tx=optax.identity())

    config = jzero.ZeroConfig(stage=3, **options)
    return jzero.init_train_state(make, jax.random.key(0), config=config, trainable=".*scale")


def run(directory: str, part: str, kind: str = "plain", process: str = "0", port: str = "") -> dict[str, Any]:
    """Does one part."""
    import jax

    import jzero

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // (NUM_PROCESSES if port else 1))
    if port:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", num_processes=NUM_PROCESSES, process_id=int(process))
    folder = pathlib.Path(directory)
    frozen = jzero.Quantization(frozen="int8" if kind == "int8" else "none")
    state = make_state(folder / "hf", quantization=frozen)
    mapping = None if kind == "plain" else "auto"
    source = folder / ("plain" if kind == "plain" else "hf")
    if part == "export":
        state = jzero.load_params(state, folder / "hf", mapping="auto", donate=True)
        return {"run": part, "bytes": jzero.export_params(state, folder / "plain").num_bytes}
    read = count_pages()
    shards = sum(s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards)
    with Peak() as peak:
        begin, used = time.perf_counter(), time.process_time()
        if part == "load":
            state = jzero.load_params(state, source, mapping=mapping, donate=True)
            jax.block_until_ready(state)
        else:
            jzero.export_params(state, folder / "again", mapping=mapping, like=source)
        seconds, used = time.perf_counter() - begin, time.process_time() - used
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    return {
        "run": f"{part} {kind}",
        "process": int(process),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used, 2),
        "file_gib": round(total / 2**30, 3),
        "pages": round(sum(read) / total, 3),
        "peak_mib": round(peak.bytes / 2**20),
        "of_which_shards": round(shards / 2**20),
    }


def count_pages() -> list[int]:
    """Counts the bytes of pages that slices of files cover, from now on."""
    from jzero.weights.safetensors_files import TensorFile

    counts: list[int] = []
    view = TensorFile.view

    def counted(self: TensorFile, index: Any) -> np.ndarray:
        x = view(self, index)
        run = x.dtype.itemsize
        for size, stride in zip(x.shape[::-1], x.strides[::-1], strict=True):
            run = run * size if stride == run else run
        counts.append(x.nbytes if run >= 16 * PAGE else -(-x.nbytes // run) * max(run, PAGE))
        return x

    TensorFile.view = counted  # type: ignore[method-assign]
    return counts


class Peak:
    """The peak of this process's anonymous memory while it is entered."""

    def __enter__(self) -> Peak:
        self.bytes, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            (line,) = [x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x]
            self.bytes = max(self.bytes, int(line.split()[1]) * 1024)


if __name__ == "__main__":
    main()
