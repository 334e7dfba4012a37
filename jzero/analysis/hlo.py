"""Compiled HLO text as data: computations, instructions, loops."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CONTINUED = re.compile(r'\n(?="|}})')  # what a kernel says of itself has lines of its own
_HEAD = re.compile(r"^(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_OPCODE = re.compile(r" *([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"(body|to_apply|calls|called_computations|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
TRIVIAL = ("bitcast", "copy", "reshape", "transpose", "convert", "get-tuple-element", "opt-barrier")
"""Opcodes that forward an array unchanged."""


class HloArray(NamedTuple):
    """Shape and element type of one array on one device, and the memory it is in: 0 is the device's main memory."""

    dtype: str
    shape: tuple[int, ...]
    memory_space: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return -(-self.size * dtype_bits(self.dtype) // 8)


Shape: TypeAlias = "HloArray | tuple[Shape, ...]"
"""The type of a result."""


def dtype_bits(dtype: str) -> int:
    """Bits of one element by HLO's name of the type; 0 for tokens and the like."""
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match.group(1)) if match else 8 * (dtype == "pred")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
      name: Its name, unique in the program.
      opcode: Such as `dot`, `fusion`, `all-gather-start`.
      result: An `HloArray`, or nested tuples of them.
      operands: Names of instructions of the same computation; for a constant its text.
      called: Names of the computations that it runs, loop conditions not counted.
      attributes: The text after the operands.
      is_root: Whether its computation returns it.
    """

    name: str
    opcode: str
    result: Shape
    operands: tuple[str, ...]
    called: tuple[str, ...]
    attributes: str
    is_root: bool

    @functools.cached_property
    def results(self) -> tuple[HloArray, ...]:
        """All arrays of its result."""
        return _flat(self.result)

    @property
    def op_name(self) -> str:
        """Where in the user's program it comes from, such as `jit(f)/while/body/dot_general`."""
        return self._attribute("op_name")

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self._attribute("custom_call_target")

    def _attribute(self, name: str) -> str:
        match = re.search(rf'{name}="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order of the schedule, if the program has one."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Each instruction by its name."""
        return {x.name: x for x in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction that it returns."""
        return next(x for x in reversed(self.instructions) if x.is_root)

    def arrays(self, name: str) -> tuple[HloArray, ...]:
        """The arrays that the instruction `name` returns; none if there is no such instruction."""
        return self.by_name[name].results if name in self.by_name else ()

    def source(self, name: str) -> Instruction | None:
        """The instruction that computes `name`, behind copies, casts and the like."""
        source = self.by_name.get(name)
        while source is not None and source.opcode in TRIVIAL and source.operands:
            source = self.by_name.get(source.operands[0])
        return source


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A compiled program.

    Attributes:
      computations: Its computations by name.
      entry: The name of the entry computation; empty if there is none.
      num_devices: Partitions times replicas.
    """

    computations: Mapping[str, Computation] = dataclasses.field(hash=False)
    entry: str
    num_devices: int

    def called_computations(self, instruction: Instruction) -> Iterator[Computation]:
        """The computations that an instruction runs."""
        for name in instruction.called:
            if name in self.computations:
                yield self.computations[name]

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a `while` runs its body, as stated or as counted by its condition; `None` if unknown."""
        stated = _TRIP_COUNT.search(loop.attributes)
        if stated:
            return int(stated.group(1))
        named = _CONDITION.search(loop.attributes)
        condition = self.computations.get(named.group(1)) if named else None
        if condition is None or "direction=LT" not in condition.root.attributes:
            return None
        limit = next((_constant(condition, x) for x in condition.root.operands[1:]), None)
        counter = condition.by_name.get(condition.root.operands[0])
        index = re.search(r"index=(\d+)", counter.attributes) if counter is not None else None
        if limit is None or index is None:
            return None
        return max(0, limit - (self._start(loop, int(index.group(1))) or 0))

    def _start(self, loop: Instruction, index: int) -> int | None:
        """The constant that a loop's counter starts from."""
        for computation in self.computations.values():
            if computation.by_name.get(loop.name) is loop:
                carried = computation.source(loop.operands[0])
                if carried is not None and carried.opcode == "tuple":
                    return _constant(computation, carried.operands[index])
        return None


def parse_hlo(text: str) -> HloProgram:
    """Returns HLO text, such as `compiled.as_text()`, as data.

    Example:
      >>> from jzero.analysis.hlo import parse_hlo
      >>> program = parse_hlo(jax.jit(jnp.sin).lower(1.0).compile().as_text())
      >>> program.computations[program.entry].root.results[0].dtype
      'f32'
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", list[Instruction]()
    for line in _CONTINUED.sub(" ", text).splitlines():
        header = _HEADER.match(line) if line.endswith("{") and not line.startswith((" ", "HloModule")) else None
        if header:
            name, lines = header.group(2), []
            entry = name if header.group(1) else entry
        elif line.startswith("  "):
            instruction = _instruction(line.strip())
            if instruction is not None:
                lines.append(instruction)
        elif line == "}":
            computations[name] = Computation(name, tuple(lines))
    counts = [re.search(rf"{key}=(\d+)", text.split("\n", 1)[0]) for key in ("num_partitions", "replica_count")]
    return HloProgram(computations, entry, math.prod(int(match.group(1)) for match in counts if match))


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if head is None:
        return None
    result, end = _type(line, head.end())
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _find_closing(line, opcode.end())
    inside, attributes = line[opcode.end() : close], line[close + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(x.strip() for x in inside.split(",") if x.strip())
    called = tuple(n for _, names in _CALLED.findall(attributes) for n in re.findall(r"[\w.\-]+", names))
    return Instruction(head.group(2), opcode.group(1), result, operands, called, attributes, bool(head.group(1)))


def _type(line: str, at: int) -> tuple[Shape, int]:
    """Parses an array type, or a tuple of types, at a position; returns it with the position behind it."""
    if line[at] != "(":
        match = _ARRAY.match(line, at)
        if match is None:  # `token[]` and the like are arrays too: this is none of them
            return (), line.find(" ", at)
        space = re.search(r"S\((\d+)\)", match.group(3) or "")
        dims = tuple(int(d) for d in re.findall(r"\d+", match.group(2)))
        return HloArray(match.group(1), dims, int(space.group(1)) if space else 0), match.end()
    items, at = [], at + 1
    while line[at] != ")":
        skipped = re.compile(r"(?:[, ]|/\*.*?\*/)+").match(line, at)
        if skipped:
            at = skipped.end()
        else:
            item, at = _type(line, at)
            items.append(item)
    return tuple(items), at + 1


def _find_closing(line: str, at: int) -> int:
    """Position of the parenthesis that closes the one before `at`."""
    depth = 1
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return i
    return len(line)


def _flat(result: Shape) -> tuple[HloArray, ...]:
    return (result,) if isinstance(result, HloArray) else tuple(x for item in result for x in _flat(item))


def _constant(computation: Computation, name: str) -> int | None:
    source = computation.source(name)
    if source is None or source.opcode != "constant" or not re.fullmatch(r"-?\d+", "".join(source.operands)):
        return None
    return int(source.operands[0])
