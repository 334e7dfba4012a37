"""Against GSPMD, by compilation: `python -m benchmarks.families --topology h200:8`.

Peak memory per device, the modelled step, how much of its communication nothing hides, and what is sent, in parameters
(ZeRO's bound at stage 3 is 3), for the models of `models.py` and the engines of `engines.py`, of which `strong` is
GSPMD as a user who knows it writes it. Two more engines fill memory (`fill_memory`): `full` up to the peak of `strong`,
`half` up to the middle between that and `cheap`. `--optimizer muon` trains the matrices of layers by
`optax.contrib.muon` and the rest by Adam; `muon+e` takes embedding and head, too.

No accelerator is needed: the compilers of `jzero[gpu]` and `jzero[tpu]` tell memory, collectives and the schedule;
exposed communication and milliseconds are the model of `jzero/analysis/schedule.py` over that schedule. Each line of
the result file is one program; lines that are there already are not compiled again. `--table old.jsonl new.jsonl`
prints such files.
"""

from __future__ import annotations

import itertools
import pathlib
import time
from typing import Any

from benchmarks.common import MIB, complete, lines_of, parser_of
from benchmarks.tables import fixed, number, quotient, table

ENGINES = ("jzero", "cheap", "keeping", "strong", "plain", "half", "full")
OPTIMIZERS = ("adamw", "muon", "muon+e")


def optimizer(name: str) -> Any:
    """Returns an optimizer of `OPTIMIZERS`."""
    import jax
    import optax
    from optax.contrib import MuonDimensionNumbers

    def numbers_of(path: Any, x: Any) -> MuonDimensionNumbers | None:  # `None`: Adam updates the leaf
        names = [str(getattr(key, "key", "")) for key in path]
        if x.ndim - ("stack" in names) != 2 or (names[-1] in ("embed", "head") and name != "muon+e"):
            return None
        return MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    if name == "adamw":
        return optax.adamw(1e-4)
    numbers = lambda params: jax.tree_util.tree_map_with_path(numbers_of, params)
    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)


def figures(key: str, path: pathlib.Path) -> dict[str, Any]:
    """Returns the figures of one program; `path` has, or gets, those that it is compared with."""
    import jax

    import jzero
    from benchmarks.engines import AXIS, batch_of, engine_of
    from benchmarks.models import MODELS
    from jzero.machines.topologies import topology_devices

    topology, name, engine, stage, tx = key.split("/")
    fills, limit, kept = engine in ("half", "full"), None, None
    if fills:
        others = [f"{topology}/{name}/{x}/{stage}/{tx}" for x in ("strong", "cheap")]
        complete(path, others, lambda key: figures(key, path))
        lines = {x["key"]: x for x in lines_of(path)}
        hand, least = (lines[x]["peak"] for x in others)
        limit = hand if engine == "full" else (least + hand) / 2
        if least >= hand:
            return {"limit": hand, "note": "there is nothing to fill"}
    family, started = MODELS[name](), time.process_time()
    mesh = jzero.make_mesh(devices=topology_devices(topology), **{AXIS: -1})
    step, _, like = engine_of("jzero" if fills else engine, family, int(stage), mesh, tx=optimizer(tx))
    batch = batch_of(family, mesh)
    try:
        if limit is not None:
            step = jzero.fill_memory(step, like, batch, hbm_bytes=limit, topology=topology)
            found = step.plan(like, batch).kept
            kept = found and [len(found.params), found.of_params, found.blocks, found.of_blocks]
        report = jzero.analyze(step, like, batch, topology=topology, mesh=mesh)
    except Exception as error:  # a table of many programs is worth more than the first that fails
        return {"error": f"{type(error).__name__}: {error}"[:2000], "jax": jax.__version__}
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(family.init, jax.random.key(0))))
    return {
        "parameters": size,
        "peak": report.memory.peak,
        "arguments": report.memory.arguments,
        "sent": report.communication_elements / size,
        "sent_bytes": sum(c.sent_bytes for c in report.collectives),
        "exposed": report.exposed_communication,
        "seconds": None if report.timeline is None else report.timeline.seconds,
        "limit": limit,
        "kept": kept,
        "violations": list(report.violations),
        "notes": list(report.notes),
        "cpu_seconds": round(time.process_time() - started, 1),
        "jax": jax.__version__,
    }


COLUMNS = [
    ("peak, MiB", number("peak", MIB)),
    ("of strong", quotient("peak", "strong_peak")),
    ("step, ms", number("seconds", 1e-3)),
    ("of strong", quotient("seconds", "strong_seconds")),
    ("exposed, %", number("exposed", 0.01)),
    ("sent, Ψ", fixed("sent")),
    ("sent, GB", number("sent_bytes", 1e9)),
    ("compiled in, CPU s", number("cpu_seconds")),
    ("kept", lambda x: "{} of {} leaves, {} of {} blocks".format(*x["kept"]) if x.get("kept") else ""),
    ("", lambda x: x.get("note", "fails" if "error" in x else "")),
]


def main() -> None:
    """Compiles what is not in the result file yet, or prints result files."""
    parser = parser_of(__doc__)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--stage", type=int, nargs="*", choices=(0, 1, 2, 3), default=[3])
    parser.add_argument("--family", nargs="*", default=[], help="of `MODELS`; by default all of `FAMILIES`")
    parser.add_argument("--engine", nargs="*", choices=ENGINES, default=["jzero", "strong"])
    parser.add_argument("--optimizer", nargs="*", choices=OPTIMIZERS, default=["adamw"])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("families.jsonl"))
    parser.add_argument("--table", type=pathlib.Path, nargs="+", help="print these files, compile nothing")
    options = parser.parse_args()
    if options.table:
        lines = {(path.stem, x["key"]): x for path in options.table for x in lines_of(path)}
        for (file, key), x in lines.items():
            topology, name, _, *rest = key.split("/")
            peer = lines.get((file, "/".join((topology, name, "strong", *rest))), {})
            x.update({f"strong_{figure}": peer.get(figure) for figure in ("peak", "seconds")})
        files = len(options.table) > 1
        rows = [(f"{key.replace('/', ', ')}{f' ({file})' * files}", x) for (file, key), x in sorted(lines.items())]
        print("\n".join(table(COLUMNS, rows)))
        return
    import jax

    from benchmarks.models import FAMILIES, MODELS

    if unknown := set(options.family) - set(MODELS):
        parser.error(f"no families {sorted(unknown)}: choose of {', '.join(MODELS)}")
    jax.config.update("jax_platforms", "cpu")
    names = options.family or list(FAMILIES)
    choices = itertools.product(names, options.engine, options.stage, options.optimizer)
    keys = ["/".join(map(str, (options.topology, *choice))) for choice in choices]
    complete(options.out, keys, lambda key: figures(key, options.out))


if __name__ == "__main__":
    main()
