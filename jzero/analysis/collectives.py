"""The collectives of a compiled program, multiplied by the trip counts of loops.

[Note: How compilers write collectives]
CPU: one instruction each. GPU: pairs such as `all-gather-start` and `all-gather-done`, whose result is a tuple
`(operands, results, ...)`, many arrays in one pair. TPU: a reduce-scatter may be an all-reduce and a slice in one
fusion; an asynchronous gather is a chain of fusions, `async-collective-start`, `async_collective_fusion...`,
`async-collective-done`, each of which repeats the same `all-gather`, so that only the first counts; a small gather is
an all-reduce of arrays that are zero except for the device's own part; and loops do not state their trip count, so
`Program.trip_count` reads it from their condition. Between TPU slices: a `send` and a `recv` by the host, with the kind
of the collective and its devices in attributes; the `recv` has the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

from jzero.analysis.hlo import Computation, HloArray, HloProgram, Instruction, parse_hlo
from jzero.core.layout.route import bytes_on_port

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective operation of a compiled program.

    Attributes:
      kind: One of `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `collective-permute`.
      results: Its results on one device (several if the combiner merged operations).
      times: Number of runs per step: the product of the trip counts of the loops around it.
      in_loop: Whether it is inside a loop.
      group: The devices of its first group, by their position in the mesh.
      op_name: Where in the user's program it comes from.
      name: The instruction's name.
    """

    kind: str
    results: tuple[HloArray, ...]
    times: int
    in_loop: bool
    group: tuple[int, ...]
    op_name: str = ""
    name: str = ""

    @property
    def dtype(self) -> str:
        """HLO's name of the element type, such as `f32`; of the first result if there are several."""
        return self.results[0].dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its results on one device."""
        return tuple(x.shape for x in self.results)

    @property
    def is_between_slices(self) -> bool:
        """Whether hosts exchange it between TPU slices."""
        return self.name.startswith("recv")

    @property
    def num_devices(self) -> int:
        """The devices of one group."""
        return len(self.group)

    @property
    def full_size(self) -> int:
        """Elements of the unsharded array that one run gathers, scatters or sums."""
        size = sum(x.size for x in self.results)
        return size * self.num_devices if self.kind == "reduce-scatter" else size

    @property
    def elements(self) -> int:
        """Elements per step in ZeRO's count: a gather or reduce-scatter of Ψ counts Ψ, an all-reduce 2Ψ."""
        return self.full_size * self.times * (2 if self.kind == "all-reduce" else 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device of a ring sends per run: (N-1)/N of the whole array, twice that for an all-reduce."""
        num_bytes = sum(x.num_bytes for x in self.results) * (self.num_devices if self.kind == "reduce-scatter" else 1)
        if self.kind == "collective-permute":
            return float(num_bytes)
        return num_bytes * (self.num_devices - 1) / self.num_devices * (2 if self.kind == "all-reduce" else 1)

    def nic_bytes(self, devices_per_node: int) -> float:
        """Bytes that one network port sends per run, if each device has one; see `bytes_on_port`."""
        nodes = {i // devices_per_node for i in self.group}
        return bytes_on_port(self.kind, self.sent_bytes, self.num_devices, len(nodes))

    def by_dtype(self) -> Iterator[CompiledCollective]:
        """Yields its parts with results of one dtype; compilers merge collectives of several."""
        for dtype in dict.fromkeys(x.dtype for x in self.results):
            yield dataclasses.replace(self, results=tuple(x for x in self.results if x.dtype == dtype))


def find_collectives(hlo_text: str) -> list[CompiledCollective]:
    """Returns every collective that the entry computation runs; of branches, those of the one that sends most.

    Args:
      hlo_text: `jax.jit(...).lower(...).compile().as_text()`.

    Raises:
      ValueError: A collective is inside a loop whose trip count the compiler does not state.

    Example:
      >>> from jzero.analysis.collectives import find_collectives
      >>> find_collectives(jax.jit(jnp.sin).lower(1.0).compile().as_text())
      []
    """
    return list(program_collectives(parse_hlo(hlo_text)))


def program_collectives(program: HloProgram, *, unknown_trips: int | None = None) -> Iterator[CompiledCollective]:
    """Yields every collective that a program runs; of branches, those of the one that sends most.

    Args:
      program: The parsed program.
      unknown_trips: The trip count to assume if it is unknown; by default, collectives in such a loop are an error.
    """
    if program.entry:
        yield from _walk(program, program.computations[program.entry], 1, False, unknown_trips)


def collective_of(program: HloProgram, instruction: Instruction) -> CompiledCollective | None:
    """Returns the collective that an instruction is or starts, counted once, if it is one."""
    base = instruction.opcode.removesuffix("-start")
    if base == "recv" and (between := re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)):
        return _between_slices(between.group(1).lower().replace("_", "-"), instruction)
    if base in KINDS:
        return _collective(program, base, instruction, _results(instruction))
    for called in program.called_computations(instruction) if base in ("fusion", "async") else ():
        inner = [x for x in called.instructions if x.opcode in KINDS]
        if not inner:
            continue
        if base == "async" or _has_target(called, "AsyncCollectiveStart"):
            return dataclasses.replace(
                _collective(program, inner[0].opcode, inner[0], inner[0].results), name=instruction.name
            )
        root = called.source(called.root.name)
        if inner[0].opcode == "all-reduce" and root is not None and root.opcode == "dynamic-slice":
            reduction = _collective(program, "reduce-scatter", inner[0], instruction.results)
            return dataclasses.replace(reduction, name=instruction.name)
    return None


def continues_collective(program: HloProgram, instruction: Instruction) -> bool:
    """Whether a fusion is a later part of an asynchronous collective that another one started."""
    if instruction.opcode != "fusion":
        return False
    return any(
        _has_target(called, "AsyncCollectiveDone")
        or (called.name.startswith("async_collective_fusion") and not _has_target(called, "AsyncCollectiveStart"))
        for called in program.called_computations(instruction)
    )


def _has_target(computation: Computation, target: str) -> bool:
    return any(x.opcode == "custom-call" and x.target == target for x in computation.instructions)


def _walk(
    program: HloProgram, computation: Computation, times: int | None, in_loop: bool, unknown_trips: int | None
) -> Iterator[CompiledCollective]:
    for instruction in computation.instructions:
        collective = collective_of(program, instruction)
        if collective is not None:
            if times is None:
                where = f"{collective.name}, {collective.op_name}"
                raise ValueError(f"A collective runs in a loop of unknown trip count: {where}")
            yield dataclasses.replace(collective, times=times, in_loop=in_loop)
        elif instruction.called and not continues_collective(program, instruction):
            inner, is_loop = times, instruction.opcode == "while"
            if is_loop:
                trips = program.trip_count(instruction)
                trips = unknown_trips if trips is None else trips
                inner = None if trips is None or times is None else times * trips
            runs = [
                list(_walk(program, called, inner, in_loop or is_loop, unknown_trips))
                for called in program.called_computations(instruction)
            ]
            if instruction.opcode == "conditional":
                runs = sorted(runs, key=lambda branch: sum(c.sent_bytes * c.times for c in branch))[-1:]
            yield from itertools.chain(*runs)


def _collective(
    program: HloProgram, kind: str, instruction: Instruction, results: tuple[HloArray, ...]
) -> CompiledCollective:
    group = _group(instruction.attributes) or tuple(range(program.num_devices))
    return CompiledCollective(kind, results, 1, False, group, instruction.op_name, instruction.name)


def _between_slices(kind: str, instruction: Instruction) -> CompiledCollective:
    """Returns a collective of the devices at one place of each slice; devices are in the order of slices.

    They are written as slices and places, `"{1,2}x{0:3}"`, or group by group, `{{100000,200000},{100001,200001}}`.
    """
    written = re.search(r"_xla_megascale_target=([^_]*)", instruction.attributes)
    target = written.group(1) if written else ""
    product = re.search(r"\{([\d,]+)\}x\{0:(\d+)\}", target)
    if product:
        num_slices, per_slice = product.group(1).count(",") + 1, int(product.group(2)) + 1
    else:
        groups = re.findall(r"\{([\d,]+)\}", target) or ["0"]
        num_slices, per_slice = groups[0].count(",") + 1, len(groups)
    group = tuple(per_slice * i for i in range(num_slices))
    return CompiledCollective(kind, instruction.results[:1], 1, False, group, instruction.op_name, instruction.name)


def _results(instruction: Instruction) -> tuple[HloArray, ...]:
    """The arrays that a collective returns; the result of a start is `(operands, results, ...)`."""
    result = instruction.result
    if not instruction.opcode.endswith("-start") or isinstance(result, HloArray):
        return instruction.results
    if instruction.opcode == "all-reduce-start" and isinstance(result[0], HloArray):
        return instruction.results  # in this form without the operands
    outputs = result[1]
    return (outputs,) if isinstance(outputs, HloArray) else tuple(x for x in outputs if isinstance(x, HloArray))


def _group(attributes: str) -> tuple[int, ...]:
    """The devices of the first group, in each of the ways that HLO writes groups; empty for all devices."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", attributes)
    if listed:
        return tuple(int(i) for i in listed.group(1).split(","))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        groups, dims, order = ([int(i) for i in (text or "").split(",") if i] for text in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))
        return tuple(int(i) for i in ids.reshape(groups)[0])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
        group_axes = re.findall(r"'([^']+)'", named.group(2))
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        first = ids[tuple(slice(None) if axis in group_axes else 0 for axis in sizes)]
        return tuple(int(i) for i in first.ravel())
    return ()
