"""Memory and disks of a machine's hosts: whether a candidate's state fits there, and how long transfers take."""

from __future__ import annotations

import dataclasses
import math

from jzero.core.config.offload import Offload
from jzero.core.config.settings import check, number, optional
from jzero.core.plan.table import format_bytes
from jzero.estimate.step_memory import StepMemory
from jzero.machines.machine import Machine

POSITIVE = optional(number("a number > 0", lambda x: 0 < x < math.inf))


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The memory and the local disk of one host.

    Attributes:
      devices: Its devices.
      host_bytes: What the state may take of its memory; `None` if that is not known.
      disk_path: A folder on the disk; `None` to try no disk.
      disk_bytes: What the state may take of it.
      disk_bytes_per_s: Its rate in each direction, both at once.
    """

    devices: int
    host_bytes: float | None = None
    disk_path: str | None = None
    disk_bytes: float | None = None
    disk_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "disk_bytes_per_s"):
            check(name, getattr(self, name), POSITIVE)
        if self.disk_path is not None and None in (self.disk_bytes, self.disk_bytes_per_s):
            raise ValueError(
                "`disk_path` lets `fit` try optimizer state on a disk, so it must know that disk: got "
                f"disk_bytes={self.disk_bytes!r} and disk_bytes_per_s={self.disk_bytes_per_s!r}. "
                "`jzero doctor --disk PATH` measures both."
            )

    def offloads(self, base: Offload) -> list[Offload]:
        """Returns the offloads to try: the configuration's, and optimizer state on disk."""
        if self.disk_path is None or base.optimizer == "disk":
            return [base]
        return [base, dataclasses.replace(base, optimizer="disk", path=self.disk_path)]

    def lacks(self, memory: StepMemory, offload: Offload) -> str:
        """Returns which memory of a host is too small; an empty string if all fits."""
        buffers = (2 * offload.disk_threads + 1) * offload.chunk_bytes if memory.disk else 0
        needs = {
            "host": (self.devices * memory.host + buffers, self.host_bytes),
            "disk": (self.devices * memory.disk, self.disk_bytes),
        }
        over = {name: size - has for name, (size, has) in needs.items() if has is not None and size > has}
        return ", ".join(f"{format_bytes(excess)} too much for the {name}" for name, excess in over.items())

    def disk_seconds(self, memory: StepMemory, offload: Offload) -> float:
        """Returns how long a step waits for the disk if the update reads and writes everything once."""
        if not memory.disk or self.disk_bytes_per_s is None:
            return 0.0
        return _waits(self.devices * memory.disk / 2 / self.disk_bytes_per_s, memory, offload)

    def host_seconds(self, memory: StepMemory, offload: Offload, hardware: Machine | None) -> float | None:
        """Returns how long a step waits for the links to the host; `None` if it uses them and their rate is unknown.

        The update reads and writes everything once, both at once; one on the host's CPU receives gradients and returns
        parameters.
        """
        if not memory.host:
            return 0.0
        if hardware is None or hardware.host_link_bytes_per_s is None:
            return None
        moved = memory.host if offload.compute == "device" else memory.params
        return _waits(moved / hardware.host_link_bytes_per_s, memory, offload)


def _waits(seconds: float, memory: StepMemory, offload: Offload) -> float:
    """Returns how long a step waits for an update's transfers; the passes hide those of a late one."""
    return max(0.0, seconds - (memory.seconds or 0.0)) if offload.delays_updates else seconds
