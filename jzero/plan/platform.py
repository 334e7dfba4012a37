"""How the compilers for CPUs, GPUs and TPUs differ, as far as jzero's programs depend on it: one row for each.

The facts come from compiled programs and from `benchmarks/`; the notes that the attributes name give figures.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from jzero.plan.mesh import AnyMesh, mesh_platform

__all__ = ["PLATFORMS", "Fence", "PlatformFacts", "platform_facts"]

Fence: TypeAlias = Literal["whole", "light", "data"]


class PlatformFacts(NamedTuple):
    """What a platform's compiler does.

    Attributes:
      fence: What keeps it from merging two gathers of a shard: a barrier with the arrays that are used with it
        ("whole"), a barrier with one element of large ones, since barriers have their operands written to memory
        ("light"), or a select by one element, since it merges gathers across barriers ("data").
      postpones: Whether it puts off the products that make gradients of weights, and keeps what these are made of, so
        that the backward pass has to wait for them; see [Note: What waits for what].
      prefetches: Whether loops gather one turn ahead unless told otherwise; see [Note: Gathering one turn ahead].
      adds_updates: Whether it adds whole updates one by one, so that gathering new parameters takes more memory; see
        [Note: Parameters made anew].
      is_tiled: Whether it lays out arrays in tiles.
      sums_bf16: Whether it can sum bf16 over some of several mesh axes; the process ends otherwise.
    """

    fence: Fence = "whole"
    postpones: bool = False
    prefetches: bool = False
    adds_updates: bool = False
    is_tiled: bool = False
    sums_bf16: bool = True


PLATFORMS = {
    "cpu": PlatformFacts(fence="data", sums_bf16=False),
    "gpu": PlatformFacts(postpones=True, prefetches=True),
    "tpu": PlatformFacts(fence="light", adds_updates=True, is_tiled=True),
    None: PlatformFacts(is_tiled=True),  # of an abstract mesh: what is safe anywhere
}


def platform_facts(mesh: AnyMesh) -> PlatformFacts:
    """Returns the row of a mesh's devices; of platforms that are not in the table, defaults."""
    return PLATFORMS.get(mesh_platform(mesh), PlatformFacts())
