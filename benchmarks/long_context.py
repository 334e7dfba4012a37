"""Memory and time of a model of 8B parameters at long contexts: `python -m benchmarks.long_context --topology h200:64`.

The model is that of `examples/llm/`, with the sizes of Llama 3.1 8B, trained by AdamW at stage 3 under bf16; each case
takes one of the ways to need less memory away, or adds one. No accelerator is needed: `estimated` is from the trace,
`peak` of the compiler of `jzero[gpu]`. Cases whose names are in the result file are not computed again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import jzero.hf
from benchmarks.lines import add_line, lines_of
from jzero.machines.topologies import topology_devices

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "llm"))
import training
from decoder import Decoder

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train: options of `pretrain.py`, and of the step and its state."""

    name: str
    seq: int = 131_072
    context: int = 8
    loss_chunks: int = 16
    remat: Any = None
    offload: str = "none"
    compiles: bool = True

    def key(self, topology: str) -> str:
        """How a result file names it."""
        return f"{topology}/{self.seq}/{self.name}"


CASES = [
    Case("context 8, 16 parts of the loss"),
    Case("loss of all tokens at once", loss_chunks=1),
    Case("no recomputation", remat=False, compiles=False),
    Case("activations offloaded", remat="offload", compiles=False),
    Case("optimizer state offloaded", offload="host", compiles=False),
    Case("context 16", context=16),
    Case("context 2", context=2, loss_chunks=64, compiles=False),
    Case("no context", context=1, loss_chunks=128),
    Case("context 4", context=4, loss_chunks=32),
]


def llama_8b() -> jzero.hf.ModelConfig:
    """Returns the sizes of Llama 3.1 8B; the angles of its rotary embedding do not matter here."""
    layers, rotary = 32, tuple((500_000.0 ** -(np.arange(0, 128, 2) / 128)).tolist())
    return jzero.hf.ModelConfig(
        model_type="llama", vocab_size=128_256, d_model=4096, d_hidden=14_336, num_layers=layers, num_heads=32,
        num_kv_heads=8, head_dim=128, eps=1e-5, tied=False, gelu=False, qkv_bias=False, qk_norm=False, unit_norm=False,
        post_norms=False, embed_scale=1.0, attn_scale=128**-0.5, attn_softcap=None, final_softcap=None,
        inverse_frequencies=(rotary,) * layers, windows=(None,) * layers, dtype="bfloat16",
    )  # fmt: skip


def figures(case: Case, topology: str) -> dict[str, Any]:
    """Returns what one case takes."""
    devices, started = topology_devices(topology), time.perf_counter()
    args = argparse.Namespace(
        context=case.context, loss_chunks=case.loss_chunks, precision="bf16", persistence_threshold=100_000
    )
    mesh = jzero.make_mesh(devices=devices, **training.mesh_axes(args))
    model = Decoder(llama_8b())
    config = dataclasses.replace(training.zero_config(args), offload=jzero.Offload(optimizer=case.offload))

    def make_state(key: jax.Array) -> jzero.TrainState:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        return jzero.TrainState.create(params=params, tx=training.make_optimizer(3e-4, 1000))

    state = jzero.abstract_train_state(jax.eval_shape(make_state, jax.random.key(0)), config=config, mesh=mesh)
    rows = mesh.shape["data"]
    split = NamedSharding(mesh, P("data"))
    shapes = {"tokens": ((rows, case.seq + 1), jnp.int32), "weights": ((rows,), jnp.float32)}
    batch = {name: jax.ShapeDtypeStruct(*x, sharding=split) for name, x in shapes.items()}
    loss_fn = training.next_token_loss(training.of_parts(model, args))
    step = jzero.make_train_step(loss_fn, clip_norm=1.0, remat=case.remat)
    memory = jzero.estimate_step_memory(step, state, batch, topology=topology)
    found = {"key": case.key(topology), "tokens": rows * case.seq, "states": memory.arguments, "estimated": memory.peak}
    if case.compiles:
        try:
            report = jzero.analyze(step, state, batch, topology=topology)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return found | {"refused": str(error).splitlines()[0]}
        sent = collections.Counter[str]()
        for row in report.collectives:
            sent[row.axis] += round(row.sent_bytes)
        found |= {
            "peak": report.memory.peak,
            "seconds": None if report.timeline is None else report.timeline.seconds,
            "exposed": report.exposed_communication,
            "sent_bytes": dict(sent),
            "violations": list(report.violations),
        }
    return found | {"took_seconds": round(time.perf_counter() - started, 1), "jax": jax.__version__}


def table(lines: list[dict[str, Any]]) -> str:
    """Returns the results as Markdown."""
    text = ["| | states, GiB | peak, GiB | estimated, GiB | step, s | exposed |", "|---|---|---|---|---|---|"]
    for x in lines:
        peak = "refused: too large" if "refused" in x else f"{x['peak'] / GIB:.1f}" if "peak" in x else ""
        seconds = f"{x['seconds']:.1f} | {x['exposed']:.1%}" if x.get("seconds") is not None else " | "
        name = x["key"].split("/", 1)[1].replace("/", " tokens, ")
        text.append(f"| {name} | {x['states'] / GIB:.1f} | {peak} | {x['estimated'] / GIB:.1f} | {seconds} |")
    return "\n".join(text)


def main() -> None:
    """Computes what is missing, or prints what is there."""
    parser = argparse.ArgumentParser(description="Memory at long contexts.")
    parser.add_argument("--topology", default="h200:64")
    parser.add_argument("--seq", type=int, default=131_072)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the file")
    options = parser.parse_args()
    done = {x["key"] for x in lines_of(options.out)}
    for case in () if options.table else (dataclasses.replace(x, seq=options.seq) for x in CASES):
        if case.key(options.topology) not in done and (not options.only or case.name in options.only):
            add_line(options.out, figures(case, options.topology))
    if options.table:
        print(table(lines_of(options.out)))


if __name__ == "__main__":
    main()
