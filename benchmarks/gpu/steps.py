"""Parts `steps/MODEL/DEVICES` of the GPU pack: one model by jzero, by plain jit and by hand, compiled and trained.

First all programs are compiled: peak memory, modelled step, estimated memory and departures from the plan. Then each is
run alone, those of low peaks first, since an allocator tells only the highest peak of a process. Then jzero takes turns
with its rivals, stage by stage, from the same parameters on the same batch.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import jzero
from benchmarks.engines import Engine
from benchmarks.families import batch_of, engine_of
from benchmarks.family_models import Family
from benchmarks.gpt import AXIS
from benchmarks.gpu.job import Job, figures_of
from benchmarks.gpu.machine import memory_limit, model
from benchmarks.gpu.rates import measured_machine
from benchmarks.turns import Training, in_turns, ratio
from jzero.analysis.hlo import parse_hlo
from jzero.analysis.schedule import simulate

COMPILING = 0.6  # of the time of a part; what would not be compiled by then is skipped
VALUES = 1000  # tokens and labels are below: all models know so many

# The most telling first. One device has nothing to partition.
ON_ONE = [("strong", 3), ("jzero", 3), ("plain", 0), ("jzero", 0)]
ON_MANY = [*ON_ONE, ("strong", 1), ("jzero", 1), ("keeping", 3), ("strong", 2), ("jzero", 2)]


class Program(NamedTuple):
    """A compiled program."""

    name: str
    stage: int
    engine: Engine
    arguments: int
    peak: int


def run(job: Job) -> None:
    """Compiles and trains."""
    _, name, count = job.part.split("/")
    family = model(name)
    mesh = jzero.make_mesh(devices=jax.devices()[: int(count)], **{AXIS: -1})
    programs = compiled(job, family, mesh)
    batch = batch_on(family, mesh)
    if memory_limit() is not None:
        programs = [x for x in sorted(programs, key=lambda x: x.peak) if runs_alone(job, x, mesh, batch)]
    timed(job, programs, batch, pipelined=mesh.devices.flat[0].platform != "cpu")


def compiled(job: Job, family: Family, mesh: Mesh) -> list[Program]:
    """Compiles what there is time for; returns what fits the devices."""
    limit, found = memory_limit() or math.inf, []
    rates = measured_machine(figures_of(job.lines).get("rates", {}), mesh.size)
    wanted = ON_ONE if job.small or mesh.size == 1 else ON_MANY
    longest = 0.0
    for engine, stage in wanted:
        name, left = f"{engine} {stage}", job.left
        if left - longest < (1 - COMPILING) * job.seconds:
            job.tell(name, skipped=f"no time was left to compile it; `--only {job.part}` would leave more")
            continue
        with job.recorded(name):
            built = engine_of(engine, family, stage, mesh)
            held = sum(
                math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(built.like)
            )
            if held > limit:
                job.tell(name, skipped=f"its state alone takes {held / 2**30:.1f} GiB of {limit / 2**30:.1f}")
                continue
            memory = tell_of_program(job, name, built, batch_of(family, mesh), mesh, rates)
            if memory.peak > limit:
                job.tell(name, skipped=f"it needs {memory.peak / 2**30:.1f} GiB of {limit / 2**30:.1f}")
                continue
            found.append(Program(engine, stage, built, memory.arguments, memory.peak))
        longest = max(longest, left - job.left)
    return found


def tell_of_program(job: Job, name: str, engine: Engine, batch: Any, mesh: Mesh, rates: Any) -> Any:
    """Tells what the compiled program and the models say; returns its memory."""
    started = time.monotonic()
    report = jzero.analyze(engine.step, engine.like, batch, mesh=mesh)
    job.tell(
        name,
        compile_seconds=time.monotonic() - started,
        peak=report.memory.peak,
        sent=sum(x.sent_bytes for x in report.collectives),
        reckoned=report.reckoned and report.reckoned.peak,
        flops=report.reckoned and report.reckoned.flops,
        modelled=report.timeline and report.timeline.seconds,
        exposed=report.exposed_communication,
        violations=None if report.plan is None else list(report.violations),
        notes=list(report.notes),
    )
    if rates is not None:  # the same program, from the cache of compilations
        program = parse_hlo(engine.step.lower(engine.like, batch).compile().as_text())
        timeline, _ = simulate(program, rates)
        job.tell(name, modelled_at_rates=timeline.seconds, exposed_at_rates=timeline.exposed_share)
    return report.memory


def batch_on(family: Family, mesh: Mesh) -> Any:
    """Returns a random batch, cut by rows."""
    rng = np.random.default_rng(0)

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        whole = np.issubdtype(x.dtype, np.integer)
        values = rng.integers(0, VALUES, x.shape) if whole else rng.standard_normal(x.shape, np.float32)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(draw, batch_of(family, mesh))


def started(program: Program, batch: Any, steps: int = 1) -> Training:
    """Returns its training from the start."""
    return Training(program.engine.step, program.engine.make(jax.random.key(0)), batch, steps)


def runs_alone(job: Job, program: Program, mesh: Mesh, batch: Any) -> bool:
    """Runs two steps and tells the allocator's peak, if it is the highest so far; returns whether they ran."""
    peak = lambda: max(x.memory_stats()["peak_bytes_in_use"] for x in mesh.devices.flat)
    name = f"{program.name} {program.stage}"
    gc.collect()
    with job.recorded(name):
        training = started(program, batch)
        before = peak()
        training()
        training()
        job.tell(name, allocated=peak(), allocated_at_most=peak() == before)
        return True
    return False


