"""Finds the departures of a program from the plan, and of the compiled program from that.

Each gather and reduction of the traced program names its parameter (`jzero.estimate.traced_collectives`), so it is
compared with the plan by path. A compiled program has no such names, so it is compared with the traced one by kind of
collective and bytes: a compiler can merge a second gather with the first, move a gather out of its loop, gather before
a cast to 16 bits or over other mesh axes first, and all-reduce instead of reduce-scattering. Each of these changes the
sums. A parameter that a pass uses several times may be gathered once for all of them, and its gradients summed before
they are reduced: that sends less, and leaves nothing whole between the passes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jzero.analysis.collectives import CompiledCollective
from jzero.analysis.hlo import HloProgram
from jzero.analysis.memory import Memory
from jzero.core.base.text import few
from jzero.core.base.types import DType
from jzero.core.layout.mesh import AnyMesh, batch_axes, shard_axes
from jzero.core.layout.route import Route
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.traffic import GatherPlan
from jzero.estimate.buffers import UPDATE, Transfer
from jzero.estimate.traced_collectives import Fate, TracedCollective

MATRICES = "zero_matrices"
"""The name scopes of the optimizer's update, and of the matrix work in it."""

SMALL = 1024
"""Arrays of up to this many elements are not checked: they are too small to matter."""

MISSING, EXCESS = 0.01, 0.05
"""The shares of the parameters' elements by which a compiled program may send less, or more, than the traced one:
compilers keep small parameters to recompute from, and gather once more before and after a loop."""

PASSES = {"all-gather": 2}
"""The passes of a micro-batch that need a collective of a parameter, if not one: forward and backward gather it."""


class PlanViolation(Exception):  # noqa: N818  # the name of the contract
    """A compiled program departs from the plan.

    Attributes:
      violations: Every departure, in words.

    Example:
      >>> jzero.PlanViolation(["an all-reduce of 512x512"]).violations
      ('an all-reduce of 512x512',)
    """

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("The compiled program departs from the plan:\n" + "\n".join(f"  {x}" for x in violations))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step, one program or several, with the facts to judge it.

    Attributes:
      programs: The programs; the first computes loss and gradients.
      collectives: Their collectives.
      sent: The gathers and reductions of parameters in the traced programs.
      transfers: All collectives of the traced programs.
      platform: `cpu`, `gpu` or `tpu`.
      memory: Their memory.
      returns_state: Whether they return a new version of their input state, which should then be donated.
      micro_batches: The micro-batches of a train step; 0 of other functions.
    """

    programs: tuple[HloProgram, ...]
    collectives: tuple[CompiledCollective, ...]
    sent: tuple[TracedCollective, ...]
    transfers: tuple[Transfer, ...]
    platform: str
    memory: Memory
    returns_state: bool
    micro_batches: int = 0


def find_violations(compiled: Compiled, plan: ZeroPlan) -> tuple[list[str], list[str]]:
    """Returns the departures of a program from a plan, and remarks on unknowns."""
    violations: list[str] = []
    notes: list[str] = []
    for check in (_by_path, _by_kind, _large_gathers, _undivided, _lost_donation):
        for is_violation, text in check(compiled, plan):
            (violations if is_violation else notes).append(text)
    return list(dict.fromkeys(violations)), list(dict.fromkeys(notes))


def axes_of(group: Sequence[int], mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ."""
    sizes = tuple(mesh.shape.values())
    if not group or max(group) >= np.prod(sizes):
        return ()
    places = np.stack(np.unravel_index(np.asarray(group), sizes))
    return tuple(name for name, row in zip(mesh.shape, places, strict=True) if len(set(row.tolist())) > 1)


Finding = tuple[bool, str]


