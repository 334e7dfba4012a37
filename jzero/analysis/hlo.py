"""Reads the collectives out of compiled HLO text, loop trip counts multiplied in."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

__all__ = ["Collective", "find_collectives"]

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\([^{]*)?.*\{$")
_SHAPE = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|branch_computations|true_computation|false_computation)=\{?([^,}]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
      kind: One of `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `collective-permute`.
      dtype: HLO's name of the element type, such as `f32`.
      shapes: The shapes of its results on one device (several if the combiner merged operations).
      times: How often it runs per step: the trip counts of the loops around it, multiplied.
      in_loop: Whether it is inside a loop.
      num_devices: The devices of one group.
    """

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    times: int
    in_loop: bool
    num_devices: int

    @property
    def whole_size(self) -> int:
        """Elements of the whole array that it gathers, scatters or sums, once."""
        size = sum(math.prod(shape) for shape in self.shapes)
        return size * self.num_devices if self.kind == "reduce-scatter" else size

    @property
    def elements(self) -> int:
        """Elements per step in ZeRO's count: a gather or reduce-scatter of Ψ counts Ψ, an all-reduce 2Ψ."""
        return self.whole_size * self.times * (2 if self.kind == "all-reduce" else 1)


def find_collectives(hlo_text: str) -> list[Collective]:
    """Returns every collective that the entry computation runs.

    Args:
      hlo_text: `jax.jit(...).lower(...).compile().as_text()`.

    Raises:
      ValueError: A collective is inside a loop whose trip count the compiler does not state.

    Example:
      >>> from jzero.analysis.hlo import find_collectives
      >>> find_collectives(jax.jit(jnp.sin).lower(1.0).compile().as_text())
      []
    """
    computations = _split(hlo_text)
    entry = next((name for name, (is_entry, _) in computations.items() if is_entry), None)
    return [] if entry is None else list(_walk(computations, entry, 1, False))


def _split(text: str) -> dict[str, tuple[bool, list[str]]]:
    """Returns the instructions of each computation by its name."""
    computations: dict[str, tuple[bool, list[str]]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            found = _COMPUTATION.match(line)
            if found:
                lines = []
                computations[found.group(1)] = (line.startswith("ENTRY"), lines)
        elif line.startswith("  "):
            lines.append(line.strip())
    return computations


def _walk(
    computations: dict[str, tuple[bool, list[str]]], name: str, times: int | None, in_loop: bool
) -> Iterator[Collective]:
    for line in computations[name][1]:
        kind = next((k for k in KINDS if f" {k}(" in line or f" {k}-start(" in line), None)
        if kind is not None:
            if times is None:
                raise ValueError(f"A collective runs in a loop of unknown trip count: {line[:200]}")
            yield _parse(line, kind, times, in_loop)
            continue
        is_loop = " while(" in line
        trips = _TRIP_COUNT.search(line) if is_loop else None
        inner = times if not is_loop else None if trips is None or times is None else times * int(trips.group(1))
        for group in _CALLED.findall(line):
            for called in re.findall(r"[\w.\-]+", group):
                if called in computations:
                    yield from _walk(computations, called, inner, in_loop or is_loop)


def _parse(line: str, kind: str, times: int, in_loop: bool) -> Collective:
    is_start = f"{kind}-start(" in line
    result = line.split(f" {kind}-start(" if is_start else f" {kind}(", 1)[0].split("=", 1)[1]
    found = _SHAPE.findall(result)
    if is_start and kind != "all-reduce":  # a pair of operands and results
        found = found[len(found) // 2 :]
    shapes = tuple(tuple(int(d) for d in dims.split(",") if d) for _, dims in found)
    return Collective(kind, found[0][0], shapes, times, in_loop, _group_size(line))


def _group_size(line: str) -> int:
    """The number of devices in one group, in each of the ways that HLO writes groups."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed.group(1).split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if iota:
        return int(iota.group(1))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named.group(2)))
    return 1
