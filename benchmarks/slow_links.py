"""What sends less on slow links, by compilation: `python -m benchmarks.slow_links [CASE ...]`.

* links (`--topology h200:16`, or `l40s:8` for one node of PCIe cards): two-level meshes, secondary shares and integers.
  A scanned GPT of 419M parameters, recomputed, in bf16 with fp32 masters and AdamW, two sequences of 1024 tokens per
  device: bytes on one network port as compiled and by the formula, and the modelled step at several rates of the
  slowest link.
* experts (`h200:16`): Mixtral 8x7B by `examples/llm/`, one row of 4096 tokens for each device, the experts of a layer
  on all devices, or divided among 2, 4 or 8; "exchanged" sends tokens by `all_to_all` instead, and drops what has no
  room; "hand" is that in plain `jax.jit`, see `benchmarks/experts_by_hand.py`.
* contexts (`h200:64`): Llama 3.1 8B by `examples/llm/` at 131,072 tokens; each line takes one of the ways to need less
  memory away, or adds one. Some are only estimated from the trace.
* rings (`h200:64`): keys and values gathered, or passed around a ring beside attention, by arithmetic: nothing is
  compiled.

No accelerator is needed: the compiler of `jzero[gpu]` tells, and times are the model of `jzero/analysis/schedule.py`.
Each line of the result file is one program; lines that are there already are not compiled again. `--table FILE` prints
one, `--only` chooses lines, `--small` compiles small models, to try it out.

The formula, for M nodes of D devices, Ψ parameters and L layers, in bytes on one network port:

    (M-1)/M · Ψ/D · (gathers · g + reductions · r · (1 + 1/L))     g = 2, or 1 + 4/b;  r = 2, 1 + 4/b or 1/2 + 4/b

with 2 gathers per micro-batch, or 1 in all with secondary parameters, blocks of b = 256 elements, and 1/L for the hop
of zeros in the first turn of a loop. One ring over all devices sends 6Ψ(N-1)/(N·D) per micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

from benchmarks.common import GIB, MIB, complete, lines_of, parser_of
from benchmarks.tables import Column, fixed, number, quotient, table

TWO = {"node_axis": "node"}
SECONDARY = {**TWO, "secondary_params": True}
BOTH = {**SECONDARY, "secondary_grads": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "flat": ({}, {}),
    "two hops": (TWO, {}),
    "secondary": (SECONDARY, {}),
    "secondary, int8 gather": (SECONDARY, {"gather": "int8"}),
    "secondary, int8 gather, int4 reduce": (SECONDARY, {"gather": "int8", "reduce": "int4"}),
    "both secondary": (BOTH, {}),
    "both secondary, int8 gather, int4 reduce": (BOTH, {"gather": "int8", "reduce": "int4"}),
    "hsdp": ({"replica_axis": "node"}, {}),
    "int8 gather": ({}, {"gather": "int8"}),
    "int8 gather, int8 reduce": ({}, {"gather": "int8", "reduce": "int8"}),
    "int8 gather, int4 reduce": ({}, {"gather": "int8", "reduce": "int4"}),
    "stage 2": ({"stage": 2}, {}),
    "stage 2, int8 reduce": ({"stage": 2}, {"reduce": "int8"}),
}
RATES = (50, 25, 12.5, 6.25)
"""Network, in GB/s per port."""
PCIE = (("l40s:8", 32), ("l40s:8", 16), ("rtx4090:8", 16), ("rtx4090:8", 8), ("a100-pcie:8", 16))
"""One node: machine and GB/s of its PCIe link. PCIe 4.0 has 32; shared lanes, and ways through the host, leave less."""
SIZE = {"layers": 8, "width": 2048, "vocab": 8192, "head": 128, "seq_len": 1024}
ROWS = 2


def by_formula(kind: str, steps: int, num_nodes: int, per_node: int, size: int) -> float:
    """Returns the bytes on one network port."""
    fields, rounded = KINDS[kind]
    if "replica_axis" in fields:  # a ring of all-reduce over nodes, of each device's part
        return 2 * (num_nodes - 1) / num_nodes * size / per_node * 2 * steps
    if "node_axis" not in fields:
        number = num_nodes * per_node
        return 6 * size * (number - 1) / number / per_node * steps
    of = {"none": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 256}
    gathers = 1 if "secondary_params" in fields else 2 * steps
    in_loops = (size - SIZE["vocab"] * SIZE["width"]) / size
    reductions = 1 if "secondary_grads" in fields and steps > 1 else steps * (1 + in_loops / SIZE["layers"])
    bytes_of = gathers * of[rounded.get("gather", "none")] + reductions * of[rounded.get("reduce", "none")]
    return (num_nodes - 1) / num_nodes * size / per_node * bytes_of


def links(kind: str, topology: str, steps: int, size: dict[str, int]) -> dict[str, Any]:
    """Returns the figures of one program."""
    import jax
    import optax

    import jzero
    from benchmarks.engines import loss_of
    from benchmarks.family_models import gpt
    from jzero.analysis.collectives import program_collectives
    from jzero.analysis.hlo import parse_hlo
    from jzero.analysis.memory import compiled_memory
    from jzero.analysis.schedule import simulate
    from jzero.machines.machine import machine
    from jzero.machines.topologies import topology_devices, topology_options

    (fields, rounded), hardware = KINDS[kind], machine(topology)
    count, per_node = hardware.num_devices, hardware.devices_per_node
    nodes, two_levels = count // per_node, "node_axis" in fields or "replica_axis" in fields
    axes = {"node": nodes, "data": per_node} if two_levels else {"data": count}
    mesh = jzero.make_mesh(devices=topology_devices(topology), **axes)
    config = jzero.ZeroConfig(**{"stage": 3, "precision": "bf16", **fields}, quantization=jzero.Quantization(**rounded))
    model = gpt(**size, scanned=True, remat=True)
    make = lambda key: jzero.TrainState.create(params=model.init(key), tx=optax.adamw(1e-3))
    plain = jax.eval_shape(make, jax.random.key(0))
    state = jzero.abstract_train_state(plain, config=config, mesh=mesh)
    step = jzero.make_train_step(loss_of(model), accumulate_steps=steps)
    compiled = step.trace(state, model.batch(ROWS * count * steps)).lower().compile(topology_options(topology) or None)
    program = parse_hlo(compiled.as_text())
    collectives = list(program_collectives(program))
    rates = {f"{x} GB/s": dataclasses.replace(hardware, inter_link_bytes_per_s=x * 1e9) for x in RATES}
    if nodes == 1:
        changed = lambda name, x: dataclasses.replace(machine(name), intra_link_bytes_per_s=x * 1e9)
        rates = {f"{name}@{x}": changed(name, x) for name, x in PCIE}
    parameters = sum(x.size for x in jax.tree.leaves(plain.params))
    return {
        "nic_bytes": round(sum(c.nic_bytes(per_node) * c.times for c in collectives)),
        "flat_bytes": round(by_formula("flat", 1, nodes, per_node, parameters)),
        "formula": round(by_formula(kind, steps, nodes, per_node, parameters)),
        "sent_bytes": round(sum(c.sent_bytes * c.times for c in collectives)),
        "peak": compiled_memory(compiled, "gpu", 0).peak,
        "seconds": simulate(program, hardware)[0].seconds,
        "ms": {name: round(1e3 * simulate(program, x)[0].seconds, 2) for name, x in rates.items()},
        "jax": jax.__version__,
    }


def names_of(case: str, topology: str) -> list[str]:
    """Returns the lines of a case."""
    if case == "experts":
        return ["1", "2", "4", "8", *[f"{kind} {among}" for kind in ("exchanged", "hand") for among in (2, 4, 8)]]
    if case == "contexts":
        from benchmarks.llm import CONTEXTS

        return list(CONTEXTS)
    if case == "rings":
        from benchmarks.llm import RINGS

        return list(RINGS)
    from jzero.machines.machine import machine

    hardware = machine(topology)
    several = hardware.num_devices > hardware.devices_per_node
    two_levels = lambda fields: "node_axis" in fields or "replica_axis" in fields
    return [kind for kind, (fields, _) in KINDS.items() if kind == "flat" or two_levels(fields) == several]


def line_of(key: str, *, small: bool) -> dict[str, Any]:
    """Returns one line of the result file."""
    case, topology, steps, name = key.split("/")
    if case == "links":
        return links(name, topology, int(steps), {**SIZE, **({"layers": 2, "width": 256} if small else {})})
    from benchmarks import llm

    if case == "rings":
        return llm.rings(topology, name, llm.LLAMA_8B)
    less = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1024} if small else {}
    sizes = llm.MIXTRAL if case == "experts" else llm.LLAMA_8B
    seq = {"seq": 512} if small else {}
    return (llm.experts if case == "experts" else llm.contexts)(topology, name, {**sizes, **less}, **seq)


def columns(lines: list[dict[str, Any]]) -> list[Column]:
    """Returns the columns of a table."""
    of = lambda key, name, unit=1.0: lambda x: f"{x[key][name] / unit:.1f}" if name in x.get(key, {}) else ""
    axes = dict.fromkeys(name for x in lines for name in x.get("sent", {}))
    rates = dict.fromkeys(name for x in lines for name in x.get("ms", {}))
    return [
        ("bytes on a port, of flat", quotient("nic_bytes", "flat_bytes")),
        ("by the formula", quotient("formula", "flat_bytes")),
        ("states, GiB", number("states", GIB)),
        ("estimated peak, MiB", number("estimated", MIB)),
        ("peak, MiB", number("peak", MIB)),
        ("sent, GB", number("sent_bytes", 1e9)),
        *[(f"over {name}, GB", of("sent", name, 1e9)) for name in axes],
        ("through a port, GB", number("nic_bytes", 1e9)),
        ("step, ms", number("seconds", 1e-3)),
        ("by the shortest branches, ms", number("least", 1e-3)),
        ("exposed", fixed("exposed", 3)),
        ("gathered, GiB", number("gathered", GIB)),
        ("of a ring, MiB", number("part", MIB)),
        *[(f"{name}, ms", number(name, 1e-3)) for name in ("attention", "products", "gather", "turn")],
        ("gathering, of a ring's time", fixed("of_ring")),
        *[(f"ms: {name}", of("ms", name)) for name in rates],
        ("", lambda x: x.get("note", "")),
    ]


def main() -> None:
    """Compiles what is not in the result file yet, or prints one."""
    cases = {"links": "h200:16", "experts": "h200:16", "contexts": "h200:64", "rings": "h200:64"}
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(cases)}; all by default")
    parser.add_argument("--topology", help="the machine, in place of that of the case")
    parser.add_argument("--only", nargs="+", help="names of lines")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1], help="of links")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("slow_links.jsonl"))
    parser.add_argument("--table", type=pathlib.Path, help="print this file, compile nothing")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(cases):
        parser.error(f"no cases {sorted(unknown)}: choose of {', '.join(cases)}")
    if options.table:
        for case in cases:
            lines = [x for x in lines_of(options.table) if x["key"].startswith(case)]
            rows = [(x["key"].partition("/")[2].replace("/", ", "), x) for x in lines]
            print("\n".join([f"**{case}**", *table(columns(lines), rows)] if lines else []))
        return
    import jax

    jax.config.update("jax_platforms", "cpu")
    make = functools.partial(line_of, small=options.small)
    for case in options.cases or cases:
        topology = options.topology or cases[case]
        names = [x for x in names_of(case, topology) if not options.only or x in options.only]
        for steps in options.micro_batches if case == "links" else [1]:
            changes = [x for x in names if steps > 1 or not x.startswith("both")]
            complete(options.out, [f"{case}/{topology}/{steps}/{x}" for x in changes], make)


if __name__ == "__main__":
    main()
