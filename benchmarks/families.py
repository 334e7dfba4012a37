"""Families of models by compilation, by jzero and by hand: `python -m benchmarks.families --topology h200:8`.

`benchmarks.by_compilation` asks much about GPTs; this asks the same few things about 22 models, of the sizes in
`family_models.py`, `more_family_models.py` and `held_out_models.py`: peak memory per device, the modelled step, how
much of its communication nothing hides, and what is sent, in parameters (ZeRO's bound at stage 3 is 3). All train by
AdamW in bf16 with fp32 masters and tell the norm of their gradients.

* `jzero`: `make_train_step` and a sharded train state, as a user writes them: it keeps what fits.
* `cheap`: the same with `remat="cheap"`: it gathers parameters again and recomputes cheap activations.
* `keeping`: the same, but it keeps for the backward pass what `strong` keeps: all activations that the model does not
  recompute (`remat="as_written"`) and whole parameters (`reshard_after_forward=False`).
* `strong`: what a user who knows GSPMD writes: parameters and optimizer state cut on the largest dimension that the
  devices divide, but not on that of a scan, and what is small in a layer left whole; parameters cast before they are
  gathered; gradients laid out like them; activations cut by rows at the start of each block. What is recomputed is up
  to the model.

No accelerator is needed: the compilers of `jzero[gpu]` and `jzero[tpu]` tell. Each line of the result file is one
program; lines that are there already are not compiled again. `--table old.jsonl new.jsonl` prints such files side by
side. `--trace` compiles nothing: it prints what tracing and lowering a step takes beside plain `jax.jit`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jzero
from benchmarks.by_compilation import MIB
from benchmarks.engines import TX, Engine, State
from benchmarks.family_models import (
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_125M,
    LLAMA_128K,
    Constrain,
    Family,
    Gather,
    gpt,
    llama,
    mamba,
    moe,
    run,
    t5,
    vit,
)
from benchmarks.gpt import AXIS
from benchmarks.held_out_models import clip, conformer, mamba_2, mixture_of_depths, rssm, unet_attention
from benchmarks.lines import add_line, lines_of
from benchmarks.more_family_models import dit, gnn, hybrid, perceiver, unet
from jzero.core.engine.recompute import Remat
from jzero.machines.topologies import topology_devices

FAMILIES: dict[str, Callable[[], Family]] = {
    "gpt_scanned": functools.partial(gpt, scanned=True),
    "gpt_unrolled": functools.partial(gpt, scanned=False),
    "llama_1b": functools.partial(llama, LLAMA_1B, scanned=True, remat=True),
    "llama_125m": functools.partial(llama, LLAMA_125M, scanned=False, remat=False),
    "llama_125m_remat": functools.partial(llama, LLAMA_125M, scanned=False, remat=True),
    "t5": t5,
    "moe": moe,
    "mamba": mamba,
    "vit_l": vit,
    "unet": unet,
    "gnn": gnn,
    "dit": dit,
    "hybrid": hybrid,
    "perceiver": perceiver,
    "llama_128k": functools.partial(llama, LLAMA_128K, scanned=False, remat=False),
    "llama_8b": functools.partial(llama, LLAMA_8B, scanned=True, remat=True),
    "rssm": rssm,
    "mamba_2": mamba_2,
    "conformer": conformer,
    "mixture_of_depths": mixture_of_depths,
    "unet_attention": unet_attention,
    "clip": clip,
}
UNTIED = functools.partial(gpt, tied=False, remat=True)
LARGE: dict[str, Callable[[], Family]] = {
    "gpt_350m": functools.partial(UNTIED, layers=24, width=1024, scanned=False),
    "gpt_1_4b": functools.partial(UNTIED, layers=24, width=2048, scanned=True),
    "gpt_1_4b_unrolled": functools.partial(UNTIED, layers=24, width=2048, scanned=False),
    "gpt_7b": functools.partial(UNTIED, layers=32, width=4096, head=128, scanned=True),
}
"""Compiled if they are named: GPTs that recompute each block, without a tied embedding."""


def mlp(*, width: int = 1024, layers: int = 4) -> Family:
    """Returns a perceptron that regresses."""
    shapes = {"layers": [{"w": (width, width), "b": (width,)} for _ in range(layers)]}
    block = lambda x, p: jax.nn.relu(x @ p["w"] + p["b"])
    loss = lambda params, batch, constrain: jnp.square(
        run(block, batch, params["layers"], constrain).astype(jnp.float32)
    ).mean()
    return Family(shapes, loss, lambda rows: jax.ShapeDtypeStruct((rows, width), jnp.bfloat16))


TRACED: dict[str, Callable[[], Family]] = {
    "llama_125m": FAMILIES["llama_125m"],
    "llama_1b": FAMILIES["llama_1b"],
    "dit": dit,
    "t5": t5,
    "gpt, 48 unrolled layers": functools.partial(gpt, layers=48, scanned=False),
    "gpt, 2 unrolled layers": functools.partial(gpt, layers=2, scanned=False),
    "mlp": mlp,
}
ENGINES = ("jzero", "cheap", "keeping", "strong")
SMALL = 100_000  # parameters of a layer of up to so many elements stay whole, by hand


def gathered_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of all devices, and the numbers of this device's, in a loss that sees only these."""
    return lax.all_gather(x, AXIS, tiled=True), lax.axis_index(AXIS) * len(x) + jnp.arange(len(x))


