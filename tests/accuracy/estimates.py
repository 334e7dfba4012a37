"""Estimated beside compiled peaks of many models' steps: `python -m tests.accuracy.estimates --topology h200:8`.

The families, from which the rules of the estimate were made, and the models of `unseen_models`, from which none was.
Each line of the result file is one model at one stage: the peak that `jzero.estimate_step_memory` reckons from the
trace, the peak of the compiled program, their ratio, and what is reckoned to be at the peak. Lines that are there
already are not compiled again. `--again FILE` compiles nothing: it estimates anew what FILE compiled, such as after a
change of the estimate. `--table before.jsonl after.jsonl` prints such files side by side.
"""

from __future__ import annotations

import itertools
import pathlib
import time
from typing import Any

import jax

import jzero
from benchmarks.common import MIB, complete, lines_of, parser_of
from benchmarks.engines import AXIS, batch_of, engine_of
from benchmarks.models import FAMILIES
from jzero.machines.topologies import topology_devices
from tests.accuracy.unseen_models import UNSEEN

MODELS = {**FAMILIES, **UNSEEN}
STAGES = (3, 0, 1, 2)
TOO_LARGE = {"llama_8b": (0, 1, 2)}
"""Stages at which a family does not fit any device, or takes very long to compile."""
WITHIN = 0.1


def line_of(key: str, peak: int | None = None) -> dict[str, Any]:
    """Returns the figures of one family at one stage; compiles it unless its peak is given."""
    topology, name, stage = key.split("/")
    family = MODELS[name]()
    mesh = jzero.make_mesh(devices=topology_devices(topology), **{AXIS: -1})
    step, _, like = engine_of("cheap", family, int(stage), mesh)
    batch, where = batch_of(family, mesh), {"topology": topology, "mesh": mesh}
    started = time.process_time()
    reckoned = jzero.estimate_step_memory(step, like, batch, **where)
    reckoned_in = time.process_time() - started
    if peak is None:
        peak = jzero.analyze(step, like, batch, **where).memory.peak
    return {
        "reckoned": reckoned.peak,
        "compiled": peak,
        "ratio": round(reckoned.peak / peak, 3),
        "at_peak": {"arguments": reckoned.arguments, **reckoned.at_peak},
        "reckoned_in_cpu_seconds": round(reckoned_in, 1),
        "cpu_seconds": round(time.process_time() - started, 1),
        "jax": jax.__version__,
    }


def table(files: dict[str, list[dict[str, Any]]]) -> str:
    """Returns Markdown: the compiled peak of each family and stage, and each file's estimate as a part of it."""
    by_file = {name: {tuple(x["key"].split("/")): x for x in lines} for name, lines in files.items()}
    keys = {key: None for lines in by_file.values() for key in lines}
    text = [f"| stage | family | compiled, MiB | {' | '.join(files)} |", "|---" * (3 + len(files)) + "|"]
    for _, name, stage in sorted(keys, key=lambda key: (key[0], key[2], list(MODELS).index(key[1]))):
        lines = [next((x for key, x in one.items() if key[1:] == (name, stage)), {}) for one in by_file.values()]
        compiled = next(x["compiled"] for x in lines if x)
        cells = [mark(x["ratio"]) if x else "" for x in lines]
        text.append(f"| {stage} | {name} | {compiled / MIB:.0f} | {' | '.join(cells)} |")
    return "\n".join(text)


def mark(ratio: float) -> str:
    """Returns a ratio, bold if it is further from 1 than an estimate should be."""
    return f"{ratio:.2f}" if abs(ratio - 1) <= WITHIN else f"**{ratio:.2f}**"


def main() -> None:
    """Compiles what is not in the result file yet, estimates a file's programs anew, or prints files."""
    parser = parser_of(__doc__)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--stage", type=int, nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--family", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("estimates.jsonl"))
    parser.add_argument("--again", type=pathlib.Path, help="estimate this file's programs anew, compile nothing")
    parser.add_argument("--table", type=pathlib.Path, nargs="+", help="print these files, compile nothing")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.table:
        print(table({path.stem: lines_of(path) for path in options.table}))
        return
    peaks = {x["key"]: x["compiled"] for x in lines_of(options.again)} if options.again else {}
    for stage, name in itertools.product(options.stage, options.family):
        key = f"{options.topology}/{name}/{stage}"
        if stage not in TOO_LARGE.get(name, ()) and (key in peaks or not options.again):
            complete(options.out, [key], lambda key: line_of(key, peaks.get(key)))


if __name__ == "__main__":
    main()
