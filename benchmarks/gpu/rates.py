"""Part `rates` of the GPU pack: what these devices reach, all at once, beside the vendor's peaks.

With them a modelled step that is off can be told apart: the machine may be slower than its data sheet, or the model
wrong.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jzero
from benchmarks.engines import AXIS
from benchmarks.gpu.job import Job
from benchmarks.gpu.machine import scale
from benchmarks.tables import Figures
from benchmarks.turns import in_turns
from jzero.machines.limits import this_machine
from jzero.machines.machine import Machine

PRODUCTS = {"bf16": (jnp.bfloat16, "default"), "tf32": (jnp.float32, "default"), "f32": (jnp.float32, "highest")}
SIZES = {"small": (128, 2**14), "moderate": (512, 2**20), "large": (8192, 2**28)}  # of a product; of an array
CHAIN = 8  # runs of an operation in one program, so that its start does not count


def run(job: Job) -> None:
    """Measures products, memory and links."""
    mesh = jzero.make_mesh(**{AXIS: -1})
    vendor = this_machine(jax.devices())
    peaks: dict[str, float] = {}
    if vendor is not None:
        peaks = {**vendor.flops, "memory": vendor.hbm_bytes_per_s}
        peaks |= dict.fromkeys(("all-gather", "reduce-scatter"), vendor.intra_link_bytes_per_s)

    def tell(name: str, amount: float, program: Callable[..., Any], x: jax.Array) -> None:
        call = lambda: jax.block_until_ready(program(x))
        call()
        seconds = statistics.median(in_turns({"": call}, 3 if job.small else 7)[""])
        job.tell(name, per_second=amount / seconds, vendor=peaks.get(name))

    width, count = SIZES[scale(job)]
    for name, (dtype, precision) in PRODUCTS.items():
        with job.recorded(name):
            x = drawn((mesh.size, width, width), dtype, mesh)
            tell(
                name,
                CHAIN * 2 * width**3,
                chained(lambda y, x, how=precision: lax.batch_matmul(y, x, precision=how)),
                x,
            )
    with job.recorded("memory"):
        tell("memory", CHAIN * 8 * count, chained(lambda y, _: y + 1), drawn((mesh.size, count), jnp.float32, mesh))
    if mesh.size == 1:
        return
    part = count // mesh.size
    cut, replicated = PartitionSpec(AXIS), PartitionSpec()
    placed = lambda f, out: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=cut, out_specs=out, check_vma=False))
    gather, scatter = (lambda x: lax.all_gather(x, AXIS, tiled=True)), (lambda x: lax.psum_scatter(x, AXIS, tiled=True))
    for name, program, size in (
        ("all-gather", placed(gather, replicated), part * mesh.size),
        ("reduce-scatter", placed(scatter, cut), part * mesh.size**2),
    ):
        with job.recorded(name):
            tell(name, 4 * (mesh.size - 1) * part, program, drawn((size,), jnp.float32, mesh))


def drawn(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.Array:
    """Returns random numbers, small enough for a chain of products; on zeros devices are faster than they are."""
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    draw = lambda key: (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(dtype)
    return jax.jit(draw, out_shardings=rows)(jax.random.key(0))


def chained(f: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that replaces `y` by `f(y, x)` some times, from `x`."""
    return jax.jit(lambda x: lax.fori_loop(0, CHAIN, lambda _, y: f(y, x), x))


def measured_machine(rates: dict[str, Figures], count: int) -> Machine | None:
    """Returns the machine that has the measured rates; `None` if they are not there."""
    per_second = {name: x["per_second"] for name, x in rates.items() if "per_second" in x}
    if "bf16" not in per_second or "memory" not in per_second:
        return None
    links = [per_second[name] for name in ("all-gather", "reduce-scatter") if name in per_second]
    return Machine(
        name="at measured rates",
        kind="gpu",
        num_devices=count,
        devices_per_node=count,
        devices_per_host=count,
        hbm_bytes=0,
        hbm_bytes_per_s=per_second["memory"],
        flops={name: per_second[name] for name in PRODUCTS if name in per_second},
        num_links=1,
        intra_link_bytes_per_s=statistics.harmonic_mean(links) if links else math.inf,
        inter_link_bytes_per_s=None,
    )
