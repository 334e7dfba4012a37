"""The candidates of `fit`, and the choice among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jzero.analysis.memory_table import MemoryTable
from jzero.core.base.text import format_number, picked
from jzero.core.config.keep import Keep
from jzero.core.config.zero import ZeroConfig
from jzero.core.engine.recompute import Remat
from jzero.core.plan.table import format_bytes
from jzero.estimate.step_memory import StepMemory

CHOSEN = "chosen"
"""The verdict on the chosen candidate."""

REFUSED = "rejected by the compiler: out of memory"
"""The verdict on one that the compiler refused."""

CLOSE_TO_BEST = 1.01
"""Costs within this ratio count as equal."""

SURE_SHARE = 0.9
"""An estimated peak can be 10 % off, or more: below this share of the limit it fits, above its inverse it does not."""


class Recomputation(NamedTuple):
    """An option `remat`.

    Attributes:
      remat: For `make_train_step`.
      name: For tables.
      phrase: For sentences; may be empty.
    """

    remat: Remat | None
    name: str
    phrase: str


RECOMPUTED = (
    Recomputation(False, "none", "nothing recomputed"),
    Recomputation("as_written", "", ""),
    Recomputation(None, "default", ""),
    Recomputation("cheap", "cheap", "cheap activations recomputed"),
    Recomputation(True, "scans", "scans recomputed"),
)
"""The options that have names, the least recomputation first."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration to train with.

    Attributes:
      config: Its configuration.
      mesh_shape: The size of each mesh axis.
      accumulate_steps: For `make_train_step`.
      remat: For `make_train_step`.
      memory: Its estimated memory.
      compiled_peak: Its peak according to the compiler; `None` if it was not compiled, or was refused.
      compiled_seconds: The time of a usual step by the compiled schedule ([Note: A usual step]), without waits for a
        disk or the host; `None` if it was not compiled, or no rates are known.
      most_seconds: The same if each conditional runs its longest branch.
      refused: Whether the compiler rejected it as out of memory, as the TPU compiler does.
      lacks: The shortage of host memory or disk space, in words; empty if there is none, or if it is unknown.
      disk_seconds: How long a step waits for a disk.
      host_seconds: How long it waits for the link to the host; `None` if that link's rate is not known.
      verdict: Why it was chosen or passed over.
    """

    config: ZeroConfig
    mesh_shape: dict[str, int] = dataclasses.field(hash=False)
    accumulate_steps: int
    remat: Remat | None
    memory: StepMemory
    compiled_peak: int | None = None
    compiled_seconds: float | None = None
    most_seconds: float | None = None
    refused: bool = False
    lacks: str = ""
    disk_seconds: float = 0.0
    host_seconds: float | None = 0.0
    verdict: str = ""

    @property
    def peak(self) -> int:
        """Bytes on one device: the compiler's figure if known, else the estimate."""
        return self.memory.peak if self.compiled_peak is None else self.compiled_peak

    def ledger(self, limit: int) -> MemoryTable:
        """Returns the account of its memory, with the limit on one device."""
        memory = self.memory
        lacks = REFUSED if self.refused else self.lacks
        return MemoryTable(memory.states, memory.peak, self.compiled_peak, limit, memory.host, memory.disk, lacks)

    @property
    def is_compiled(self) -> bool:
        """Whether it was compiled, or refused."""
        return self.refused or self.compiled_peak is not None

    def fits(self, limit: int) -> bool:
        """Whether it needs at most `limit` bytes, as far as is known."""
        return not self.refused and not self.lacks and self.peak <= limit

    @property
    def keeps_params(self) -> bool:
        """Whether it keeps whole parameters between the passes."""
        return self.config.stage == 3 and not self.config.reshard_after_forward

    @property
    def waits(self) -> float:
        """Seconds that a step waits for a disk and for the host, as far as is known."""
        return self.disk_seconds + (self.host_seconds or 0.0)

    def cost(self) -> float:
        """Its estimated cost: seconds of a step, or bytes sent if no rates are known."""
        seconds = self.memory.seconds
        return self.memory.sent_bytes if seconds is None else seconds + self.waits

    def compiled_cost(self) -> float | None:
        """The seconds of a step by the compiled schedule; `None` if they are not known."""
        return None if self.compiled_seconds is None else self.compiled_seconds + self.waits

    def best_cost(self) -> float:
        """The compiler's figure if known, else the estimate."""
        return self.cost() if (compiled := self.compiled_cost()) is None else compiled

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data."""
        config, memory = self.config, self.memory
        return {
            **picked(config, "stage", "persistence_threshold", "reshard_after_forward", "node_axis"),
            **picked(config, "secondary_params", "secondary_grads"),
            "mesh": self.mesh_shape,
            "optimizer_state": config.offload.optimizer,
            "remat": self.remat if isinstance(self.remat, bool | str | None) else str(self.remat),
            **picked(self, "accumulate_steps", "compiled_peak", "refused", "compiled_seconds", "most_seconds"),
            "states_bytes": memory.states.total,
            "estimated_peak": memory.peak,
            "estimated_seconds": memory.seconds,
            **picked(memory, "gathered_bytes", "planned_bytes", "sent_bytes", "sent_by_axes", "nic_bytes"),
            **picked(memory, "communication_seconds", "flops"),
            "host_bytes": memory.host,
            "disk_bytes": memory.disk,
            **picked(self, "disk_seconds", "host_seconds", "verdict"),
        }


def recomputation(remat: Remat | None) -> Recomputation:
    """Returns the names of an option `remat`; a policy is its own name."""
    if isinstance(remat, Keep):
        params = "all parameters" if remat.params == "all" else _count(len(remat.params), "parameter")
        name = f"keeps {' and '.join(filter(None, [params, _count(remat.blocks, 'block')]))}"
        return Recomputation(remat, name, name)
    return next((x for x in RECOMPUTED if x.remat == remat), Recomputation(remat, str(remat), str(remat)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}" if number else ""


def recomputation_rank(remat: Remat | None) -> int:
    """Returns the amount of recomputation as a rank; of an option without a name, that of "cheap", which it refines."""
    names = [x.name for x in RECOMPUTED]
    name = recomputation(remat).name
    return names.index(name if name in names else "cheap")


def choose(tried: Sequence[Candidate], limit: int, *, confirmed: bool) -> Candidate | None:
    """Returns the fastest candidate that fits; candidates are sorted by cost.

    Args:
      tried: The candidates.
      limit: Most bytes on one device.
      confirmed: Whether it must have been compiled; then the times of compiled schedules decide.
    """
    fitting = [x for x in tried if x.fits(limit) and (x.is_compiled or not confirmed)]
    return min(fitting, key=lambda x: x.compiled_cost() or 0.0, default=None)


def judge(tried: Sequence[Candidate], chosen: Candidate | None, limit: int) -> Iterator[Candidate]:
    """Yields the candidates with their verdicts."""
    for x in tried:
        if x is chosen:
            verdict = CHOSEN
        elif x.refused:
            verdict = REFUSED
        elif x.peak > limit:
            verdict = f"{format_bytes(x.peak - limit)} too much"
        elif x.lacks:
            verdict = x.lacks
        else:
            assert chosen is not None
            verdict = _why_not(x, chosen)
        yield dataclasses.replace(x, verdict=verdict)


def _why_not(x: Candidate, chosen: Candidate) -> str:
    for link, seconds, fewer in (
        ("disk", x.disk_seconds, chosen.disk_seconds),
        ("host", x.host_seconds or 0.0, chosen.host_seconds or 0.0),
    ):
        if seconds > CLOSE_TO_BEST * fewer:
            return f"fits; waits {format_number(seconds, 3)} s for the {link}"
    cost, least = (x.best_cost(), chosen.best_cost()) if x.is_compiled else (x.cost(), chosen.cost())
    if cost > CLOSE_TO_BEST * least:
        measure = "communication" if x.memory.seconds is None else "time"
        return f"fits; {cost / max(least, 1e-30):.2f}x the {measure}"
    if x.memory.flops > CLOSE_TO_BEST * chosen.memory.flops:
        return f"fits; {x.memory.flops / max(chosen.memory.flops, 1):.2f}x the arithmetic"
    if x.accumulate_steps > chosen.accumulate_steps:
        return "fits; more micro-batches"
    if recomputation_rank(x.remat) > recomputation_rank(chosen.remat):
        return "fits; recomputes for nothing"
    return "fits; no faster"


def describe_candidate(x: Candidate) -> str:
    """Returns how a candidate trains, in words."""
    parts = [f"stage {x.config.stage}"]
    num_replicas = x.mesh_shape.get(str(x.config.replica_axis), 1)
    if x.keeps_params:
        parts.append("parameters kept between passes")
    if num_replicas > 1:
        parts.append(f"{num_replicas} replicas")
    if x.config.node_axis is not None:
        once = x.config.secondary_params or x.config.secondary_grads
        parts.append(f"{x.mesh_shape[x.config.node_axis]} nodes" + ", secondary shares" * once)
    if x.config.offload.optimizer != "none":
        parts.append(f"optimizer state on {'disk' if x.memory.disk else 'the host'}")
    if x.accumulate_steps > 1:
        parts.append(f"{x.accumulate_steps} micro-batches")
    return ", ".join(filter(None, [*parts, recomputation(x.remat).phrase]))
