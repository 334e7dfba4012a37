"""Finds the departures of a compiled program from the plan.

[Note: What is a parameter]
Compiled programs do not say which array is which parameter. A gathered or reduced array matches the leaves of the plan
that have its sizes, in any order and without ones (compilers transpose), whole or as one slice of a stack. If other
mesh axes cut a leaf (tensor parallelism), one device's part along these axes matches, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero.analysis.collectives import Collective
from jzero.analysis.hlo import TRIVIAL, Array, Computation, Instruction, Program, dtype_bits
from jzero.analysis.memory import Memory
from jzero.plan.leaves import LeafPlan
from jzero.plan.mesh import AnyMesh
from jzero.plan.plan import ZeroPlan

__all__ = ["Compiled", "PlanViolation", "axes_of", "find_violations"]

SMALL = 1024
"""Arrays of up to this many elements are not checked: they are too small to matter."""


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
    """A compiled program with the facts to judge it.

    Attributes:
      program: The program.
      collectives: Its collectives.
      lowered: StableHLO, before the compiler changed it.
      platform: `cpu`, `gpu` or `tpu`.
      memory: Its memory.
      returns_state: Whether it returns a new version of its input state, which should then be donated.
    """

    program: Program
    collectives: tuple[Collective, ...]
    lowered: str
    platform: str
    memory: Memory
    returns_state: bool


def find_violations(compiled: Compiled, plan: ZeroPlan) -> tuple[list[str], list[str]]:
    """Returns the departures of a program from a plan, and remarks on unknowns."""
    names = _Names(plan)
    violations: list[str] = []
    notes: list[str] = []
    for check in (_wide_gathers, _all_reduces, _find_undivided, _hoisted_stacks, _surviving_gathers, _lost_donation):
        for is_violation, text in check(compiled, plan, names):
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


class _Names:
    """The leaves that an array may be; see [Note: What is a parameter]."""

    def __init__(self, plan: ZeroPlan) -> None:
        self.whole: dict[tuple[int, ...], list[LeafPlan]] = {}
        self.slices: dict[tuple[int, ...], list[LeafPlan]] = {}
        for leaf in plan.leaves:
            for shape in {leaf.param.shape, leaf.param.stored_shape, leaf.grad.stored_shape}:
                part = _part(shape, leaf.param.base, plan.mesh)
                self._add(self.whole, part, leaf)
                if leaf.scan_dim is not None:
                    self._add(self.slices, _without(part, leaf.scan_dim), leaf)

    def _add(self, table: dict[tuple[int, ...], list[LeafPlan]], shape: tuple[int, ...], leaf: LeafPlan) -> None:
        found = table.setdefault(sizes_of(shape), [])
        if leaf not in found:
            found.append(leaf)

    def of(self, shape: tuple[int, ...]) -> list[LeafPlan]:
        key = sizes_of(shape)
        return [*self.whole.get(key, ()), *self.slices.get(key, ())]


def _part(shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> tuple[int, ...]:
    """Sizes of one device's part of an array that mesh axes shard."""
    entries = [*spec, *[None] * len(shape)]
    return tuple(
        n // math.prod(mesh.shape[name] for name in jax.tree.leaves(names))
        for n, names in zip(shape, entries, strict=False)
    )


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def sizes_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(d for d in shape if d > 1))


def _bits(leaf: LeafPlan) -> int:
    return 8 * int(jnp.dtype(leaf.compute_dtype).itemsize)


def _say(x: Array) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _paths(leaves: Sequence[LeafPlan]) -> str:
    which = ", ".join(leaf.path for leaf in leaves[:3]) + (" …" if len(leaves) > 3 else "")
    return which if len(leaves) == 1 else f"one of {which}"


def _zero_collectives(compiled: Compiled, plan: ZeroPlan, kind: str) -> list[Collective]:
    """Returns the collectives of a kind over the ZeRO axis."""
    return [c for c in compiled.collectives if c.kind == kind and plan.config.axis in axes_of(c.group, plan.mesh)]


