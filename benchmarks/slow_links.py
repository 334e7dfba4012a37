"""What two-level meshes and integers bring on slow links, by compilation.

    python -m benchmarks.slow_links --topology h200:16 [--kinds flat two_hops ...] [--micro-batches 1 2] --out FILE
    python -m benchmarks.slow_links --topology l40s:8 --out FILE
    python -m benchmarks.slow_links --table FILE [--plot FILE.svg]

A scanned GPT of 419M parameters, recomputed, in bf16 with fp32 masters and AdamW, two sequences of 1024 tokens per
device. Each line of the result file is one program: bytes on one network port as compiled and by the formula, peak
memory, and the modelled step at several rates of the slowest link. No accelerator is needed: the compiler of
`jzero[gpu]` tells.

The formula, for M nodes of D devices, Ψ parameters and L layers, in bytes on one network port:

    (M-1)/M · Ψ/D · (gathers · g + reductions · r · (1 + 1/L))     g = 2, or 1 + 4/b;  r = 2, 1 + 4/b or 1/2 + 4/b

with 2 gathers per micro-batch, or 1 in all with secondary parameters, blocks of b = 256 elements, and 1/L for the hop
of zeros in the first turn of a loop. One ring over all devices sends 6Ψ(N-1)/(N·D) per micro-batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from jax import lax

import jzero
from jzero.analysis.collectives import program_collectives
from jzero.analysis.hlo import parse_hlo
from jzero.analysis.memory import compiled_memory
from jzero.analysis.schedule import simulate
from jzero.analysis.violations import Compiled, find_violations
from jzero.estimate.traced import trace_program
from jzero.estimate.traced_collectives import traced_collectives
from jzero.machines.machine import machine
from jzero.machines.topologies import topology_devices, topology_options

WIDTH, LAYERS, VOCAB, LENGTH, HEADS, ROWS = 2048, 8, 8192, 1024, 16, 2
SIZES = {"embed": (VOCAB, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH),
         "down": (4 * WIDTH, WIDTH)}  # fmt: skip
TWO = {"node_axis": "node"}
SECONDARY = {**TWO, "secondary_params": True}
BOTH = {**SECONDARY, "secondary_grads": True}


def rounded(
    gather: Literal["none", "int8"] = "none", reduce: Literal["none", "int8", "int4"] = "none"
) -> dict[str, Any]:
    """Returns the field of integers on the links."""
    return {"quantization": jzero.Quantization(gather=gather, reduce=reduce)}


KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "two_hops": TWO,
    "secondary": SECONDARY,
    "secondary, int8 gather": {**SECONDARY, **rounded("int8")},
    "secondary, int8 gather, int4 reduce": {**SECONDARY, **rounded("int8", "int4")},
    "both secondary": BOTH,
    "both secondary, int8 gather, int4 reduce": {**BOTH, **rounded("int8", "int4")},
    "hsdp": {"replica_axis": "node"},
    "int8 gather": rounded("int8"),
    "int8 gather, int8 reduce": rounded("int8", "int8"),
    "int8 gather, int4 reduce": rounded("int8", "int4"),
    "stage 2": {"stage": 2},
    "stage 2, int8 reduce": {"stage": 2, **rounded("none", "int8")},
}
ONE_NODE = ("flat", "int8 gather", "int8 gather, int8 reduce", "int8 gather, int4 reduce", "stage 2",
            "stage 2, int8 reduce")  # fmt: skip
SEVERAL = [kind for kind in KINDS if kind == "flat" or kind not in ONE_NODE]
RATES = (50, 25, 12.5, 6.25)
"""Network, in GB/s per port."""
PCIE = (("l40s:8", 32), ("l40s:8", 16), ("rtx4090:8", 16), ("rtx4090:8", 8), ("a100-pcie:8", 16))
"""One node: machine and GB/s of its PCIe link. PCIe 4.0 has 32; shared lanes, and ways through the host, leave less."""


def shapes() -> dict[str, Any]:
    """Returns the parameters; those of layers are stacked."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layers = {name: leaf(LAYERS, *shape) for name, shape in SIZES.items() if name != "embed"}
    return {"embed": leaf(*SIZES["embed"]), "layers": layers}


