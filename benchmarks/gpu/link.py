"""Part `offload` of the GPU pack: what a step with its state on the host takes, beside a raw copy of the same bytes.

Each variant takes turns with the same training without offload. The bytes that a step moves are those that it moves at
least (`benchmarks.offload.least_traffic`); a raw copy is `jax.device_put` between `device` and `pinned_host`.
"""

from __future__ import annotations

import argparse
import math
import statistics

import jax
from jax.sharding import Mesh

import jzero
from benchmarks.gpu.job import Job
from benchmarks.gpu.machine import STATE_BYTES, host_bytes, memory_limit, scale
from benchmarks.offload import copy_rates, least_traffic, trained
from benchmarks.tables import MIB
from benchmarks.turns import ratio

VARIANTS = ("optimizer", "parameters, too", "in 64 MiB")
SMALL = {
    "small": {"width": 64, "layers": 2, "vocab": 1024, "seq_len": 32},
    "moderate": {"width": 256, "layers": 4, "vocab": 4096, "seq_len": 64},
}
LARGE = [  # the largest that fits is trained
    {"width": 2048, "layers": 24, "vocab": 50304, "seq_len": 1024},
    {"width": 1024, "layers": 24, "vocab": 50304, "seq_len": 1024},
    {"width": 768, "layers": 12, "vocab": 50304, "seq_len": 1024},
]
MOST_COPIED = 2**30  # bytes of a device


def size_for(limit: float, host: float, count: int) -> dict[str, int]:
    """Returns a GPT whose state without offload takes half of a device, and with it a quarter of the host's memory."""
    for size in LARGE:
        state = STATE_BYTES * (12 * size["layers"] * size["width"] ** 2 + 2 * size["vocab"] * size["width"])
        if state / count < limit / 2 and state < host / 4:
            break
    return size


def run(job: Job) -> None:
    """Trains with each variant."""
    mesh = jzero.make_mesh()
    size = SMALL.get(scale(job)) or size_for(memory_limit() or math.inf, host_bytes(), mesh.size)
    job.tell("model", **size, rows=2)
    rates: dict[str, float] = {}
    for name in VARIANTS[:2] if job.small else VARIANTS:
        if job.remaining < 0.25 * job.seconds:
            job.tell(name, skipped="no time was left for it")
            continue
        options = argparse.Namespace(**size, rows=2, stage=3, only=["none", name], large_chunk=64 * MIB, repeats=5)
        with job.recorded(name):
            moved = tell_of(job, name, options, mesh)
            rates = rates or copy_rates(min(max(moved), MOST_COPIED), mesh)
            job.tell("raw copy", **{direction: rate / mesh.size for direction, rate in rates.items()})
            there, back = (mesh.size * x for x in moved)
            job.tell(name, raw=there / rates["to devices"] + back / rates["from devices"])
        jax.clear_caches()


def tell_of(job: Job, name: str, options: argparse.Namespace, mesh: Mesh) -> tuple[int, int]:
    """Trains with one variant and without; returns the bytes moved to a device and back."""
    variants = trained(options, "bf16", mesh)
    times, others, plan = variants[name]["times"], variants["none"]["times"], variants[name]["plan"]
    there, back = least_traffic(plan)
    job.tell(
        name,
        step=statistics.median(times),
        none=statistics.median(others),
        of_none=ratio(times, others),
        host=plan.host_bytes_per_device.total,
        there=there,
        back=back,
    )
    training = variants[name]["run"]
    report = jzero.analyze(training.step, training.state, training.batch)
    reckoned = report.estimated and report.estimated.peak
    job.tell(name, peak=report.memory.peak, reckoned=reckoned, violations=list(report.violations))
    return there, back
