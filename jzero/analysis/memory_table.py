"""The memory of a training step on one device: each figure, and its source."""

from __future__ import annotations

import dataclasses
from typing import Any

from jzero.core.base.text import Part, Report, Table, picked
from jzero.core.plan.planned_bytes import BytesPerDevice
from jzero.core.plan.table import format_bytes

STEP = "activations, gathered weights, logits"
LESS = f"{STEP}, less the gradients that never exist at once"
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def unit_of(most: int) -> str:
    """Returns the unit for a table whose largest figure is so many bytes."""
    return next(name for name, size in UNITS.items() if 2 * most >= size or size == 1)


def in_unit(num_bytes: int, unit: str) -> str:
    """Returns a number of bytes in a unit; in a smaller one if it would be 0."""
    number = f"{num_bytes / UNITS[unit]:.{0 if unit == 'B' else 2}f}"
    return format_bytes(num_bytes) if num_bytes and not float(number) else f"{number} {unit}"


@dataclasses.dataclass(frozen=True)
class MemoryTable(Report):
    """The bytes of a training step on one device. `print` it for the account.

    Attributes:
      states: Parameters, gradients and optimizer state: exact, and the same in every ledger.
      estimated_peak: The most memory of a step, as estimated from its trace; `None` if it was not traced.
      compiled_peak: The same by the compiler; `None` if it was not compiled.
      limit: The memory of the device that a step may use; `None` if unknown.
      host: State in the memory of the device's host, which is no part of `states`.
      disk: State on disk, likewise; both copies.
      lacks: Why the step does not fit beside this, in words; may be empty.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()
      >>> choice = jzero.fit(plain_state, loss_fn, jnp.ones((64, 512)), topology="h200:8", confirm=False)
      >>> choice.ledger.states_bytes == choice.ledger.states.total, choice.ledger.fits
      (True, True)
    """

    states: BytesPerDevice
    estimated_peak: int | None = None
    compiled_peak: int | None = None
    limit: int | None = None
    host: int = 0
    disk: int = 0
    lacks: str = ""

    @property
    def states_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.states.total

    @property
    def peak(self) -> int | None:
        """The most memory of a step: the compiler's figure if it is known, else the estimate."""
        return self.estimated_peak if self.compiled_peak is None else self.compiled_peak

    @property
    def step_bytes(self) -> int | None:
        """The estimated memory of a step beside the states."""
        return None if self.estimated_peak is None else self.estimated_peak - self.states_bytes

    @property
    def left(self) -> int | None:
        """The device memory that the step leaves; below 0 if it does not fit.

        Of a step that was not traced, what parameters and optimizer state leave, since whole gradients need not exist
        at once.
        """
        used = self.states.params + self.states.opt_state if self.peak is None else self.peak
        return None if self.limit is None else self.limit - used

    @property
    def fits(self) -> bool | None:
        """Whether the step fits; `None` if the memory is not known, or only that what stays between steps does."""
        if self.lacks:
            return False
        if self.left is None or (self.peak is None and self.left >= 0):
            return None
        return self.left >= 0

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures as plain data."""
        return {
            **picked(self, "states_bytes", "states", "step_bytes", "estimated_peak", "compiled_peak", "limit"),
            **picked(self, "fits", "left"),
            "on_host": self.host,
            "on_disk": self.disk,
        }

    def parts(self) -> list[Part]:
        """Returns the ledger."""
        unit = unit_of(max(self.states_bytes, self.estimated_peak or 0, self.compiled_peak or 0))

        def show(num_bytes: int | None) -> str:
            return "-" if num_bytes is None else in_unit(num_bytes, unit)

        params, grads, opt_state = (show(x).removesuffix(f" {unit}") for x in self.states)
        parts = f"parameters {params}, gradients up to {grads}, optimizer {opt_state}"
        rows = [
            ("states", "exact", show(self.states_bytes), parts),
            ("step", "estimated", show(self.step_bytes), STEP if (self.step_bytes or 0) >= 0 else LESS),
            ("peak", "estimated", show(self.estimated_peak), "" if self.estimated_peak else "jzero fit"),
            ("peak", "compiled", show(self.compiled_peak), "" if self.compiled_peak else "jzero analyze"),
        ]
        if self.limit is not None:
            rows.append(("device", "usable", format_bytes(self.limit), self._verdict(self.limit)))
        rows += [(f"on {name}", "exact", show(x), "") for name, x in (("host", self.host), ("disk", self.disk)) if x]
        return [Table(rows, left=2, last_left=True)]

    def _verdict(self, limit: int) -> str:
        free = self.left or 0
        if free < 0:
            subject = "parameters and optimizer state take" if self.peak is None else "the step takes"
            return f"does not fit: {subject} {format_bytes(-free)} more"
        if self.lacks:
            return f"does not fit: {self.lacks}"
        if self.peak is None:
            return f"parameters and optimizer state leave {format_bytes(free)} for gradients and the step"
        return f"fits: {format_bytes(free)} left"