def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, with a tied head."""

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(h @ w["qkv"], 3, -1))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (WIDTH // HEADS) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9).astype(jnp.float32)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(x.shape)
        x = x + mixed @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x = params["embed"][tokens[:, :-1]]
    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def by_formula(fields: dict[str, Any], steps: int, num_nodes: int, per_node: int, size: int) -> float:
    """Returns the bytes on one network port."""
    if "replica_axis" in fields:  # a ring of all-reduce over nodes, of each device's part
        return 2 * (num_nodes - 1) / num_nodes * size / per_node * 2 * steps
    if "node_axis" not in fields:
        number = num_nodes * per_node
        return 6 * size * (number - 1) / number / per_node * steps
    kinds = fields.get("quantization", jzero.Quantization())
    of = {"none": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}
    gathers = 1 if "secondary_params" in fields else 2 * steps
    is_once = "secondary_grads" in fields and steps > 1
    in_loops = (size - VOCAB * WIDTH) / size
    reductions = 1 if is_once else steps * (1 + in_loops / LAYERS)
    return (num_nodes - 1) / num_nodes * size / per_node * (gathers * of[kinds.gather] + reductions * of[kinds.reduce])


def compiled(kind: str, topology: str, steps: int) -> dict[str, Any]:
    """Returns the figures of one program."""
    fields, hardware = {"stage": 3, "precision": "bf16", **KINDS[kind]}, machine(topology)
    number, per_node = hardware.num_devices, hardware.devices_per_node
    levels = "node_axis" in fields or "replica_axis" in fields
    sizes = {"node": number // per_node, "data": per_node} if levels else {"data": number}
    mesh = jzero.make_mesh(devices=topology_devices(topology), **sizes)
    plain = jax.eval_shape(lambda: jzero.TrainState.create(params=zeros(), tx=optax.adamw(1e-3)))
    state = jzero.abstract_train_state(plain, config=jzero.ZeroConfig(**fields), mesh=mesh)
    batch = jax.ShapeDtypeStruct((ROWS * number * steps, LENGTH + 1), jnp.int32)
    started = time.process_time()
    traced = jzero.make_train_step(loss_fn, accumulate_steps=steps).trace(state, batch)
    compiled = traced.lower().compile(topology_options(topology) or None)
    program = parse_hlo(compiled.as_text())
    collectives = tuple(program_collectives(program))
    facts = Compiled(
        (program,),
        collectives,
        tuple(traced_collectives(traced.jaxpr)),
        tuple(trace_program(traced.jaxpr, [1] * len(traced.jaxpr.in_avals)).transfers),
        "gpu",
        compiled_memory(compiled, "gpu", 0),
        returns_state=True,
        micro_batches=steps,
    )
    size = sum(x.size for x in jax.tree.leaves(shapes()))
    nic = sum(c.nic_bytes(per_node) * c.times for c in collectives)
    if number > per_node:
        rates = {f"{rate}": dataclasses.replace(hardware, inter_link_bytes_per_s=rate * 1e9) for rate in RATES}
    else:
        rates = {
            f"{name}@{rate}": dataclasses.replace(machine(name), intra_link_bytes_per_s=rate * 1e9)
            for name, rate in PCIE
        }
    return {
        "kind": kind,
        "topology": topology,
        "micro_batches": steps,
        "parameters": size,
        "nic_bytes": round(nic),
        "flat_bytes": round(by_formula({}, 1, number // per_node, per_node, size)),
        "formula": round(by_formula(KINDS[kind], steps, number // per_node, per_node, size)),
        "sent_bytes": round(sum(c.sent_bytes * c.times for c in collectives)),
        "peak": facts.memory.peak,
        "ms": {name: round(1e3 * simulate(program, x)[0].seconds, 2) for name, x in {"": hardware, **rates}.items()},
        "violations": find_violations(facts, jzero.plan_of(state))[0],
        "jax": jax.__version__,
        "cpu_seconds": round(time.process_time() - started),
    }


def zeros() -> dict[str, Any]:
    """Returns the parameters as zeros."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes())