def _wide_gathers(compiled: Compiled, plan: ZeroPlan, names: _Names) -> Iterator[Finding]:
    gathers = [(x, c.op_name) for c in _zero_collectives(compiled, plan, "all-gather") for x in c.results]
    if compiled.platform == "cpu" and any(_bits(leaf) < 32 for leaf in plan.leaves):
        yield False, "The CPU compiler widens 16-bit collectives: dtypes of gathers were read from the lowered program."
        gathers = [(x, "zero_gather") for x in _lowered_gathers(compiled.lowered)]
    narrow: dict[tuple[int, ...], int] = {}
    wide: list[tuple[Array, str, list[LeafPlan]]] = []
    for x, op_name in gathers:
        leaves = names.of(x.shape)
        if not leaves or x.size <= SMALL or not re.match("b?f", x.dtype):
            continue
        if dtype_bits(x.dtype) > max(map(_bits, leaves)):
            wide.append((x, op_name, leaves))
        else:
            narrow[sizes_of(x.shape)] = narrow.get(sizes_of(x.shape), 0) + 1
    for x, op_name, leaves in wide:
        if "zero_update" in op_name and all(leaf.param.cut for leaf in leaves):
            yield False, f"The optimizer gathers {_say(x)} ({_paths(leaves)}) to compute its update."
        elif "zero_update" in op_name and narrow.get(sizes_of(x.shape), 0) >= len(leaves):
            yield False, f"The optimizer gathers {_say(x)} ({_paths(leaves)}) beside the updated parameter."
        else:
            planned = jnp.dtype(leaves[0].compute_dtype).name
            yield True, f"A gather of {_say(x)} ({_paths(leaves)}) is wider than the {planned} of the plan."


def _lowered_gathers(text: str) -> Iterator[Array]:
    for line in text.splitlines():
        if "stablehlo.all_gather" in line:
            for dims, dtype in re.findall(r"tensor<((?:\d+x)*)(\w+)>", line.rsplit("->", 1)[-1]):
                yield Array(dtype, tuple(int(d) for d in dims.split("x") if d))


def _all_reduces(compiled: Compiled, plan: ZeroPlan, names: _Names) -> Iterator[Finding]:
    if plan.config.stage == 0 or not plan.config.reduce_scatter:
        return
    explicit = "stablehlo.reduce_scatter" in compiled.lowered
    for c in _zero_collectives(compiled, plan, "all-reduce"):
        for x in c.results:
            leaves = [leaf for leaf in names.of(x.shape) if leaf.trained]
            if x.size <= SMALL or not leaves or any(leaf.grad.cut is None for leaf in leaves):
                continue
            text = f"An all-reduce of {_say(x)} ({_paths(leaves)}), {c.times} × per step, where "
            if c.op_name.endswith("all_gather"):
                yield False, text + "a gather was planned: so the compiler sends small arrays."
            elif compiled.platform == "tpu" and explicit:
                yield False, text + "a reduce-scatter was planned and lowered: the compiler's choice for this torus."
            else:
                yield True, text + "a reduce-scatter was planned."


def _find_undivided(compiled: Compiled, plan: ZeroPlan, names: _Names) -> Iterator[Finding]:
    """Finds parameters that other mesh axes cut, and that are gathered over those axes to be exchanged."""
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        exchanged = [(leaf, *shapes) for leaf in plan.leaves for shapes in _result_shapes(leaf, kind, plan.mesh)]
        right = {sizes_of(part) for _, _, part in exchanged}
        # A constraint of the loss may cut arrays that the plan does not.
        right |= {sizes_of(y) for leaf, x, _ in exchanged if not any(leaf.param.base) for y in _cut_once(x, plan)}
        wrong = {sizes_of(shape): leaf for leaf, shape, _ in exchanged if any(leaf.param.base)}
        for c in _zero_collectives(compiled, plan, kind):
            for x in c.results:
                leaf = wrong.get(sizes_of(x.shape))
                if leaf and x.size > SMALL and sizes_of(x.shape) not in right:
                    to = " to" if kind == "reduce-scatter" else " of"
                    text = f"A collective ({kind}{to} {_say(x)}) exchanges {leaf.path} or its gradient whole, "
                    yield True, text + f"of which each device holds a part: {leaf.param.base}."


