"""What mixtures of experts send beside ZeRO: `python -m benchmarks.expert_parallel --topology h200:16 --out FILE`.

The sizes of Mixtral 8x7B, trained by `examples/llm/` with AdamW at stage 3 under bf16, one row for each device; the
experts of a layer on all devices, or divided among some. No accelerator is needed: the compiler of `jzero[gpu]` tells
peak and collectives, and exposed communication is the model of `jzero/analysis/schedule.py`. It counts all parts of the
products of experts, also those that a step leaves out since they have no tokens. Cases that are in the result file are
not computed again.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import jzero.hf
from benchmarks.lines import add_line, lines_of
from jzero.machines.topologies import topology_devices

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "llm"))
import balance
import expert_parallel
import pretrain
import training
from decoder import Decoder

GIB = 2**30
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}
SEQ = 4096


def figures(experts: int, topology: str) -> dict[str, Any]:
    """Returns what one way takes."""
    devices, started = topology_devices(topology), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MIXTRAL))
        args = pretrain.parse_args([f"--config={folder}", "--data=none", f"--experts={experts}"])
        model = Decoder(jzero.hf.read_config(folder))
    apart = {} if experts == 1 else {expert_parallel.EXPERTS: experts}
    mesh = jzero.make_mesh(devices=devices, **apart, data=-1)

    def cut(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        spec = P(None, *apart) if expert_parallel.of_experts(path) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params = jax.tree_util.tree_map_with_path(cut, params)
    tx = training.make_optimizer(3e-4, 1000)
    plain = jax.eval_shape(lambda params: jzero.TrainState.create(params=params, tx=tx), params).replace(params=params)
    state = jzero.abstract_train_state(plain, config=training.zero_config(args), mesh=mesh)
    rows = NamedSharding(mesh, P("data"))
    shapes = {"tokens": ((len(devices), SEQ + 1), jnp.int32), "weights": ((len(devices),), jnp.float32)}
    batch = {name: jax.ShapeDtypeStruct(*x, sharding=rows) for name, x in shapes.items()}
    step = balance.make_step(training.of_parts(model, args).clone(mesh=mesh if apart else None), args)
    report = jzero.analyze(step, state, batch, topology=topology)
    sent = collections.Counter[str]()
    for row in report.collectives:
        sent[row.axis] += round(row.sent_bytes)
    return {
        "key": f"{topology}/mixtral/{experts}",
        "states": report.memory.arguments,
        "peak": report.memory.peak,
        "sent_bytes": dict(sent),
        "port_bytes": report.nic_bytes,
        **(report.timeline.totals() if report.timeline is not None else {}),
        "violations": list(report.violations),
        "took_seconds": round(time.perf_counter() - started, 1),
        "jax": jax.__version__,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Returns the results as Markdown."""
    names = ["experts among", "states, GiB", "peak, GiB", "sent over ZeRO's axis, GiB", "over the experts', GiB"]
    names += ["through a port, GiB", "collectives, ms", "exposed, ms"]
    text = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for x in lines:
        sent = [x["sent_bytes"].get(name, 0) / GIB for name in ("data", expert_parallel.EXPERTS)]
        sizes = [x["states"] / GIB, x["peak"] / GIB, *sent, x["port_bytes"] / GIB]
        cells = [*(f"{size:.1f}" for size in sizes), *(f"{1e3 * x[name]:.0f}" for name in ("communication", "exposed"))]
        text.append(f"| {x['key'].rpartition('/')[2]} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Computes what is missing, or prints what is there."""
    parser = argparse.ArgumentParser(description="Expert parallelism beside ZeRO.")
    parser.add_argument("--topology", default="h200:16")
    parser.add_argument("--experts", type=int, nargs="*", default=[1, 2, 4, 8], help="devices that share the experts")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the file")
    options = parser.parse_args()
    done = {x["key"] for x in lines_of(options.out)}
    for experts in () if options.table else options.experts:
        if f"{options.topology}/mixtral/{experts}" not in done:
            add_line(options.out, figures(experts, options.topology))
    if options.table:
        print(table(lines_of(options.out)))


if __name__ == "__main__":
    main()
