"""The candidates of `fit`, and the choice among them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from jzero._text import format_rows
from jzero.analysis.step_memory import StepMemory
from jzero.config.zero import ZeroConfig
from jzero.engine.recompute import Remat
from jzero.plan.table import format_bytes

__all__ = ["NEARLY", "RECOMPUTED", "Candidate", "Fit", "judge", "recomputation_rank"]

NEARLY = 1.01
"""Costs within this ratio count as equal."""

RECOMPUTED: dict[Remat | None, tuple[str, str]] = {
    False: ("none", "nothing recomputed"),
    "as_written": ("", ""),
    None: ("default", ""),
    "cheap": ("cheap", "what is cheap recomputed"),
    True: ("scans", "scans recomputed"),
}
"""The options `remat`, the least recomputation first: a name for tables, and a phrase."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
      config: What to partition, and how.
      mesh_shape: The size of each mesh axis.
      accumulate_steps: For `make_train_step`.
      remat: For `make_train_step`.
      memory: Its estimated memory.
      compiled_peak: Its peak according to the compiler; `None` if it was not compiled, or was refused.
      refused: Whether the compiler refused it; that for TPUs refuses programs that do not fit.
      lacks: What the host or its disk has too little of; empty if nothing, or if that is not known.
      disk_seconds: How long a step waits for a disk.
      verdict: Why it was chosen or passed over.
    """

    config: ZeroConfig
    mesh_shape: dict[str, int] = dataclasses.field(hash=False)
    accumulate_steps: int
    remat: Remat | None
    memory: StepMemory
    compiled_peak: int | None = None
    refused: bool = False
    lacks: str = ""
    disk_seconds: float = 0.0
    verdict: str = ""

    @property
    def peak(self) -> int:
        """Bytes on one device: the compiler's figure if it is known, else the estimate."""
        return self.memory.peak if self.compiled_peak is None else self.compiled_peak

    @property
    def is_compiled(self) -> bool:
        """Whether it was compiled, or refused."""
        return self.refused or self.compiled_peak is not None

    def fits(self, limit: int) -> bool:
        """Whether it needs at most `limit` bytes, as far as is known."""
        return not self.refused and not self.lacks and self.peak <= limit

    def cost(self) -> float:
        """Its cost in communication, and in waiting for a disk: seconds, or bytes if no rates of links are known."""
        seconds = self.memory.communication_seconds
        return self.memory.sent_bytes if seconds is None else seconds + self.disk_seconds

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data."""
        return {
            "stage": self.config.stage,
            "persistence_threshold": self.config.persistence_threshold,
            "node_axis": self.config.node_axis,
            "secondary_params": self.config.secondary_params,
            "secondary_grads": self.config.secondary_grads,
            "mesh": self.mesh_shape,
            "optimizer_state": self.config.offload.optimizer,
            "accumulate_steps": self.accumulate_steps,
            "remat": self.remat,
            "reckoned_peak": self.memory.peak,
            "compiled_peak": self.compiled_peak,
            "refused": self.refused,
            "gathered_bytes": self.memory.gathered_bytes,
            "planned_bytes": self.memory.planned_bytes,
            "sent_bytes": self.memory.sent_bytes,
            "nic_bytes": self.memory.nic_bytes,
            "communication_seconds": self.memory.communication_seconds,
            "flops": self.memory.flops,
            "host_bytes": self.memory.host,
            "disk_bytes": self.memory.disk,
            "disk_seconds": self.disk_seconds,
            "verdict": self.verdict,
        }


@dataclasses.dataclass(frozen=True)
class Fit:
    """The result of `fit`; `print` it for a table of all candidates.

    Attributes:
      machine: The machine.
      limit: Most bytes of a step on one device.
      tried: Every candidate, the cheapest in communication first.
      chosen: The first of them that fits, or `None`.
      notes: Remarks about the search, such as a missing compiler.
      workload: The model and the batch.

    Example:
      >>> make_state = lambda key: plain_state
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> choice = jzero.fit(make_state, loss_fn, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> choice.config.stage, choice.accumulate_steps
      (0, 1)
    """

    machine: str
    limit: int
    tried: tuple[Candidate, ...]
    chosen: Candidate | None
    notes: tuple[str, ...]
    workload: str = ""

    @property
    def _choice(self) -> Candidate:
        if self.chosen is None:
            raise ValueError(self._headline())
        return self.chosen

    @property
    def config(self) -> ZeroConfig:
        """The configuration to train with; raises a `ValueError` if nothing fits."""
        return self._choice.config

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The mesh to train on, for `make_mesh(**choice.mesh_shape)`."""
        return self._choice.mesh_shape

    @property
    def accumulate_steps(self) -> int:
        """For `make_train_step`."""
        return self._choice.accumulate_steps

    @property
    def remat(self) -> Remat | None:
        """For `make_train_step`."""
        return self._choice.remat

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        data = {
            "machine": self.machine,
            "workload": self.workload,
            "limit": self.limit,
            "chosen": self.chosen and self.chosen.to_dict(),
            "tried": [candidate.to_dict() for candidate in self.tried],
            "notes": self.notes,
        }
        return json.dumps(data, indent=2)

    def _headline(self) -> str:
        if self.chosen is not None:
            x = self.chosen
            how = "reckoned" if x.compiled_peak is None else "compiled"
            sizes = f"{format_bytes(x.peak)} ({how}) of {format_bytes(self.limit)} per device"
            return f"{self.machine}: {_describe(x)} fits: {sizes}"
        least = min(self.tried, key=lambda x: (x.refused, bool(x.lacks), x.peak))
        excess = f"{format_bytes(least.peak - self.limit)} more than the {format_bytes(self.limit)} there are"
        excess = least.lacks if least.lacks and least.peak <= self.limit else excess
        excess = "and the compiler refuses it for want of memory" if least.refused else excess
        need = f"{_describe(least)} with {format_bytes(least.peak)} per device"
        return f"{self.machine}: nothing fits. The least is {need}, {excess}."

    def __str__(self) -> str:
        header: tuple[str, ...] = (
            "stage",
            "mesh",
            "micro-batches",
            "remat",
            "whole up to",
            "secondary",
            "reckoned",
            "compiled",
            "sends",
            "disk",
            "verdict",
        )
        rows: list[tuple[str, ...]] = [
            (
                str(x.config.stage),
                ",".join(f"{name}={size}" for name, size in x.mesh_shape.items()),
                str(x.accumulate_steps),
                RECOMPUTED[x.remat][0],
                f"{x.config.persistence_threshold:,}",
                "yes" if x.config.secondary_params or x.config.secondary_grads else "",
                format_bytes(x.memory.peak),
                "refused" if x.refused else "" if x.compiled_peak is None else format_bytes(x.compiled_peak),
                format_bytes(x.memory.sent_bytes),
                f"{x.disk_seconds:.3g} s" if x.memory.disk else "",
                x.verdict,
            )
            for x in self.tried
        ]
        for i in (9, 5):
            if not any(row[i] for row in rows):
                header, rows = _without(header, i), [_without(row, i) for row in rows]
        table = format_rows([header, *rows], left=4, last_left=True)
        return "\n".join([self._headline(), self.workload, "", *table, *([""] if self.notes else []), *self.notes])


def _without(row: tuple[str, ...], i: int) -> tuple[str, ...]:
    return (*row[:i], *row[i + 1 :])


def recomputation_rank(x: Candidate) -> int:
    """Returns the amount of recomputation, as a rank."""
    return list(RECOMPUTED).index(x.remat)


def judge(tried: Sequence[Candidate], chosen: Candidate | None, limit: int) -> Iterator[Candidate]:
    """Yields the candidates with their verdicts."""
    for x in tried:
        if x is chosen:
            verdict = "chosen"
        elif x.refused:
            verdict = "refused by the compiler for want of memory"
        elif x.peak > limit:
            verdict = f"{format_bytes(x.peak - limit)} too much"
        elif x.lacks:
            verdict = x.lacks
        else:
            assert chosen is not None
            verdict = _why_not(x, chosen)
        yield dataclasses.replace(x, verdict=verdict)


def _why_not(x: Candidate, chosen: Candidate) -> str:
    if x.disk_seconds > NEARLY * chosen.disk_seconds:
        return f"fits; waits {x.disk_seconds:.3g} s for the disk"
    if x.cost() > NEARLY * chosen.cost():
        return f"fits; {x.cost() / max(chosen.cost(), 1e-30):.2f}x the communication"
    if x.memory.flops > NEARLY * chosen.memory.flops:
        return f"fits; {x.memory.flops / max(chosen.memory.flops, 1):.2f}x the arithmetic"
    if x.accumulate_steps > chosen.accumulate_steps:
        return "fits; more micro-batches"
    if recomputation_rank(x) > recomputation_rank(chosen):
        return "fits; recomputes for nothing"
    return "fits; no cheaper, a higher stage"


def _describe(x: Candidate) -> str:
    parts = [f"stage {x.config.stage}"]
    num_replicas = x.mesh_shape.get(str(x.config.replica_axis), 1)
    if num_replicas > 1:
        parts.append(f"{num_replicas} replicas")
    if x.config.node_axis is not None:
        once = x.config.secondary_params or x.config.secondary_grads
        parts.append(f"{x.mesh_shape[x.config.node_axis]} nodes" + ", secondary shares" * once)
    if x.memory.disk:
        parts.append("optimizer state on disk")
    if x.accumulate_steps > 1:
        parts.append(f"{x.accumulate_steps} micro-batches")
    if RECOMPUTED[x.remat][1]:
        parts.append(RECOMPUTED[x.remat][1])
    return ", ".join(parts)
