"""The report of `jzero doctor --disk`: whether a folder can hold optimizer state, and how fast it reads and writes."""

from __future__ import annotations

import dataclasses
import logging

from jzero.core.disk.files import check_folder, file_system, free_bytes
from jzero.core.disk.rates import DiskRates, measure_rates
from jzero.core.plan.table import format_bytes

BYTES_PER_PARAMETER = 12
"""Bytes that an update reads, and writes, per 16-bit parameter: master, mean and variance of Adam in fp32."""


@dataclasses.dataclass(frozen=True)
class DiskReport:
    """A folder for `Offload.path`.

    Attributes:
      folder: Its absolute path.
      file_system: The type, e.g. `ext4`.
      free_bytes: Bytes that an ordinary user may still allocate.
      fallbacks: What jzero does if the file system lacks `O_TMPFILE` or `O_DIRECT`.
      rates: Bytes per second.
      seconds_per_billion: Seconds that the disk takes for an update of 10^9 16-bit parameters with Adam.
    """

    folder: str
    file_system: str
    free_bytes: int
    fallbacks: tuple[str, ...]
    rates: DiskRates
    seconds_per_billion: float

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and values, for a table."""
        fallbacks = [("file system", text) for text in self.fallbacks]
        return [
            ("folder", f"{self.folder} ({self.file_system}), {format_bytes(self.free_bytes)} free"),
            *(fallbacks or [("file system", "has O_TMPFILE and O_DIRECT")]),
            ("read", f"{format_bytes(self.rates.read)}/s"),
            ("write", f"{format_bytes(self.rates.write)}/s"),
            ("both at once", f"{format_bytes(self.rates.duplex)}/s each way"),
            ("update", f"{self.seconds_per_billion:.1f} s per 10^9 16-bit parameters with Adam"),
        ]


def examine_disk(path: str, num_bytes: int) -> DiskReport:
    """Measures a disk.

    Args:
      path: A folder on it.
      num_bytes: Space to use for it.

    Raises:
      ValueError: It is not a folder that this process may write to.
      DiskError: There is too little space, or the disk fails.
    """
    folder = check_folder(path, "--disk")
    free = free_bytes(folder)
    logging.getLogger("jzero").info("Measuring the disk of %s with %s.", folder, format_bytes(num_bytes))
    rates, fallbacks = measure_rates(folder, num_bytes)
    seconds = 1e9 * BYTES_PER_PARAMETER / rates.duplex
    return DiskReport(folder, file_system(folder), free, fallbacks, rates, seconds)