def _by_path(compiled: Compiled, plan: ZeroPlan) -> Iterator[Finding]:
    """Compares the traced program with the plan."""
    by_path = {x.path: (x, x.seen_dtype) for x in plan.other_leaves}
    by_path |= {leaf.path: (leaf.param, leaf.compute_dtype) for leaf in plan.leaves}
    reduced = {leaf.path: plan.traffic.route_of_gradient(leaf) for leaf in plan.leaves}
    for x in compiled.sent:
        if math.prod(x.cut.shape) <= SMALL:
            continue
        if x.path not in by_path:
            yield False, f"{_say(x)} ({x.path}) is not a parameter of the plan, so it was not checked."
            continue
        leaf, dtype = by_path[x.path]
        gather = plan.traffic.gather_plan(leaf)
        once = plan.config.secondary_params if x.gathers else plan.traffic.is_reduced_once(compiled.micro_batches)
        yield from _route(x, gather.route if x.gathers else reduced[x.path], once=once and compiled.micro_batches > 0)
        if x.gathers:
            yield from _gather(x, gather, jnp.dtype(dtype), plan)


def _route(x: TracedCollective, planned: Route, *, once: bool) -> Iterator[Finding]:
    array, route = f"{_say(x)} ({x.path})", x.eqn.params["route"]
    if route not in (planned, *planned.levels):
        yield True, f"{array} travels over {route}, not {planned} as planned."
    if once and route != planned.levels[0] and (x.in_loop or x.times > 1):
        yield True, f"{array} crosses nodes {x.times} times per step, once in the plan."


def _gather(x: TracedCollective, gather: GatherPlan, dtype: DType, plan: ZeroPlan) -> Iterator[Finding]:
    array = f"{_say(x)} ({x.path})"
    is_part = x.eqn.params["route"] in gather.route.levels[1:]  # in the dtype that it travels in
    if gather.kind != "none" and x.cut.blocks is None and not (is_part and jnp.dtype(x.dtype) == jnp.int8):
        yield True, f"A gather of {array} is wider than the {gather.kind} of the plan."
    if is_part:
        return
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize > dtype.itemsize:
        yield True, f"A gather of {array} is wider than the {dtype.name} of the plan."
    if x.fate is Fate.SCANNED:
        yield True, f"A gather of the whole stack {array}, outside of the loop over it."
    if plan.traffic.regathers(x.path) and x.fate is Fate.STACKED:
        yield True, f"A forward gather of {array} is stored in a stack that its loop carries."
    if plan.traffic.regathers(x.path) and x.fate is Fate.SAVED:
        yield True, f"A forward gather of {array} survives to the backward pass."


def _say(x: TracedCollective) -> str:
    return str(jax.core.ShapedArray(x.cut.shape, x.dtype).str_short(short_dtypes=True))


Key: TypeAlias = tuple[str, bool]
Amounts: TypeAlias = collections.Counter[Key]