def all_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the same in a loss that sees all rows."""
    return x, jnp.arange(len(x))


def loss_of(
    family: Family, constrain: Constrain = lambda x: x, gather: Gather = gathered_rows
) -> Callable[..., jax.Array]:
    """Returns `loss(params, batch)`."""
    more = (gather,) if family.gathers else ()
    return lambda params, batch: family.loss(params, batch, constrain, *more)


def batch_of(family: Family, mesh: Mesh) -> Any:
    """Returns the shapes of a batch, cut by rows."""
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
    return jax.tree.map(place, family.batch(family.rows * mesh.shape[AXIS]))


def jzero_step(
    family: Family, stage: int, mesh: Mesh, *, remat: Remat | None = None, tx: optax.GradientTransformation = TX
) -> Engine:
    """Returns jzero's step; with `remat="as_written"`, it keeps activations and whole parameters."""
    config = jzero.ZeroConfig(stage=stage, precision="bf16", reshard_after_forward=remat != "as_written")
    make = lambda key: jzero.TrainState.create(params=family.init(key), tx=tx)
    shapes = jax.eval_shape(make, jax.random.key(0))
    step = jzero.make_train_step(loss_of(family), remat=remat)
    start = functools.partial(jzero.init_train_state, make, config=config, mesh=mesh)
    return Engine(step, start, jzero.abstract_train_state(shapes, config=config, mesh=mesh))


