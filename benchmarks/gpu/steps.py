"""Parts `steps/MODEL/DEVICES/STAGE` of the GPU pack: a model by jzero, by hand and by plain jit, compiled and trained.

First all programs are compiled: peak memory, modelled step, estimated memory and departures from the plan. Then each is
run alone, those of low peaks first, since an allocator tells only the highest peak of a process. Then all take turns,
from the same parameters on the same batch.
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
from benchmarks.engines import AXIS, Engine, batch_of, engine_of
from benchmarks.family_models import Family
from benchmarks.gpu.job import Job, figures_of
from benchmarks.gpu.machine import memory_limit, model
from benchmarks.gpu.rates import measured_machine
from benchmarks.turns import Training, in_turns, ratio
from jzero.analysis.hlo import parse_hlo
from jzero.analysis.schedule import simulate

COMPILING = 0.6  # of the time of a part; of more than two programs, those that would take longer are skipped
VALUES = 1000  # tokens and labels are below: all models know so many

# The most telling first.
PROGRAMS = {
    0: [("plain", 0), ("jzero", 0)],
    1: [("strong", 1), ("jzero", 1)],
    2: [("strong", 2), ("jzero", 2)],
    3: [("strong", 3), ("jzero", 3), ("plain", 0), ("keeping", 3)],
}


class Program(NamedTuple):
    """A compiled program."""

    name: str
    stage: int
    engine: Engine
    arguments: int
    peak: int


def run(job: Job) -> None:
    """Compiles and trains."""
    _, name, count, stage = job.part.split("/")
    family = model(name)
    mesh = jzero.make_mesh(devices=jax.devices()[: int(count)], **{AXIS: -1})
    selected = [x for x in PROGRAMS[int(stage)] if x[0] != "keeping" or not (job.small or mesh.size == 1)]
    programs = compiled(job, selected, family, mesh)
    batch = batch_on(family, mesh)
    if memory_limit() is not None:
        programs = [x for x in sorted(programs, key=lambda x: x.peak) if runs_alone(job, x, mesh, batch)]
    # On CPUs several programs in flight can wait for each other for ever.
    timed(job, programs, batch, steps=1 if jax.default_backend() == "cpu" else 5)


def compiled(job: Job, selected: list[tuple[str, int]], family: Family, mesh: Mesh) -> list[Program]:
    """Compiles what there is time for; returns what fits the devices."""
    limit, programs = memory_limit() or math.inf, []
    rates = measured_machine(figures_of(job.lines).get("rates", {}), mesh.size)
    longest = 0.0
    for engine, stage in selected:
        name, remaining = f"{engine} {stage}", job.remaining
        if len(programs) >= 2 and remaining - longest < (1 - COMPILING) * job.seconds:
            job.tell(name, skipped="no time was left to compile it (`--only` leaves more to a part)")
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
            programs.append(Program(engine, stage, built, memory.arguments, memory.peak))
        longest = max(longest, remaining - job.remaining)
    return programs


def tell_of_program(job: Job, name: str, engine: Engine, batch: Any, mesh: Mesh, rates: Any) -> Any:
    """Tells what the compiled program and the models say; returns its memory."""
    started = time.monotonic()
    report = jzero.analyze(engine.step, engine.like, batch, mesh=mesh)
    job.tell(
        name,
        compile_seconds=time.monotonic() - started,
        peak=report.memory.peak,
        sent=sum(x.sent_bytes for x in report.collectives),
        reckoned=report.estimated and report.estimated.peak,
        reckoned_seconds=getattr(report.estimated, "seconds", None),
        flops=report.estimated and report.estimated.flops,
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
        is_integer = np.issubdtype(x.dtype, np.integer)
        values = rng.integers(0, VALUES, x.shape) if is_integer else rng.standard_normal(x.shape, np.float32)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(draw, batch_of(family, mesh))


def started(program: Program, batch: Any, steps: int = 1) -> Training:
    """Returns its training from the start."""
    return Training(program.engine.step, program.engine.make(jax.random.key(0)), batch, steps)


def peak_in_use(mesh: Mesh) -> int:
    """Returns the most bytes of a device that this process has ever used."""
    return max(x.memory_stats()["peak_bytes_in_use"] for x in mesh.devices.flat)


def runs_alone(job: Job, program: Program, mesh: Mesh, batch: Any) -> bool:
    """Runs two steps and tells the allocator's peak, if it is the highest so far; returns whether they ran."""
    name = f"{program.name} {program.stage}"
    gc.collect()
    with job.recorded(name):
        training = started(program, batch)
        before = peak_in_use(mesh)
        training()
        training()
        peak = peak_in_use(mesh)
        job.tell(name, allocated=peak, allocated_at_most=peak == before)
        return True
    return False


def timed(job: Job, programs: list[Program], batch: Any, *, steps: int) -> None:
    """Trains the programs in turns, of some steps in a row, if they fit side by side; else one after the other."""
    if not programs:
        return
    needed = sum(x.arguments for x in programs) + max(x.peak - x.arguments for x in programs)
    together = needed < 0.95 * (memory_limit() or math.inf)
    times = times_of(job, [programs], batch, steps) if together else {}
    if not times:
        together, times = False, times_of(job, [[x] for x in programs], batch, steps)
    for x in programs:
        tell_times(job, f"{x.name} {x.stage}", times, f"strong {x.stage}", together=together)


def times_of(job: Job, groups: list[list[Program]], batch: Any, steps: int) -> dict[str, list[float]]:
    """Returns the seconds per step of the programs of all groups; those of one group take turns."""
    times: dict[str, list[float]] = {}
    for i, group in enumerate(groups):
        gc.collect()
        with job.recorded(" and ".join(f"{x.name} {x.stage}" for x in group)):
            until = time.monotonic() + 0.9 * job.remaining / (len(groups) - i)
            runs = {f"{x.name} {x.stage}": started(x, batch, steps) for x in group}
            in_turns(runs, 2)
            for name, training in runs.items():  # of all programs after equally many steps
                job.tell(name, loss=float(training.metrics["loss"]), steps=training.count)
            seconds = in_turns(runs, 3 if job.small else 40, until=until)
            times |= {name: [x / steps for x in seconds[name]] for name in runs}
    return times


def tell_times(job: Job, name: str, times: dict[str, list[float]], peer: str, *, together: bool) -> None:
    """Tells the times of a program, and their ratios to those of its rivals."""
    if name not in times:
        return
    compared = ratio if together else lambda a, b: statistics.median(a) / statistics.median(b)
    ratios = {key: compared(times[name], times[x]) for key, x in {"of_plain": "plain 0", "of_strong": peer}.items()
              if x in times and x != name}  # fmt: skip
    count = len(times[name])
    low, *_, high = statistics.quantiles(times[name], n=10) if count >= 10 else sorted([*times[name]] * 2)
    job.tell(name, step=statistics.median(times[name]), low=low, high=high, turns=count, **ratios)
    if not together:
        job.tell(name, alone=True)