class _Amounts:
    """How much each kind of collective moves along ZeRO's axes: bytes; elements on CPUs, where 16 bits travel as 32.

    Keys are the kind, and whether it crosses nodes of the plan. The update counts, too: the trace has its gathers and
    the exchanges of its matrix work. Compilers merge its gathers with those of the loss, under the name of either.

    Attributes:
      placed: What the gathers and reductions of parameters move.
      needed: The part of it that stays if each pass gathers a parameter once, and reduces a gradient once.
      traced: What all collectives of the traced program move.
      compiled: What all collectives of the compiled program move.
      updates: What the update moves in both.
      params: All parameters, once.
      padding: What a compiler gathers, but not the trace, of parameters that come whole from a padded update.
    """

    def __init__(self, compiled: Compiled, plan: ZeroPlan) -> None:
        by_bytes, axes = compiled.platform != "cpu", {*batch_axes(plan.config)}
        self.traced, self.compiled, before, after = (Amounts() for _ in range(4))
        node = {plan.config.node_axis} - {None}
        self.placed, self.needed = _placed(compiled, plan, by_bytes=by_bytes)
        for t in compiled.transfers:
            key = t.kind, bool(node & {*t.axes})
            amount = t.times * (t.num_bytes if by_bytes else t.num_elements) * bool({*t.axes} & axes)
            self.traced[key] += amount
            before[key] += amount * (UPDATE in t.scope)
        for c in compiled.collectives:
            num_bytes = sum(x.num_bytes for x in c.results) * (c.num_devices if c.kind == "reduce-scatter" else 1)
            group_axes = {*axes_of(c.group, plan.mesh)}
            if c.is_between_slices and not node:
                continue  # a TPU's compiler splits a hop over slices in two: the other one has the whole array
            key = c.kind, bool(node & group_axes)
            amount = c.times * (num_bytes if by_bytes else c.full_size) * bool(group_axes & axes)
            self.compiled[key] += amount
            after[key] += amount * (UPDATE in c.op_name)
        self.updates = before & after
        sizes = [(x, jnp.dtype(x.compute_dtype).itemsize if by_bytes else 1) for x in plan.leaves]
        self.params = sum(x.param.size * size for x, size in sizes)
        after_update = [(x.grad, size) for x, size in sizes if x.param.cut is None]
        self.padding = sum((math.prod(grad.stored_shape) - grad.size) * size for grad, size in after_update)
        self.unit = "B" if by_bytes else "elements"

    def missing(self, kind: str) -> Key | None:
        """Returns the key by which the compiled program moves less than the traced one by collectives of a kind."""
        lacks = self.needed + self.updates
        lacks.subtract(self.compiled)
        return next((key for key in self.needed if key[0] == kind and lacks[key] > MISSING * self.params), None)

    def say(self, key: Key) -> str:
        """Returns both figures in words."""
        compiled, traced = round(self.compiled[key]), round(self.traced[key])
        between = " between nodes" if key[1] else ""
        return f"The compiled program moves {compiled:,} {self.unit} by {key[0]}{between}, the traced one {traced:,}"


def _placed(compiled: Compiled, plan: ZeroPlan, *, by_bytes: bool) -> tuple[Amounts, Amounts]:
    """Returns what gathers and reductions of parameters move, and the least of it without whole ones between passes."""
    sizes = {x.path: x.size for x in plan.other_leaves} | {leaf.path: leaf.param.size for leaf in plan.leaves}
    node, micro_batches = {plan.config.node_axis} - {None}, max(1, compiled.micro_batches)
    amounts, elements = collections.Counter[tuple[str, Key]](), collections.Counter[tuple[str, Key]]()
    for x in compiled.sent:
        for hop in x.collectives:
            use = x.path, (hop.kind, bool(node & {*hop.axes}))
            amounts[use] += x.times * (hop.num_bytes if by_bytes else hop.num_elements)
            elements[use] += x.times * hop.num_elements
    placed, needed = Amounts(), Amounts()
    for (path, key), amount in amounts.items():
        placed[key] += amount
        passes = PASSES.get(key[0], 1) * micro_batches
        needed[key] += round(amount * min(1, passes * sizes.get(path, math.inf) / elements[path, key]))
    return placed, needed


def _by_kind(compiled: Compiled, plan: ZeroPlan) -> Iterator[Finding]:
    """Compares the compiled program with the traced one."""
    if not compiled.sent and not compiled.micro_batches:
        yield from _compiler_reductions(compiled, plan)
        return
    amounts = _Amounts(compiled, plan)
    if key := amounts.missing("all-gather"):
        why = "equal gathers were merged, so parameters stay whole from the forward to the backward pass."
        yield compiled.platform != "cpu" and plan.regathers, f"{amounts.say(key)}: {why}"
    if key := amounts.missing("reduce-scatter"):  # TPUs choose so for some tori
        why = "gradients are summed whole, by all-reduce."
        yield compiled.platform != "tpu", f"{amounts.say(key)}: {why}"
    for key in [
        (kind, crosses) for kind in ("all-gather", "reduce-scatter", "all-to-all") for crosses in (False, True)
    ]:
        gathers = key[0] == "all-gather"
        excess = amounts.compiled[key] - amounts.traced[key] - amounts.padding * gathers
        if excess > EXCESS * max(amounts.placed[key], amounts.params):
            why = "arrays are wider than planned, or exchanged whole where each device holds a part."
            yield True, f"{amounts.say(key)}: {why}{_on_flattened(plan) if gathers else ''}"