def layout_of(path: Any, x: jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    """Returns the layout of a parameter by hand, or of a moment of it."""
    stacked = any(getattr(key, "key", None) == "stack" for key in path)
    dims = [d for d in range(stacked, x.ndim) if x.shape[d] % mesh.shape[AXIS] == 0]
    if math.prod(x.shape[stacked:]) <= SMALL or not dims:
        return NamedSharding(mesh, PartitionSpec())
    largest = max(dims, key=lambda d: x.shape[d])
    return NamedSharding(mesh, PartitionSpec(*[AXIS if d == largest else None for d in range(x.ndim)]))


def narrow(tree: Any) -> Any:
    """Returns a tree in bf16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def updated(
    masters: Any, opt_state: Any, grads: Any, tx: optax.GradientTransformation = TX
) -> tuple[Any, Any, jax.Array]:
    """Returns new masters, the new optimizer state, and the norm of the gradients."""
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, opt_state = tx.update(grads, opt_state, masters)
    return optax.apply_updates(masters, updates), opt_state, optax.global_norm(grads)


def strong_step(family: Family, stage: int, mesh: Mesh, *, tx: optax.GradientTransformation = TX) -> Engine:
    """Returns the step by hand."""
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    loss_fn = loss_of(family, lambda x: lax.with_sharding_constraint(x, rows), all_rows)

    def start(key: jax.Array) -> State:
        masters = family.init(key)
        return State(None if stage == 3 else narrow(masters), masters, tx.init(masters))

    shapes = jax.eval_shape(start, jax.random.key(0))
    layout = jax.tree_util.tree_map_with_path(functools.partial(layout_of, mesh=mesh), shapes)
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes.params)
    layout = layout._replace(params=replicated)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        params = state.params
        if params is None:
            params = lax.with_sharding_constraint(narrow(state.masters), layout.masters)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        if stage >= 2:
            grads = lax.with_sharding_constraint(grads, layout.masters)
        masters, opt_state, norm = updated(state.masters, state.opt_state, grads, tx)
        params = None
        if state.params is not None:
            params = lax.with_sharding_constraint(narrow(masters), layout.masters)
        return State(params, masters, opt_state), {"loss": loss, "grad_norm": norm}

    jitted = jax.jit(step, donate_argnums=0, in_shardings=(layout, rows), out_shardings=(layout, None))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return Engine(jitted, jax.jit(start, out_shardings=layout), jax.tree.map(place, shapes, layout))


def plain_step(family: Family, mesh: Mesh | None = None) -> Engine:
    """Returns a step of plain `jax.jit`, on one device, or with everything but the batch whole on each of a mesh."""
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def start(key: jax.Array) -> State:
        masters = family.init(key)
        return State(None, masters, TX.init(masters))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        loss, grads = jax.value_and_grad(loss_of(family, gather=all_rows))(narrow(state.masters), batch)
        masters, opt_state, norm = updated(state.masters, state.opt_state, grads)
        return State(None, masters, opt_state), {"loss": loss, "grad_norm": norm}

    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)
    like = jax.tree.map(place, jax.eval_shape(start, jax.random.key(0)))
    return Engine(
        jax.jit(step, donate_argnums=0, out_shardings=replicated), jax.jit(start, out_shardings=replicated), like
    )


def engine_of(name: str, family: Family, stage: int, mesh: Mesh) -> Engine:
    """Returns one of `ENGINES`, or "plain"."""
    if name == "plain":
        return plain_step(family, mesh)
    if name == "strong":
        return strong_step(family, stage, mesh)
    remat = {"jzero": None, "cheap": "cheap" if stage == 3 else None, "keeping": "as_written"}
    return jzero_step(family, stage, mesh, remat=remat[name])


def compiled(name: str, engine: str, stage: int, topology: str) -> dict[str, Any]:
    """Returns the figures of one program."""
    family = {**FAMILIES, **LARGE}[name]()
    mesh = jzero.make_mesh(devices=topology_devices(topology), **{AXIS: -1})
    return figures(family, engine_of(engine, family, stage, mesh), mesh, topology)


def figures(family: Family, built: Engine, mesh: Mesh, topology: str) -> dict[str, Any]:
    """Returns the figures of a step."""
    started = time.process_time()
    facts = {"jax": jax.__version__}
    try:
        report = jzero.analyze(built.step, built.like, batch_of(family, mesh), topology=topology, mesh=mesh)
    except Exception as error:  # a table of many programs is worth more than the first that fails
        return {"error": f"{type(error).__name__}: {error}"[:2000], **facts}
    size = sum(math.prod(x) for x in jax.tree.leaves(family.shapes, is_leaf=lambda x: isinstance(x, tuple)))
    return {
        "parameters": size,
        "peak": report.memory.peak,
        "arguments": report.memory.arguments,
        "elements": report.communication_elements,
        "sent": report.communication_elements / size,
        "sent_bytes": sum(c.sent_bytes for c in report.collectives),
        "exposed": report.exposed_communication,
        "seconds": None if report.timeline is None else report.timeline.seconds,
        "kinds": sorted({f"{c.kind} {c.dtype}" for c in report.collectives if c.elements > size // 1000}),
        "violations": list(report.violations),
        "notes": list(report.notes),
        "cpu_seconds": round(time.process_time() - started, 1),
        **facts,
    }


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "peak": ("peak, MiB", lambda x: f"{x['peak'] / MIB:.0f}"),
    "seconds": ("step, ms", lambda x: f"{1e3 * x['seconds']:.1f}"),
    "exposed": ("exposed, %", lambda x: f"{100 * x['exposed']:.1f}"),
    "sent": ("sent, Ψ", lambda x: f"{x['sent']:.2f}"),
    "cpu_seconds": ("compiled in, CPU s", lambda x: f"{x['cpu_seconds']:.0f}"),
}


def table(files: dict[str, list[dict[str, Any]]]) -> str:
    """Returns Markdown: one table per topology and stage, for each figure a column per file, and for the other engines.

    The last file's peak and step are also given as parts of those by hand.
    """
    by_file = {name: {tuple(x["key"].split("/")): x for x in lines} for name, lines in files.items()}
    others = {key: x for lines in reversed(by_file.values()) for key, x in lines.items() if key[2] != "jzero"}
    columns = {**by_file, **{engine: others for engine in ENGINES[1:] if any(key[2] == engine for key in others)}}
    groups = sorted({(key[0], key[3]) for lines in by_file.values() for key in lines})
    text = []
    for topology, stage in groups:
        heads = [f"{title}: {name}" for title, _ in FIGURES.values() for name in columns]
        text += [f"\n**{topology}, stage {stage}**\n", f"| | {' | '.join([*heads, 'peak ratio', 'step ratio'])} |"]
        text.append("|---" * (len(heads) + 3) + "|")
        for family in {**FAMILIES, **LARGE}:
            line = [
                lines.get((topology, family, name if name in ENGINES else "jzero", stage), {})
                for name, lines in columns.items()
            ]
            cells = [cell(x, figure, show) for figure, (_, show) in FIGURES.items() for x in line]
            new, hand = line[len(by_file) - 1], others.get((topology, family, "strong", stage), {})
            ratios = [f"{new[f] / hand[f]:.2f}" if new.get(f) and hand.get(f) else "" for f in ("peak", "seconds")]
            if any(line):
                text.append(f"| {family} | {' | '.join([*cells, *ratios])} |")
    return "\n".join(text)


def cell(x: dict[str, Any], figure: str, show: Callable[[dict[str, Any]], str]) -> str:
    """Returns one cell of a table."""
    if "error" in x:
        return "fails"
    return "" if x.get(figure) is None else show(x)


def trace_seconds(family: Family, mesh: Mesh, repeats: int = 3) -> dict[str, float]:
    """Returns the CPU seconds of tracing and lowering a step, plain and by jzero, the best of some in turns."""
    makers = {
        "plain": lambda: (plain_step(family), family.batch(family.rows)),
        "jzero": lambda: (jzero_step(family, 3, mesh), batch_of(family, mesh)),
    }
    best = dict.fromkeys(makers, math.inf)
    for _, (name, make) in itertools.product(range(repeats), makers.items()):
        engine, batch = make()
        jax.clear_caches()
        gc.collect()
        started = time.process_time()
        engine.step.lower(engine.like, batch)
        best[name] = min(best[name], time.process_time() - started)
    return best


def trace(names: list[str]) -> None:
    """Prints what tracing and lowering takes."""
    mesh = jzero.make_mesh(**{AXIS: -1})
    print(f"jax {jax.__version__}, {mesh.size} devices, stage 3\n")
    print("| | plain `jax.jit`, CPU s | jzero, CPU s | ratio |\n|---|---|---|---|")
    for name in names or TRACED:
        seconds = trace_seconds(TRACED[name](), mesh)
        plain, ours = seconds["plain"], seconds["jzero"]
        print(f"| {name} | {plain:.2f} | {ours:.2f} | {ours / plain:.2f} |", flush=True)


def main() -> None:
    """Compiles what is not in the result file yet, or prints result files or what tracing takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    names = f"{', '.join(FAMILIES)} (all by default), {', '.join(LARGE)}"
    parser.add_argument("--family", nargs="*", default=[], help=f"of {names}")
    parser.add_argument("--engine", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("families.jsonl"))
    parser.add_argument("--table", type=pathlib.Path, nargs="+", help="print these files, compile nothing")
    parser.add_argument("--trace", action="store_true", help="time tracing and lowering, compile nothing")
    options = parser.parse_args()
    models = TRACED if options.trace else {**FAMILIES, **LARGE}
    if unknown := set(options.family) - set(models):
        parser.error(f"no families {sorted(unknown)}: choose of {', '.join(models)}")
    jax.config.update("jax_platforms", "cpu")
    if options.table:
        print(table({path.stem: lines_of(path) for path in options.table}))
        return
    if options.trace:
        jax.config.update("jax_num_cpu_devices", 8)
        trace(options.family)
        return
    for name, engine in itertools.product(options.family or FAMILIES, options.engine):
        key = f"{options.topology}/{name}/{engine}/{options.stage}"
        if key in {x["key"] for x in lines_of(options.out)}:
            continue
        line = {"key": key, **compiled(name, engine, options.stage, options.topology)}
        add_line(options.out, line)


if __name__ == "__main__":
    main()
