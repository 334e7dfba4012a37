"""The first part of the GPU pack: what machine this is, whether it computes rightly, and which parts suit it."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable

import jax

from benchmarks.family_models import Family, gpt
from benchmarks.gpu.job import Job
from benchmarks.models import FAMILIES
from jzero.cli.doctor import examine

SMALL = {
    "gpt_small": functools.partial(gpt, layers=2, scanned=True, seq_len=32, vocab=1024, width=64),
    "gpt_moderate": functools.partial(gpt, layers=4, scanned=True, seq_len=64, vocab=4096, width=256),
    "gpt_moderate_unrolled": functools.partial(gpt, layers=4, scanned=False, seq_len=64, vocab=4096, width=256),
}
MODELS = {  # the most telling first
    "small": ("gpt_small",),
    "moderate": ("gpt_moderate", "gpt_moderate_unrolled"),
    "large": ("llama_125m", "llama_1b", "llama_8b", "gpt_scanned"),
}
STATE_BYTES = (
    16  # of a parameter: with Adam in bf16, 12 for masters and moments, and 4 for the parameter and its gradient
)
SETTINGS = ("XLA_", "JAX_", "NCCL_", "CUDA_VISIBLE_DEVICES", "TF_GPU_ALLOCATOR")
QUERY = "index,name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit"


def model(name: str) -> Family:
    """Returns a model by its name."""
    models = {**FAMILIES, **SMALL}
    if name not in models:
        raise ValueError(f"There is no model {name!r}: choose of {', '.join(models)}.")
    return models[name]()


def scale(job: Job) -> str:
    """Returns how large everything is: `small` to try it out, `moderate` for CPUs, `large` for accelerators."""
    return "small" if job.small else "moderate" if jax.default_backend() == "cpu" else "large"


def memory_limit() -> int | None:
    """Returns the bytes of a device that jax may use; `None` if the platform does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def host_bytes() -> int:
    """Returns the bytes of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def output_of(*command: str) -> str:
    """Returns what a command prints, or why there is nothing."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return re.sub(r"\x1b\[[0-9;]*m", "", printed).strip()  # without colours
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {type(error).__name__}"


def run(job: Job) -> None:
    """Tells of the machine, chooses parts, and runs the checks of `jzero doctor`."""
    device = jax.devices()[0]
    job.tell(
        "facts",
        platform=device.platform,
        kind=device.device_kind,
        count=jax.device_count(),
        memory_limit=memory_limit(),
        runtime=device.client.platform_version,
        python=platform.python_version(),
        system=platform.platform(),
        cpus=os.cpu_count(),
        host_bytes=host_bytes(),
        settings={name: x for name, x in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    )
    if device.platform == "gpu":
        job.tell(
            "facts",
            gpus=output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"),
            links=output_of("nvidia-smi", "topo", "-m"),
        )
    job.tell("parts", names=list(parts(job)))
    report = examine()
    job.tell("facts", versions=report.versions)
    for check in report.checks:
        job.tell(f"check: {check.name}", **dataclasses.asdict(check))


def parts(job: Job) -> Iterable[str]:
    """Yields the other parts, the most telling first, and tells which models do not suit the devices."""
    count, limit = jax.device_count(), memory_limit() or math.inf
    yield "rates"
    names = job.models or MODELS[scale(job)]
    suited = []
    for name in names:
        shapes = jax.tree.leaves(model(name).shapes, is_leaf=lambda x: isinstance(x, tuple))
        state = STATE_BYTES * sum(map(math.prod, shapes)) / count
        if 2 * state < 0.7 * limit:  # jzero and its rival side by side, and their activations
            suited.append(name)
        else:
            job.tell(
                name, skipped=f"two states take {2 * state / 2**30:.0f} GiB of {limit / 2**30:.0f}, even at stage 3"
            )
    yield from (f"steps/{name}/{count}/3" for name in suited[:2])
    yield "offload"
    if job.small:
        return
    if count > 1:
        yield from (f"steps/{name}/1/3" for name in suited[:1])
    yield from (f"steps/{name}/{count}/3" for name in suited[2:])
    yield from (f"steps/{name}/{count}/{stage}" for name in suited[:2] for stage in ((1, 2, 0) if count > 1 else (0,)))
