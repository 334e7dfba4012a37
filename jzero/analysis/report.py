"""The report of `analyze` about a compiled step, as data, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from jzero.analysis.collectives import CompiledCollective
from jzero.analysis.figure import draw, draw_course, draw_memory, draw_timeline
from jzero.analysis.memory import Memory
from jzero.analysis.memory_table import MemoryTable
from jzero.analysis.schedule import Timeline, trace_of
from jzero.analysis.violations import MATRICES, PlanViolation
from jzero.core.base.text import Part, Report, Table, as_data, picked
from jzero.core.layout.route import bytes_on_port
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.table import format_bytes
from jzero.estimate.step_memory import StepMemory, activation_table

NO_PLAN = "no argument of the function is a state sharded by jzero. Pass `plan=` to `analyze`."


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind, axis, dtype and use, inside or outside loops; merged ones count under each dtype.

    Attributes:
      kind: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`.
      axis: The mesh axes along which its devices differ, joined by `+`.
      dtype: HLO's name of the element type.
      in_loop: Whether they are inside a loop.
      count: Operations per step, multiplied by the trip counts of loops.
      elements: Elements per step in ZeRO's count: a gather or reduce-scatter of Ψ counts Ψ, an all-reduce 2Ψ.
      sent_bytes: Bytes that one device sends per step, in rings.
      level: "within" nodes, "between" nodes, or empty if nodes are not known.
      nic_bytes: Bytes per step on the network port of one device.
      use: "matrices" if they bring matrices to the devices that compute their update and back, else empty.
    """

    kind: str
    axis: str
    dtype: str
    in_loop: bool
    count: int
    elements: int
    sent_bytes: int
    level: str = ""
    nic_bytes: int = 0
    use: str = ""


def rows_of(collectives: Iterable[tuple[CompiledCollective, str, int]]) -> tuple[CollectiveRow, ...]:
    """Returns the rows for collectives, each given with its axis and the nodes of its group, 0 if they are unknown."""
    rows: dict[tuple[str, str, str, bool, str, str], CollectiveRow] = {}
    for merged, axis, num_nodes in collectives:
        for c in merged.by_dtype():
            level = ("", "within")[num_nodes] if num_nodes < 2 else "between"
            use = "matrices" if c.kind == "all-to-all" and MATRICES in c.op_name else ""
            key = (c.kind, axis, c.dtype, c.in_loop, level, use)
            old = rows.get(key, CollectiveRow(*key[:4], count=0, elements=0, sent_bytes=0, level=level, use=use))
            on_port = bytes_on_port(c.kind, c.sent_bytes, c.num_devices, max(num_nodes, 1))
            rows[key] = dataclasses.replace(
                old,
                count=old.count + c.times,
                elements=old.elements + c.elements,
                sent_bytes=old.sent_bytes + round(c.sent_bytes * c.times),
                nic_bytes=old.nic_bytes + round(on_port * c.times),
            )
    return tuple(sorted(rows.values(), key=lambda row: (-row.elements, row.kind, row.in_loop)))


