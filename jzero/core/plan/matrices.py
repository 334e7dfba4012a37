"""Divides the matrix work of an update into units, the work of one matrix each, and groups equal ones.

    find_matrices(plan, jaxpr, owners) -> Matrices

Each region of the update's jaxpr (`jzero.core.jaxpr.regions`) becomes a `Work`: the program of a unit and, for each
operand and result, how it gets to the device that computes the unit and back:

    a stack [22, 2048, 5632] cut on its second dimension  ->  22 units [1, 2048, 5632]

See [Note: Matrices on one device each] in `jzero.core.update.owned`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import PartitionSpec

from jzero.core.base import compat
from jzero.core.base.types import DType
from jzero.core.jaxpr.batches import NotSlicedError, slice_program
from jzero.core.jaxpr.regions import Region, find_regions
from jzero.core.jaxpr.sizes import cost_of, factorizes
from jzero.core.jaxpr.structure import Structures
from jzero.core.layout.cut import Cut
from jzero.core.layout.leaves import StateLeaf
from jzero.core.layout.mesh import mesh_platform
from jzero.core.plan.assignment import Assignment, WholeMatrix, assign
from jzero.core.plan.choice import choose_cut
from jzero.core.plan.plan import ZeroPlan


@dataclasses.dataclass(frozen=True)
class Port:
    """How an operand or a result travels between the devices that hold its shards and those that compute its units.

    Attributes:
      leaf: The layout of the whole array outside the exchange.
      dims: Its dimensions that number the units.
      cut: Where the array is cut while it travels.
      unit: How one unit, whose size is 1 in `dims`, is cut then; `None` if each unit lies where it is computed.
    """

    leaf: StateLeaf
    dims: tuple[int, ...]
    cut: Cut
    unit: Cut | None
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one unit."""
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.leaf.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """The units of one parameter.

    Attributes:
      region: What they replace.
      jaxpr: The jaxpr of one unit: from operands, shared values and the unit's numbers to results.
      sizes: The number of slices along each sliced dimension.
      inputs: How the operands travel.
      outputs: How the results travel.
      cost: Floating-point operations of one unit.
      kind: Units of equal kind are computed by one program.
    """

    region: Region
    jaxpr: ClosedJaxpr
    sizes: tuple[int, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    cost: float
    kind: Hashable

    @property
    def count(self) -> int:
        """The number of units."""
        return math.prod(self.sizes)

    @property
    def stays(self) -> bool:
        """Whether some of its state lies where it is computed."""
        return any(port.unit is None for port in (*self.inputs, *self.outputs))

    def numbers(self) -> np.ndarray:
        """Returns the numbers of each unit, [count, len(sizes)]."""
        return np.indices(self.sizes, np.int32).reshape(len(self.sizes), self.count).T


class Matrices(NamedTuple):
    """The matrix work of an update: matrices that one device computes, and those that all do, with the reason."""

    works: list[Work]
    notes: list[WholeMatrix]


def find_matrices(plan: ZeroPlan, jaxpr: Jaxpr, owners: Sequence[int | None]) -> Matrices:
    """Finds the matrix work of a flat, open jaxpr.

    Args:
      plan: The plan.
      jaxpr: An update, with whatever surrounds it.
      owners: For each input, the index of the parameter that it belongs to.
    """
    layouts: list[dict[tuple[int, ...], StateLeaf]] = [
        {x.param.shape: x.grad} if x.trained else {} for x in plan.leaves
    ]
    for inner in plan.inner_leaves:
        if inner.owner is not None and plan.leaves[inner.owner].trained:
            layouts[inner.owner].setdefault(inner.shape, inner)
    owner_of_var = {v: frozenset(() if i is None else (i,)) for v, i in zip(jaxpr.invars, owners, strict=True)}
    regions, refused = find_regions(jaxpr, owner_of_var, lambda v, owner: compat.type_of(v).shape in layouts[owner])
    notes: dict[WholeMatrix, None] = {}
    for i, (of, why) in refused.items():
        shape = max((tuple(compat.type_of(v).shape) for v in jaxpr.eqns[i].invars), key=math.prod)
        notes[WholeMatrix(tuple(plan.leaves[k].path for k in sorted(of)), shape, why)] = None
    works, number = [], Structures()
    for region in regions:
        try:
            works.append(_work(plan, region, layouts[region.owner], number))
        except _WholeError as why:
            leaf = plan.leaves[region.owner]
            notes[WholeMatrix((leaf.path,), leaf.param.shape, str(why))] = None
    return Matrices(works, list(notes))


class _WholeError(Exception):
    """Every device must do the matrix work of a parameter."""


class _Units(NamedTuple):
    """The program of one unit, and for each operand and result the dimensions that number the units."""

    program: Any  # a closed jaxpr, or the piece of a region
    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


def _work(plan: ZeroPlan, region: Region, layouts: Mapping[tuple[int, ...], StateLeaf], number: Structures) -> Work:
    if any(leaf.base != PartitionSpec() for leaf in layouts.values()):
        raise _WholeError("other mesh axes shard it")
    units = _units_of(region, plan.leaves[region.owner].scan_dim)
    if mesh_platform(plan.mesh) == "cpu" and factorizes(units.program, stacks=True):
        # jaxlib's kernels for several matrices wait for threads of the pool that collectives of other devices hold.
        raise _WholeError("CPUs cannot factorize several matrices at once beside collectives")

    def port(v: Var, dims: tuple[int, ...]) -> Port:
        shape, dtype = tuple(compat.type_of(v).shape), jnp.dtype(compat.type_of(v).dtype)
        leaf = layouts.get(shape) or plan.whole_leaf("", shape or (1,), dtype)
        return Port(leaf, dims, *_exchange(leaf, dims, plan.num_shards), dtype)

    inputs = tuple(map(port, region.inputs, units.inputs))
    outputs = tuple(map(port, region.outputs, units.outputs))
    stays = any(x.unit is None for x in (*inputs, *outputs))
    ports = tuple((x.unit, x.dtype) for x in (*inputs, *outputs))
    # A stack whose state stays is computed by itself: each device has the units that it has state of.
    kind = (number(units.program), ports, region.owner if stays else None)
    return Work(region, units.program, units.sizes, inputs, outputs, cost_of(units.program), kind)


def _units_of(region: Region, scan_dim: int | None) -> _Units:
    """Slices a region along as many dimensions as possible, that of a scan first."""
    units = _Units(region.jaxpr, (), ((),) * len(region.inputs), ((),) * len(region.outputs))
    while (more := _sliced(units, scan_dim)) is not None:
        units = more
    return units


def _sliced(units: _Units, scan_dim: int | None) -> _Units | None:
    """Returns units of one slice each, along one more dimension; `None` if there is no such dimension."""
    invars = compat.open_jaxpr(units.program)[0].invars
    shapes = [tuple(compat.type_of(v).shape) for v in invars[: len(units.inputs)]]
    largest = max(shapes, key=lambda s: (len(s), math.prod(s)))
    if sum(n > 1 for n in largest) < 3:  # one matrix
        return None
    able = [d for d, n in enumerate(largest) if n > 1 and all(len(s) > d and s[d] == n for s in shapes)]
    for d in sorted(able, key=lambda d: d != scan_dim):
        dims = [d] * len(shapes) + [None] * (len(invars) - len(shapes))
        try:
            program, outs = slice_program(units.program, dims, largest[d])
        except NotSlicedError:
            continue
        sliced = [out for out in outs if out is not None]
        if len(sliced) == len(outs):
            inputs = tuple((*x, d) for x in units.inputs)
            outputs = tuple((*x, out) for x, out in zip(units.outputs, sliced, strict=True))
            return _Units(program, (*units.sizes, largest[d]), inputs, outputs)
    return None


def _exchange(leaf: StateLeaf, dims: tuple[int, ...], num_shards: int) -> tuple[Cut, Cut | None]:
    """Returns how an array is cut while it travels, and how a unit is then; `None` if the units need not travel."""
    cut = leaf.cut
    if cut is not None and dims and cut.cuts(dims[0]) and cut.is_stored_naturally:
        return cut, None
    if cut is None or any(map(cut.cuts, dims)):
        cut, _ = choose_cut(leaf.shape, num_shards, scan_dim=None, taken_dims=frozenset(dims))
    start = max(dims, default=-1) + 1
    if cut is None or any(map(cut.cuts, dims)):
        if start == len(leaf.shape):
            raise _WholeError(f"a value of shape {leaf.shape} cannot be cut beside its stack")
        cut = Cut(start, leaf.shape, num_shards, flat=True)
    cut = Cut(cut.dim, leaf.shape, num_shards, cut.flat)
    return cut, dataclasses.replace(cut, shape=tuple(1 if d in dims else n for d, n in enumerate(leaf.shape)))


def schedule_of(works: Sequence[Work], num_shards: int) -> tuple[list[list[Work]], Assignment]:
    """Returns works of one level in groups of equal kind, and who computes which of their units."""
    kinds: dict[Hashable, list[Work]] = {}
    for work in works:
        kinds.setdefault(work.kind, []).append(work)
    groups = list(kinds.values())
    counts, costs = [sum(w.count for w in group) for group in groups], [group[0].cost for group in groups]
    return groups, assign(counts, costs, num_shards, in_rounds=[group[0].stays for group in groups])
