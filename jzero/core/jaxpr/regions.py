"""Finds the matrix work of an optimizer's update: per parameter, the equations that need it whole.

    find_regions(jaxpr, owners, is_anchor) -> tuple[list[Region], dict[int, tuple[Owners, str]]]

Each input of the flat jaxpr belongs to a parameter. A parameter whose update multiplies matrices has one `Region`, from
values of a known layout (gradients, moments, state) to such values:

    g:f32[512,64] -> reshape, transpose, dot_general, mul, dot_general, ... -> u:f32[512,64]

Values belong to the parameters that they are computed from, but not through single numbers such as a global norm. So
regions of different parameters share only numbers, and devices can compute them apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.jaxpr.interpret import Piece
from jzero.core.jaxpr.sizes import mixes

Owners: TypeAlias = frozenset[int]
IsAnchor: TypeAlias = Callable[[Var, int], bool]

LONGEST = 12
"""Most equations that move into a region for one number, such as a norm of its operands."""


class Region(NamedTuple):
    """The matrix work of one parameter.

    Attributes:
      owner: The parameter.
      level: How many regions precede it on the longest path.
      jaxpr: An open jaxpr: from `inputs` and `shared` to `outputs`.
      inputs: Variables of the update that belong to the parameter.
      shared: Variables that belong to no parameter: numbers, coefficients.
      outputs: Variables of the update.
      eqns: Numbers of the equations that it replaces.
    """

    owner: int
    level: int
    jaxpr: Piece[JaxprEqn]
    inputs: list[Var]
    shared: list[Var]
    outputs: list[Var]
    eqns: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A flat jaxpr, with the equations that make and read each variable, and the parameters that it belongs to.

    Attributes:
      reads: The variables that each equation reads, once each.
      producers: For each variable, the equation that makes it.
      readers_of: The equations that read it.
      owners: The parameters that it belongs to.
    """

    eqns: Sequence[JaxprEqn]
    outputs: frozenset[Var]
    reads: list[list[Var]] = dataclasses.field(default_factory=list)
    producers: dict[Var, int] = dataclasses.field(default_factory=dict)
    readers_of: dict[Var, list[int]] = dataclasses.field(default_factory=dict)
    owners: dict[Var, Owners] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, jaxpr: Jaxpr, owners: Mapping[Var, Owners]) -> _Graph:
        graph = cls(jaxpr.eqns, frozenset(v for v in jaxpr.outvars if not compat.is_literal(v)))
        graph.owners.update((v, params if _is_big(v) else frozenset()) for v, params in owners.items())
        for i, eqn in enumerate(jaxpr.eqns):
            graph.reads.append(list(dict.fromkeys(v for v in eqn.invars if not compat.is_literal(v))))
            for v in graph.reads[i]:
                graph.readers_of.setdefault(v, []).append(i)
            params = graph.owner(i)
            graph.owners.update((v, params if _is_big(v) else frozenset()) for v in eqn.outvars)
            graph.producers.update(dict.fromkeys(eqn.outvars, i))
        return graph

    def owner(self, i: int) -> Owners:
        """Returns the parameters among an equation's operands."""
        return frozenset().union(*(self.owners.get(v, frozenset()) for v in self.reads[i]))

    def readers(self, i: int) -> list[int]:
        """Returns the equations that read an equation's results."""
        return [r for v in self.eqns[i].outvars for r in self.readers_of.get(v, [])]

    def makers(self, i: int) -> list[int]:
        """Returns the equations that make an equation's operands."""
        return [self.producers[v] for v in self.reads[i] if v in self.producers]


class _NoRegionError(Exception):
    """The matrix work of a parameter cannot be separated from other work."""


def _is_big(v: Atom) -> bool:
    return math.prod(getattr(v.aval, "shape", ())) > 1


def flow_of(jaxpr: Jaxpr, owners: Mapping[Var, Owners]) -> dict[Var, Owners]:
    """Returns the parameters that each variable of a flat, open jaxpr belongs to."""
    return _Graph.of(jaxpr, owners).owners


def find_regions(
    jaxpr: Jaxpr, owners: Mapping[Var, Owners], is_anchor: IsAnchor
) -> tuple[list[Region], dict[int, tuple[Owners, str]]]:
    """Finds the regions of a flat, open jaxpr.

    Args:
      jaxpr: The jaxpr of an update.
      owners: The parameters that each input belongs to.
      is_anchor: Whether the layout of a variable of a parameter is known, so that a region may begin or end there.

    Returns:
      The regions, and for each other equation that mixes elements its parameters and the reason why it is in none.
    """
    graph = _Graph.of(jaxpr, owners)
    seeds: dict[int, set[int]] = {}
    refused: dict[int, tuple[Owners, str]] = {}
    for i in (i for i, eqn in enumerate(jaxpr.eqns) if mixes(eqn) and any(map(_is_big, eqn.invars))):
        params = graph.owner(i)
        if len(params) == 1:
            seeds.setdefault(next(iter(params)), set()).add(i)
        else:
            refused[i] = params, "one product takes several parameters" if params else "it belongs to no parameter"
    regions: list[Region] = []
    taken: set[int] = set()
    for owner, first in seeds.items():
        try:
            members = _grown(graph, owner, first, is_anchor)
            if taken & {i for i in members if mixes(jaxpr.eqns[i])}:
                raise _NoRegionError("its products also serve another parameter")
        except _NoRegionError as error:
            refused.update((i, (frozenset([owner]), str(error))) for i in first)
            continue
        regions.append(_region(graph, owner, members))
        taken |= regions[-1].eqns
    refused = {i: why for i, why in refused.items() if i not in taken}
    levels = _levels(graph, regions)
    if levels is not None:
        return [region._replace(level=level) for region, level in zip(regions, levels, strict=True)], refused
    circle = {i: (frozenset([x.owner]), "matrices depend on each other") for x in regions for i in x.eqns}
    return [], refused | {i: why for i, why in circle.items() if mixes(jaxpr.eqns[i])}