@dataclasses.dataclass(frozen=True)
class AnalysisReport(Report):
    """Facts about a compiled step; `print` it for tables.

    Attributes:
      machine: The machine that it was compiled for.
      num_devices: The number of its devices.
      memory: Bytes per device by class.
      collectives: One row per kind, axis, dtype, use, and loop or not.
      communication_elements: Elements that one step moves in ZeRO's count, to compare with 2Ψ or 3Ψ.
      exposed_communication: Share of collective time that no computation covers, by a model of the machine
        (`jzero.analysis.schedule`); `None` if its rates are unknown.
      timeline: The busy times of the two streams of that model; `None` if its rates are unknown.
      plan: The plan of the state among the arguments, if there is one.
      violations: Departures of the program from the plan; `verify` raises them.
      notes: Facts that the figures leave out, and facts that are unknown.
      estimated: For a training step, the memory by `estimate_step_memory`, with activations by layer. It models the
        compilers for GPUs and TPUs; the one for CPUs orders unrolled code differently.
      limit: The memory of a device that a step may use, 90 % of it; `None` if the machine is not known.

    Example:
      >>> step = jzero.make_train_step(lambda params, batch: jnp.square(batch @ params["w"]).mean())
      >>> report = jzero.analyze(step, state, jnp.ones((8, 512)))
      >>> isinstance(report, jzero.AnalysisReport), report.memory.aliased > 0
      (True, True)
    """

    machine: str
    num_devices: int
    memory: Memory
    collectives: tuple[CollectiveRow, ...]
    communication_elements: int
    exposed_communication: float | None
    timeline: Timeline | None = dataclasses.field(repr=False)
    plan: ZeroPlan | None = dataclasses.field(repr=False)
    violations: tuple[str, ...]
    notes: tuple[str, ...]
    estimated: StepMemory | None = None
    limit: int | None = None

    @property
    def nic_bytes(self) -> int:
        """Bytes per step that cross the network port of one device: 0 on one node, or if nodes are not known."""
        return sum(row.nic_bytes for row in self.collectives)

    @property
    def ledger(self) -> MemoryTable:
        """The account of a training step's memory.

        Raises:
          ValueError: There is no plan, so no states are known.
        """
        if self.plan is None:
            raise ValueError(f"There are no states to account for: {NO_PLAN}")
        estimated = None if self.estimated is None else self.estimated.peak
        return MemoryTable(self.plan.bytes_per_device, estimated, self.memory.peak, self.limit, self.memory.host)

    def verify(self) -> None:
        """Raises if the compiled program departs from the plan.

        Raises:
          PlanViolation: It does; the message lists every departure.
          ValueError: There is no plan to compare with.
        """
        if self.plan is None:
            raise ValueError(f"There is no plan to verify against: {NO_PLAN}")
        if self.violations:
            raise PlanViolation(self.violations)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything but the timeline's spans as plain data; for the plan, its stage, devices and sizes."""
        plain = {f.name for f in dataclasses.fields(self)} - {"timeline", "plan"}
        data = picked(self, *plain, "nic_bytes")
        data["timeline"] = self.timeline and self.timeline.totals()
        data["plan"] = self.plan and self.plan.summary()
        return data

    def save_figure(self, path: str) -> None:
        """Draws memory by class and, as far as there are such, over the time of a step, and the timeline.

        Args:
          path: The file; its suffix chooses the format (`.png`, `.svg`).

        Raises:
          ImportError: matplotlib is not installed.
        """
        parts: list[Callable[[Any], None]] = [functools.partial(draw_memory, memory=as_data(self.memory))]
        if self.estimated is not None:
            parts.append(functools.partial(draw_course, memory=self.estimated, limit=self.limit))
        if self.timeline is not None:
            parts.append(functools.partial(draw_timeline, timeline=self.timeline))
        draw(path, "\n".join(self._heading()), parts)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the modelled timeline as a trace, for https://ui.perfetto.dev or `chrome://tracing`.

        Its tracks are the device's computation and its waits for collectives, the links within a node, and the network
        between nodes. Times are those of the model, not of a run.

        Args:
          path: The file, such as `"trace.json"`.

        Raises:
          ValueError: There is no timeline, since the machine's rates are unknown.
        """
        if self.timeline is None:
            raise ValueError(
                f"There is no timeline to write: the rates of this machine ({self.machine}) are unknown. Compile for "
                'one that jzero knows, `analyze(..., topology="h100:8")`.'
            )
        pathlib.Path(path).write_text(json.dumps(trace_of(self.timeline, self._heading()[0])))

    def parts(self) -> list[Part]:
        """Returns memory, collectives and notes."""
        return [*self._heading(), *self._memory_lines(), *self._collective_lines(), *self._remarks()]

    def _heading(self) -> list[str]:
        plan = f", ZeRO stage {self.plan.config.stage} over {self.plan.num_shards}" if self.plan else ""
        return [f"Compiled for {self.machine}: {self.num_devices} devices{plan}"]

    def _memory_lines(self) -> list[Part]:
        sizes = as_data(self.memory).items()
        rows = [(name, format_bytes(size), "") for name, size in sizes]
        if self.estimated is None:
            return ["", "memory per device", Table(rows, left=1, indent=2)]
        off = f"{self.estimated.peak / self.memory.peak - 1:+.1%} off"
        off = "like" if off[1:] == "0.0% off" else off
        rows.append(("estimated", format_bytes(self.estimated.peak), f"from the trace, {off} the peak"))
        table = Table(rows, left=1, last_left=True, indent=2)
        return ["", "memory per device", table, "", activation_table(self.estimated.activations)]

    def _collective_lines(self) -> list[Part]:
        found = self.collectives
        columns = {
            "collective": [r.kind for r in found],
            "axis": [r.axis for r in found],
            "dtype": [r.dtype for r in found],
            "level": [r.level if self.nic_bytes else "" for r in found],
            "use": [r.use for r in found],
            "in loop": ["yes" if r.in_loop else "" for r in found],
            "per step": [str(r.count) for r in found],
            "elements": [f"{r.elements:,}" for r in found],
            "sent": [format_bytes(r.sent_bytes) for r in found],
            "per port": [format_bytes(r.nic_bytes) if r.nic_bytes else "" for r in found],
        }
        rows = [tuple(columns), *zip(*columns.values(), strict=True)]
        table = Table(rows, left=6, optional=("level", "use", "per port"))
        lines: list[Part] = ["", table if found else "no collectives"]
        total = f"{self.communication_elements:,} elements per step"
        size = sum(leaf.param.size for leaf in self.plan.leaves) if self.plan else 0
        lines.append(total + (f" = {self.communication_elements / size:.2f} × {size:,} parameters" if size else ""))
        if self.nic_bytes:
            lines.append(f"{format_bytes(self.nic_bytes)} per step and network port")
        if self.timeline is not None and self.exposed_communication is not None:
            totals = self.timeline.totals()
            lines.append(
                f"modelled step {totals['seconds'] * 1e3:.3f} ms, collectives {totals['communication'] * 1e3:.3f} ms, "
                f"of which exposed {self.exposed_communication:.0%}"
            )
        return lines

    def _remarks(self) -> list[str]:
        lines: list[str] = []
        for title, texts in (("departures from the plan", self.violations), ("notes", self.notes)):
            lines += ["", title, *(f"  {text}" for text in texts)] if texts else []
        return lines
