"""Differences between the compilers for CPUs, GPUs and TPUs that matter to jzero's programs: one row for each.

The facts come from compiled programs and from `benchmarks/`; the notes that the attributes cite give figures.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from jzero.core.layout.mesh import AnyMesh, mesh_platform

Wait: TypeAlias = Literal["barrier", "light", "select"]
"""How a value waits for others, see [Note: Barriers and selects]."""


class PlatformFacts(NamedTuple):
    """Facts about a platform's compiler.

    Attributes:
      second_gather: How a second gather of a shard waits for the operands of its use, lest the compiler merge it with
        the first.
      postpones: Whether it postpones the products that make gradients of weights, and keeps their operands, so that
        the backward pass must wait for them; see [Note: Waiting for gradients].
      prefetches: Whether loops gather one iteration ahead by default; see [Note: Gathering one turn ahead].
      pipelines_reductions: Whether loops over several nodes finish reductions beside the next products.
      copies_results: Whether gathered arrays stay beside those that they replace until the end, unless these are
        operands; see [Note: Gathering new parameters].
      transposes_gathers: Whether a gather along another dimension than the first makes it transpose what computes the
        shards, see `jzero.core.arrays.collectives.gather_leaf`.
      is_tiled: Whether it lays out arrays in tiles.
      least_features: Least features of a shard of a table that is cut along them: shards of fewer are read in pieces of
        a few bytes, and in tiles of TPUs each row takes 128.
      fuses_products: Whether it computes what is elementwise in the products that read and make it, so that keeping all
        that differentiation saves costs no writes; see [Note: Kept blocks].
      sums_bf16: Whether it can sum bf16 over some of several mesh axes; otherwise the process crashes.
    """

    second_gather: Wait = "barrier"
    postpones: bool = False
    prefetches: bool = False
    pipelines_reductions: bool = False
    copies_results: bool = False
    transposes_gathers: bool = False
    is_tiled: bool = False
    least_features: int = 8
    fuses_products: bool = False
    sums_bf16: bool = True


PLATFORMS = {
    "cpu": PlatformFacts(second_gather="select", sums_bf16=False),
    "gpu": PlatformFacts(postpones=True, prefetches=True, pipelines_reductions=True, transposes_gathers=True),
    "tpu": PlatformFacts(
        second_gather="light", copies_results=True, is_tiled=True, least_features=128, fuses_products=True
    ),
    None: PlatformFacts(transposes_gathers=True, is_tiled=True),  # an abstract mesh: safe on every platform
}


def platform_facts(mesh: AnyMesh) -> PlatformFacts:
    """Returns the row of a mesh's devices; the defaults for platforms that are not in the table."""
    return PLATFORMS.get(mesh_platform(mesh), PlatformFacts())