def _grown(graph: _Graph, owner: int, seeds: set[int], is_anchor: IsAnchor) -> set[int]:
    """Returns the equations of a region: its products, those between them, and those up to known layouts."""
    members = set(seeds)
    before = 0
    while len(members) > before:
        before = len(members)
        members |= _between(graph, members)
        if not all(graph.owner(i) <= {owner} for i in members):
            raise _NoRegionError("its products depend on each other through another parameter")
        members |= _producers(graph, owner, members, is_anchor)
        members |= _norms(graph, owner, members)
        inside = [v for i in members for v in graph.eqns[i].outvars if _is_big(v) and not is_anchor(v, owner)]
        for v in graph.outputs.intersection(inside):
            raise _NoRegionError(f"a result of shape {compat.type_of(v).shape} has no layout")
        members.update(i for v in inside for i in graph.readers_of.get(v, []))
    return members


def _between(graph: _Graph, members: set[int]) -> set[int]:
    """Returns the equations on paths from members to members."""
    first, last = min(members), max(members)

    def reached(step: Callable[[int], list[int]]) -> set[int]:
        visited: set[int] = set()
        pending = list(members)
        while pending:
            new = {i for i in step(pending.pop()) if first <= i <= last} - visited
            visited |= new
            pending += new
        return visited

    return reached(graph.readers) & reached(graph.makers)


def _producers(graph: _Graph, owner: int, members: set[int], is_anchor: IsAnchor) -> set[int]:
    """Returns the equations that make operands of unknown layout."""
    producers: set[int] = set()
    pending = [v for i in members for v in graph.reads[i]]
    while pending:
        v = pending.pop()
        i = graph.producers.get(v)
        is_own = graph.owners.get(v) == frozenset([owner]) and not is_anchor(v, owner)
        is_common = _is_big(v) and not graph.owners.get(v)
        if i is not None and i not in members and i not in producers and (is_own or is_common):
            producers.add(i)
            pending += graph.reads[i]
    return producers


def _norms(graph: _Graph, owner: int, members: set[int]) -> set[int]:
    """Returns the equations that make single numbers from operands of the region alone."""
    read = [v for i in members for v in graph.reads[i] if graph.producers.get(v) not in members]
    operands = {v for v in read if graph.owners.get(v) == frozenset([owner])}
    return set().union(*(_norm(graph, owner, v, operands, members) for v in dict.fromkeys(read) if not _is_big(v)))


def _norm(graph: _Graph, owner: int, number: Var, operands: set[Var], members: set[int]) -> set[int]:
    """Returns the equations from operands, or results, of a region to a number; none if it needs anything else."""
    eqns: set[int] = set()
    pending, depends = [number], False
    while pending:
        v = pending.pop()
        i = graph.producers.get(v)
        if v in operands or i in members:
            depends = True
        elif _is_big(v) and (i is None or graph.owners[v] != frozenset([owner])):
            return set()
        elif i is not None and i not in eqns:
            eqns.add(i)
            pending += graph.reads[i]
        if len(eqns) > LONGEST:
            return set()
    return eqns if depends else set()


def _region(graph: _Graph, owner: int, members: set[int]) -> Region:
    order = sorted(members)
    eqns = [graph.eqns[i] for i in order]
    results = {v for eqn in eqns for v in eqn.outvars}
    read = list(dict.fromkeys(v for i in order for v in graph.reads[i] if v not in results))
    inputs = [v for v in read if graph.owners.get(v)]
    shared = [v for v in read if not graph.owners.get(v)]
    # What precedes the first product is copied, not replaced: others may need it, and it is cheap.
    core: set[int] = set()
    for i in order:
        core |= {i} if mixes(graph.eqns[i]) or core.intersection(graph.makers(i)) else set()
    outputs = [
        v
        for i in sorted(core)
        for v in graph.eqns[i].outvars
        if v in graph.outputs or not members.issuperset(graph.readers_of.get(v, []))
    ]
    return Region(owner, 0, Piece([*inputs, *shared], outputs, eqns), inputs, shared, outputs, frozenset(core))


def _levels(graph: _Graph, regions: Sequence[Region]) -> list[int] | None:
    """Returns how many regions precede each on the longest path; `None` if there is a circle."""
    replaced = frozenset[int]().union(*(region.eqns for region in regions))
    levels = [0] * len(regions)
    for _ in range(len(regions) + 1):
        before = list(levels)
        level: dict[Var, int] = {}  # how many regions precede a variable
        for r, region in enumerate(regions):
            level.update(dict.fromkeys(region.outputs, levels[r] + 1))
        for i, eqn in enumerate(graph.eqns):
            if i not in replaced:
                level.update(dict.fromkeys(eqn.outvars, max((level.get(v, 0) for v in graph.reads[i]), default=0)))
        for r, region in enumerate(regions):
            levels[r] = max([levels[r], *(level.get(v, 0) for v in (*region.inputs, *region.shared))])
        if levels == before:
            return levels
    return None