def _on_flattened(plan: ZeroPlan) -> str:
    """Returns what updates of flattened leaves gather, if there are any."""
    cuts = [(x.path, x.grad.cut) for i, x in enumerate(plan.leaves) if i not in plan.offloaded]  # frozen: none
    flat = [path for path, cut in cuts if cut is not None and cut.flat]
    if not flat:
        return ""
    return (
        " The update gathers flattened leaves if the optimizer needs more of them than single elements and their sum: "
        f"{few(flat, 3)}. `LeafRule(dim=...)` pads one dimension instead."
    )


def _compiler_reductions(compiled: Compiled, plan: ZeroPlan) -> Iterator[Finding]:
    """Looks at a program without collectives of jzero's: whether the compiler divides its reductions of gradients."""
    cut = [leaf for leaf in plan.leaves if leaf.trained and leaf.grad.cut is not None and leaf.grad.size > SMALL]
    if not compiled.returns_state or not cut or not plan.config.reduce_scatter:
        return
    planned, reduced = sum(leaf.grad.size for leaf in cut), dict[str, int]()
    for c in compiled.collectives:
        if {*shard_axes(plan.config)} & {*axes_of(c.group, plan.mesh)}:
            reduced[c.kind] = reduced.get(c.kind, 0) + c.full_size * c.times
    if reduced.get("reduce-scatter", 0) < planned / 2 and reduced.get("all-reduce", 0) > EXCESS * planned:
        largest = sorted(cut, key=lambda leaf: -leaf.grad.size)[:3]
        yield (
            True,
            f"{reduced['all-reduce']:,} elements are summed by all-reduce, where the plan has a reduce-scatter for "
            f"each gradient, {', '.join(leaf.path for leaf in largest)} among them.",
        )


def _large_gathers(compiled: Compiled, plan: ZeroPlan) -> Iterator[Finding]:
    """Looks for gathers larger than any that was traced, such as those that the compiler moved out of a loop."""
    traced = [t.num_elements for t in compiled.transfers if t.kind == "all-gather"]
    largest = max([SMALL, *traced, *(leaf.param.size for leaf in plan.leaves if leaf.scan_dim is None)])
    for c in compiled.collectives:
        for x in c.results if c.kind == "all-gather" and compiled.sent and UPDATE not in c.op_name else ():
            if x.size > largest:
                text = f"A gather of {x.dtype}[{','.join(map(str, x.shape))}] is larger than any that was traced: "
                yield True, text + "the compiler moved it out of its loop."


def _undivided(compiled: Compiled, plan: ZeroPlan) -> Iterator[Finding]:
    """Checks that the program divides the plan's matrix work."""
    computations = (x for program in compiled.programs for x in program.computations.values())
    instructions = (x for computation in computations for x in computation.instructions)
    if compiled.returns_state and plan.matrices.kinds and not any(MATRICES in x.op_name for x in instructions):
        paths = [path for kind in plan.matrices.kinds for path in kind.paths]
        yield (
            True,
            f"The plan divides the matrix work of {few(paths, 3)} among the devices; the program has none that is "
            "divided.",
        )


def _lost_donation(compiled: Compiled, plan: ZeroPlan) -> Iterator[Finding]:
    state = plan.bytes_per_device.params + plan.bytes_per_device.opt_state
    if compiled.returns_state and compiled.memory.aliased < state:
        yield (
            True,
            f"Of the state's {state} bytes per device {compiled.memory.aliased} are reused for the new state: it is "
            "not donated (`donate_argnums`), or the new state has another layout.",
        )