def table(lines: list[dict[str, Any]]) -> str:
    """Returns Markdown: one table per topology and number of micro-batches."""
    text = []
    for topology, steps in dict.fromkeys((x["topology"], x["micro_batches"]) for x in lines):
        rows = [x for x in lines if (x["topology"], x["micro_batches"]) == (topology, steps)]
        names = [name for name in rows[0]["ms"] if name]
        several = rows[0]["nic_bytes"] > 0
        heads = ["bytes", "formula", "off"] if several else ["sent MB"]
        text += [f"\n**{topology}, k = {steps}**\n", f"| | {' | '.join([*heads, *names, 'ms', 'MiB'])} |"]
        text.append("|---" * (len(heads) + len(names) + 3) + "|")
        for x in rows:
            flat = x["flat_bytes"]
            cells = [f"{x['sent_bytes'] / 1e6:.0f}"]
            if several:
                off = x["nic_bytes"] / x["formula"] - 1
                cells = [f"{x['nic_bytes'] / flat:.3f}", f"{x['formula'] / flat:.3f}", f"{100 * off:+.1f} %"]
            cells += [f"{x['ms'][name]:.1f}" for name in [*names, ""]]
            text.append(f"| {x['kind']} | {' | '.join(cells)} | {x['peak'] / 2**20:.0f} |")
            text += [f"departs from the plan: {v}" for v in x["violations"]]
    return "\n".join(text)


def plot(lines: list[dict[str, Any]], path: str) -> None:
    """Draws the modelled step by the rate of the network, and by kind on one node."""
    figure, (several, one) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    drawn = ("flat", "two_hops", "secondary", "secondary, int8 gather", "secondary, int8 gather, int4 reduce", "hsdp")
    for x in lines:
        if x["nic_bytes"] and x["micro_batches"] == 1 and x["kind"] in drawn:
            several.plot(RATES, [x["ms"][f"{r}"] for r in RATES], marker="o", label=x["kind"].replace("_", " "))
    several.set(xlabel="GB/s per network port", ylabel="modelled step, ms", xscale="log", ylim=(0, None))
    several.set(title="2 hosts of 8 H200, GPT of 419M")
    several.set_xticks(RATES, [f"{r:g}" for r in RATES])
    several.minorticks_off()
    several.legend(fontsize="small")
    rows = [x for x in lines if x["topology"] == PCIE[0][0]]
    for i, (name, rate) in enumerate(PCIE):
        heights = [x["ms"][f"{name}@{rate}"] for x in rows]
        one.bar([j + (i - 2) * 0.16 for j in range(len(rows))], heights, 0.15, label=f"{name}, {rate} GB/s")
    one.set_xticks(range(len(rows)), [x["kind"].replace(", ", "\n") for x in rows], fontsize="x-small")
    one.set(title="One host of 8 PCIe cards", ylabel="modelled step, ms")
    one.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Compiles and writes one line for each program, or prints and draws the lines of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:16")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="by default those that fit the topology")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1])
    parser.add_argument("--out", help="the result file; lines are appended")
    parser.add_argument("--table", help="print this result file")
    parser.add_argument("--plot", help="draw it, too")
    options = parser.parse_args()
    if options.table:
        lines = [json.loads(line) for line in pathlib.Path(options.table).read_text().splitlines()]
        print(table(lines))
        if options.plot:
            plot(lines, options.plot)
        return
    hardware = machine(options.topology)
    default = SEVERAL if hardware.num_devices > hardware.devices_per_node else ONE_NODE
    for steps in options.micro_batches:
        for kind in options.kinds or default:
            if steps == 1 and kind.startswith("both"):
                continue  # with one micro-batch it changes nothing
            line = json.dumps(compiled(kind, options.topology, steps))
            print(line, flush=True)
            if options.out:
                with pathlib.Path(options.out).open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