def timed(job: Job, programs: list[Program], batch: Any, *, pipelined: bool) -> None:
    """Trains jzero and its rivals in turns, stage by stage."""
    rivals = lambda stage: [x for x in programs if x.stage == stage or x.name == "plain"]
    groups = [group for stage in (3, 0, 1, 2) if len(group := rivals(stage)) > 1]
    limit, steps = memory_limit() or math.inf, 5 if pipelined else 1
    for i, group in enumerate(groups):
        seconds = 0.9 * job.left / (len(groups) - i)
        needed = sum(x.arguments for x in group) + max(x.peak - x.arguments for x in group)
        together = needed < 0.95 * limit
        times = measured(job, [group], batch, seconds, steps) if together else {}
        if not times:  # too large side by side: one after the other
            together, times = False, measured(job, [[x] for x in group], batch, seconds, steps)
        for x in group:
            if x.name == "plain" and i:
                continue  # told already; here it is but what the others are compared with
            tell_times(job, f"{x.name} {x.stage}", times, f"strong {x.stage}", together=together)


def measured(job: Job, groups: list[list[Program]], batch: Any, seconds: float, steps: int) -> dict[str, list[float]]:
    """Returns the seconds per step of the programs of some groups, each of which takes turns."""
    times: dict[str, list[float]] = {}
    for group in groups:
        gc.collect()
        with job.recorded(" and ".join(f"{x.name} {x.stage}" for x in group)):
            times |= times_of(job, group, batch, seconds / len(groups), steps)
    return times


def times_of(job: Job, group: list[Program], batch: Any, seconds: float, steps: int) -> dict[str, list[float]]:
    """Returns seconds per step of programs that take turns for some seconds, of some steps in a row each."""
    began = time.monotonic()
    runs = {f"{x.name} {x.stage}": started(x, batch, steps) for x in group}
    in_turns(runs, 2)
    for name, training in runs.items():  # of all programs after equally many steps
        job.tell(name, loss=float(training.metrics["loss"]), steps=training.count)
    turn = sum(map(sum, in_turns(runs, 1).values()))
    repeats = int((seconds - (time.monotonic() - began)) / turn)
    times = in_turns(runs, 3 if job.small else min(max(repeats, 3), 40))
    return {name: [x / steps for x in found] for name, found in times.items()}


def tell_times(job: Job, name: str, times: dict[str, list[float]], peer: str, *, together: bool) -> None:
    """Tells the times of a program, and their ratios to those of its rivals."""
    if name not in times:
        return
    compared = ratio if together else lambda a, b: statistics.median(a) / statistics.median(b)
    ratios = {key: compared(times[name], times[x]) for key, x in {"of_plain": "plain 0", "of_strong": peer}.items()
              if x in times and x != name}  # fmt: skip
    low, *_, high = statistics.quantiles(times[name], n=10)
    job.tell(name, step=statistics.median(times[name]), low=low, high=high, turns=len(times[name]), **ratios)
    if not together:
        job.tell(name, alone=True)
