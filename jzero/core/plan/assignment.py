"""Assigns the matrices of an update to devices, and reports what each device computes.

    assign(counts, costs, num_devices, *, in_rounds) -> Assignment

Given how many units of each kind there are, and what one costs, devices get as even shares as units allow:

    12 units of 3 GFLOP, 5 of 1 GFLOP, 8 devices  ->  4 or 6 GFLOP on each of them, of 41 in all
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from jzero.core.base.text import few, picked

WORTH_BATCHES = 0.9
"""Units of equal kind go in rounds, without branches, unless the busiest device then has less than this share."""


class Assignment(NamedTuple):
    """Who computes which units.

    Attributes:
      rounds: For each kind the number of units that every device computes; those units come first.
      per_device_batches: What is left: by batch and device, the kind and number of a unit, or `None`.
      loads: The cost on each device.
    """

    rounds: list[int]
    per_device_batches: list[list[tuple[int, int] | None]]
    loads: list[float]


def assign(
    counts: Sequence[int], costs: Sequence[float], num_devices: int, *, in_rounds: Sequence[bool] = ()
) -> Assignment:
    """Distributes units, largest first, each to the device with least work so far.

    Args:
      counts: The number of units of each kind.
      costs: What one unit costs.
      num_devices: N.
      in_rounds: For each kind, whether device d must compute units d · count / N and up, because its state lies there.
    """
    rounds = [count // num_devices for count in counts]
    pinned = [r if must else 0 for r, must in zip(rounds, in_rounds or [False] * len(counts), strict=True)]
    plain, balanced = (_largest_first(counts, costs, num_devices, begin) for begin in (rounds, pinned))
    return balanced if max(balanced.loads) < WORTH_BATCHES * max(plain.loads) else plain


def _largest_first(
    counts: Sequence[int], costs: Sequence[float], num_devices: int, rounds: Sequence[int]
) -> Assignment:
    """Distributes what is left after some rounds; kinds of which every device then has units make further rounds."""
    first = sum(r * cost for r, cost in zip(rounds, costs, strict=True))
    loads = [(first, device) for device in range(num_devices)]
    order = sorted(range(len(counts)), key=lambda kind: -costs[kind])
    taken = [[0] * num_devices for _ in counts]
    for kind in order:
        for _ in range(counts[kind] - rounds[kind] * num_devices):
            load, device = loads[0]
            heapq.heapreplace(loads, (load + costs[kind], device))
            taken[kind][device] += 1
    common = [min(of_kind) for of_kind in taken]
    all_rounds = [r + more for r, more in zip(rounds, common, strict=True)]
    left: list[list[tuple[int, int]]] = [[] for _ in range(num_devices)]
    for kind in order:
        units = iter(range(all_rounds[kind] * num_devices, counts[kind]))
        for device, number in enumerate(taken[kind]):
            left[device] += [(kind, next(units)) for _ in range(number - common[kind])]
    depth = max(map(len, left))
    per_device_batches = [[units[s] if s < len(units) else None for units in left] for s in range(depth)]
    return Assignment(all_rounds, per_device_batches, [load for load, _ in sorted(loads, key=lambda x: x[1])])


class MatrixKind(NamedTuple):
    """Equal matrices of an update, each of which one device computes.

    Attributes:
      shape: The shape of one.
      flops: Floating-point operations of one.
      paths: The parameters that they are, or are slices of.
    """

    shape: tuple[int, ...]
    num: int
    flops: float
    paths: tuple[str, ...]


class WholeMatrix(NamedTuple):
    """Matrix work of an update that every device does.

    Attributes:
      paths: The parameters that take part; none if it is not known.
      shape: The shape of the largest operand.
      reason: Why it is not divided.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{few(self.paths, 3) or 'not of one parameter'} {self.shape}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class MatrixWork:
    """The matrix work of an update.

    Attributes:
      kinds: The matrices that one device computes each.
      whole: What every device computes.
      busiest: Floating-point operations of the busiest device, without what every device computes.
      unknown: Why the plan cannot know; empty if it can.
    """

    kinds: tuple[MatrixKind, ...] = ()
    whole: tuple[WholeMatrix, ...] = ()
    busiest: float = 0.0
    unknown: str = ""

    @property
    def total(self) -> float:
        """Floating-point operations of all matrices that one device computes each."""
        return sum(kind.num * kind.flops for kind in self.kinds)

    def lines(self, axes: str, num_shards: int) -> list[str]:
        """Returns it as text: the busiest device, one line per kind, one line per matrix left whole."""
        head = f"matrix work over {axes} (N={num_shards}): "
        if self.unknown:
            return [head + self.unknown]
        if self.kinds:
            unit, size = next(((u, s) for u, s in UNITS if self.total >= s), UNITS[-1])
            head += f"busiest device {self.busiest / size:.3g} of {self.total / size:.3g} {unit}, "
            head += f"{self.total / self.busiest:.2f} times less than whole on each"
        lines = [head if self.kinds else head + "none is divided"] if self.kinds or self.whole else []
        for kind in self.kinds:
            unit, size = next(((u, s) for u, s in UNITS if kind.flops >= s), UNITS[-1])
            lines.append(f"{kind.num:5d} x {kind.shape}  {kind.flops / size:.3g} {unit} each  {few(kind.paths, 3)}")
        return lines + [f"  whole on every device: {x}" for x in self.whole]

    def to_dict(self) -> dict[str, object]:
        """Returns it as data for JSON."""
        return {
            "unknown": self.unknown,
            "busiest_flops": self.busiest,
            "total_flops": self.total,
            **picked(self, "kinds", "whole"),
        }


NO_MATRICES = MatrixWork()
UNITS = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))