def _cut_once(shape: tuple[int, ...], plan: ZeroPlan) -> Iterator[tuple[int, ...]]:
    """Returns the shapes of parts over one of the other mesh axes."""
    further = [n for name, n in plan.mesh.shape.items() if name not in (plan.config.axis, plan.config.replica_axis)]
    for d, n in itertools.product(range(len(shape)), further):
        yield (*shape[:d], shape[d] // n, *shape[d + 1 :])


def _result_shapes(leaf: LeafPlan, kind: str, mesh: AnyMesh) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the possible shapes of a collective's result for a leaf or its slice: whole, and one device's part."""
    shapes = {leaf.param.shape, leaf.param.stored_shape, leaf.grad.stored_shape}
    if kind == "reduce-scatter":
        shapes = {leaf.grad.cut.shard_shape} if leaf.grad.cut else set()
    for shape in shapes:
        part = _part(shape, leaf.param.base, mesh)
        yield shape, part
        if leaf.scan_dim is not None:
            yield _without(shape, leaf.scan_dim), _without(part, leaf.scan_dim)


def _hoisted_stacks(compiled: Compiled, plan: ZeroPlan, names: _Names) -> Iterator[Finding]:
    sliced = {key for computation in _find_in_loops(compiled.program) for key in _sliced_sizes(computation)}
    for c in _zero_collectives(compiled, plan, "all-gather"):
        for x in c.results:
            leaves = [leaf for leaf in names.whole.get(sizes_of(x.shape), ()) if leaf.param.cut]
            if leaves and x.size > SMALL and sizes_of(x.shape) in sliced:
                yield True, f"A gather of the whole stack {_say(x)} ({_paths(leaves)}), outside of the loop over it."


def _find_in_loops(program: Program) -> list[Computation]:
    """Returns every computation that runs in a loop."""
    bodies = [
        x.called for c in program.computations.values() for x in c.instructions if x.opcode == "while" and x.called
    ]
    pending, seen = [name for called in bodies for name in called], set[str]()
    while pending:
        name = pending.pop()
        if name in program.computations and name not in seen:
            seen.add(name)
            pending += [called for x in program.computations[name].instructions for called in x.called]
    return [program.computations[name] for name in seen]


def _sliced_sizes(computation: Computation) -> Iterator[tuple[int, ...]]:
    """Returns the sizes of arrays from which the program takes one slice of the leading dimension."""
    for x in computation.instructions:
        if x.opcode == "dynamic-slice":
            for whole in computation.arrays(x.operands[0]):
                if len(whole.shape) > 1 and whole.shape[0] > 1 and x.results[0].shape == (1, *whole.shape[1:]):
                    yield sizes_of(whole.shape)


def _surviving_gathers(compiled: Compiled, plan: ZeroPlan, names: _Names) -> Iterator[Finding]:
    if plan.config.stage < 3 or not plan.config.reshard_after_forward:
        return
    limit = max(SMALL, plan.config.persistence_threshold)
    starts = {c.name for c in compiled.collectives if c.kind == "all-gather" and "transpose(" not in c.op_name}
    kept: dict[tuple[str, Array], Finding] = {}
    for computation in compiled.program.computations.values():
        for start in (x.name for x in computation.instructions if x.name in starts):
            for user, operand in _users(compiled.program, computation, start):
                fate = _fate(compiled, computation, user, operand)
                for x in computation.arrays(operand) if fate else ():
                    leaves = [leaf for leaf in names.of(x.shape) if leaf.param.cut]
                    if fate and leaves and x.size > limit:
                        text = f"A forward gather of {_say(x)} ({_paths(leaves)}) {fate[1]}"
                        kept[operand, x] = (fate[0], text)
    # Compilers recompute cheap values in the backward pass, and keep the small parameters for that.
    matters = sum(x.size for _, x in kept) >= 0.01 * sum(leaf.param.size for leaf in plan.leaves)
    for is_violation, text in kept.values():
        yield is_violation and (matters or "stack" in text), text


def _fate(compiled: Compiled, computation: Computation, user: Instruction, operand: str) -> Finding | None:
    """Returns how a gathered parameter outlives the forward pass, if `user` makes it."""
    if _stacks(compiled.program, computation, user, operand):
        return True, "is stored in a stack that its loop carries."
    if "transpose(" not in user.op_name:
        return None
    if compiled.platform == "cpu":
        return False, "serves the backward pass too: the CPU compiler merges equal gathers."
    return True, "survives to the backward pass."


def _users(program: Program, computation: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Returns the instructions that compute with the result of `name`, and its name in each."""
    pending, seen = [name], set[str]()
    while pending:
        name = pending.pop()
        for user in computation.instructions:
            if name not in user.operands or user.name in seen:
                continue
            if user.opcode in TRIVIAL or user.opcode.endswith("-done") or _only_moves(program, user):
                seen.add(user.name)
                pending.append(user.name)
            else:
                yield user, name


def _only_moves(program: Program, instruction: Instruction) -> bool:
    inner = [x for called in program.called_computations(instruction) for x in called.instructions]
    return instruction.opcode == "fusion" and all(x.opcode in (*TRIVIAL, "parameter") for x in inner)


def _stacks(program: Program, computation: Computation, user: Instruction, operand: str) -> bool:
    """Whether `user` writes `operand` into a larger array."""
    if user.opcode == "dynamic-update-slice":
        return user.operands[1] == operand
    index = user.operands.index(operand)
    for called in program.called_computations(user) if user.opcode.startswith("fusion") else ():
        for x in called.instructions:
            if x.opcode == "dynamic-update-slice":
                update = called.source(x.operands[1])
                if update is not None and update.opcode == "parameter" and update.operands == (str(index),):
                    return True
    return False


def _lost_donation(compiled: Compiled, plan: ZeroPlan, names: _Names) -> Iterator[Finding]:
    state = plan.bytes_per_device.params + plan.bytes_per_device.opt_state
    if compiled.returns_state and compiled.memory.aliased < state:
        yield (
            True,
            f"Of the state's {state} bytes per device {compiled.memory.aliased} are reused for the new state: it is "
            "not donated (`donate_argnums`), or the new state has another layout.",
        )
