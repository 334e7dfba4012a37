"""Time per step against GSPMD and replicated `jax.jit`, measured in turns in one run: `python -m benchmarks.cpu_steps`.

On virtual CPU devices the same cores do everything, so the figures compare programs, not networks. Peak memory is that
of the compiled program on one device. `--stages 2 3 --repeats 15`.
"""

from __future__ import annotations

import argparse
import statistics

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from benchmarks.engines import make_engine
from benchmarks.gpt import AXIS, GPT, Size
from benchmarks.turns import Training, in_turns, ratio

MIB = 2**20


def main() -> None:
    """Trains with each engine in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--unrolled", action="store_true")
    parser.add_argument("--no-remat", action="store_true", help="the model keeps its activations")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    mesh = jzero.make_mesh()
    model = GPT(Size(384, 6, vocab=4096), scan=not options.unrolled, remat=not options.no_remat)
    tokens = np.random.default_rng(0).integers(0, 4096, (2 * mesh.size, 129)).astype(np.int32)
    batch = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(AXIS)))
    programs = [("replicated", 0), *((name, stage) for stage in options.stages for name in ("gspmd", "jzero"))]
    programs += [("map_variables", 3)] if 3 in options.stages else []
    programs += [("jzero as written", 3)] if 3 in options.stages and options.no_remat else []
    runs, reports = {}, {}
    for name, stage in programs:
        engine = make_engine(name, model, stage, mesh)
        reports[name, stage] = jzero.analyze(engine.step, engine.like, batch, mesh=mesh)
        runs[name, stage] = Training(engine.step, engine.make(jax.random.key(0)), batch)
        runs[name, stage]()
    times = in_turns(runs, options.repeats)
    print(f"{mesh.size} devices, jax {jax.__version__}, {model}, batch {tokens.shape}, median of {options.repeats}\n")
    print("| | ms per step | of GSPMD | peak, MiB | of GSPMD | sent, MiB |\n|---|---|---|---|---|---|")
    for (name, stage), report in reports.items():
        peer = ("gspmd", stage)
        median, peak = statistics.median(times[name, stage]), report.memory.peak
        ratios = ("", "")
        if peer in reports:
            ratios = f"{ratio(times[name, stage], times[peer]):.2f}", f"{peak / reports[peer].memory.peak:.2f}"
        sent = sum(row.sent_bytes for row in report.collectives)
        label = name if name == "replicated" else f"{name}, stage {stage}"
        print(f"| {label} | {1e3 * median:.0f} | {ratios[0]} | {peak / MIB:.1f} | {ratios[1]} | {sent / MIB:.1f} |")


if __name__ == "__main__":
    main()
