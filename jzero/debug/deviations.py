"""How far training with jzero deviates from training on one device: the report of `check_equivalence`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jzero.core.base.text import Part, Report, Table

Row: TypeAlias = Sequence[str]

MAX_ROWS = 20
"""Steps and leaves that a report lists."""


@dataclasses.dataclass(frozen=True)
class StepPair:
    """One step of both runs.

    Attributes:
      loss: The loss with jzero.
      reference_loss: The loss on one device.
      grad_norm: Global norm of the gradients before clipping, with jzero.
      reference_grad_norm: The same on one device.
      applied: Whether jzero applied the step. Skipped steps are not compared.
    """

    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    applied: bool


@dataclasses.dataclass(frozen=True)
class LeafDeviation:
    """How far one leaf ends from the reference.

    Attributes:
      path: Its key path; for state that the loss changes, after the name of the field.
      absolute: Largest difference of an element.
      relative: The same, divided by the largest element of the reference.
      drift: Norm of the difference, divided by the norm of the reference's change of the leaf; near 1 the two runs have
        nothing in common. Use this number in 16 bits, where noise reverses the steps of single elements.
    """

    path: str
    absolute: float
    relative: float
    drift: float


@dataclasses.dataclass(frozen=True)
class EquivalenceReport(Report):
    """Deviations of a run with jzero from one on a single device. `print` it for a table; made by `check_equivalence`.

    Attributes:
      stage: The ZeRO stage.
      num_shards: N, the size of the ZeRO axis.
      steps: One `StepPair` per batch.
      leaves: One `LeafDeviation` per parameter (masters, in natural shapes) and per floating leaf of the state that
        the loss changes, after the last step.

    Example:
      >>> loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).sum()  # should be a mean
      >>> report = jzero.check_equivalence(loss_fn, plain_state, [jnp.ones((64, 512))], stage=3)
      >>> report.check()
      Traceback (most recent call last):
      AssertionError: The loss deviates by 0.875, more than 0.0001. ...
    """

    stage: int
    num_shards: int
    steps: tuple[StepPair, ...]
    leaves: tuple[LeafDeviation, ...]

    @property
    def loss(self) -> float:
        """Largest relative deviation of the loss in an applied step; infinite if no step was applied."""
        return max((_relative_deviation(x.loss, x.reference_loss) for x in self._applied), default=math.inf)

    @property
    def grad_norm(self) -> float:
        """Largest relative deviation of the gradient norm in an applied step; infinite if no step was applied."""
        return max((_relative_deviation(x.grad_norm, x.reference_grad_norm) for x in self._applied), default=math.inf)

    @property
    def params(self) -> float:
        """Largest relative deviation of a leaf."""
        return max((leaf.relative for leaf in self.leaves), default=0.0)

    @property
    def drift(self) -> float:
        """Largest drift of a leaf."""
        return max((leaf.drift for leaf in self.leaves), default=0.0)

    @property
    def worst(self) -> str:
        """Key path of the leaf with the largest relative deviation."""
        return max(self.leaves, key=lambda leaf: leaf.relative).path if self.leaves else ""

    @property
    def farthest(self) -> str:
        """Key path of the leaf with the largest drift."""
        return max(self.leaves, key=lambda leaf: leaf.drift).path if self.leaves else ""

    @property
    def _applied(self) -> list[StepPair]:
        return [x for x in self.steps if x.applied]

    def check(self, *, loss: float = 1e-4, grad_norm: float = 1e-4, params: float = 1e-4, drift: float = 0.1) -> None:
        """Raises if a deviation is too large.

        The defaults suit float32 and tens of steps, where another order of summation costs about 1e-6. In 16 bits,
        2e-2 is usual for the first two. `params` must then allow for some steps of the learning rate, since noise
        reverses single elements, and `drift` tells whether a leaf is trained correctly. Adam ignores a constant factor
        in the gradients: only the loss and the gradient norm show it. Adam also turns pure rounding noise into full
        steps. So parameters whose gradient is zero up to rounding (a bias before a normalization) deviate without
        meaning anything: switch them off (`use_bias=False`).

        Args:
          loss: Largest allowed relative deviation of the loss.
          grad_norm: Largest allowed relative deviation of the gradient norm.
          params: Largest allowed relative deviation of a leaf.
          drift: Largest allowed drift of a leaf.

        Raises:
          AssertionError: Some deviation is larger, or not a number; the message has the table.
        """
        compared = [
            ("loss deviates", self.loss, loss),
            ("gradient norm deviates", self.grad_norm, grad_norm),
            (f"leaf {self.worst!r} deviates", self.params, params),
            (f"leaf {self.farthest!r} drifts", self.drift, drift),
        ]
        over = [f"The {what} by {x:.3g}, more than {limit:g}." for what, x, limit in compared if x > limit]
        if over:
            raise AssertionError(" ".join(over) + f"\n\n{self}")

    def parts(self) -> list[Part]:
        """Returns both tables."""
        skipped = [i for i, x in enumerate(self.steps) if not x.applied]
        head = [
            f"jzero (ZeRO stage {self.stage}, N={self.num_shards}) against one device with plain optax, "
            f"{len(self.steps)} steps",
            f"largest relative deviation: loss {self.loss:.2g}, gradient norm {self.grad_norm:.2g}, "
            f"leaves {self.params:.2g} ({self.worst}); largest drift: {self.drift:.2g} ({self.farthest})",
            *([f"steps that jzero skipped: {skipped}"] if skipped else []),
        ]
        steps: list[Row] = [("step", "loss", "reference", "deviation", "grad norm", "reference", "deviation")]
        steps += [(str(i), *_step_cells(x)) for i, x in enumerate(self.steps)]
        leaves: list[Row] = [("leaf", "absolute", "relative", "drift")]
        worst_first = sorted(self.leaves, key=lambda leaf: leaf.relative, reverse=True)
        leaves += [(x.path, f"{x.absolute:.2g}", f"{x.relative:.2g}", f"{x.drift:.2g}") for x in worst_first]
        return [*head, "", Table(steps, left=1, max_rows=MAX_ROWS), "", Table(leaves, left=1, max_rows=MAX_ROWS)]


def leaf_deviation(path: str, ours: np.ndarray, reference: np.ndarray, before: np.ndarray) -> LeafDeviation:
    """Returns how far a leaf ends from the reference.

    Args:
      path: Its key path.
      ours: Its values with jzero.
      reference: Its values on one device.
      before: Its values before the first step.
    """
    if not (np.isfinite(ours).all() and np.isfinite(reference).all()):
        return LeafDeviation(path, math.inf, math.inf, math.inf)
    absolute, largest = (float(np.max(np.abs(x), initial=0.0)) for x in (ours - reference, reference))
    apart, moved = (float(np.linalg.norm(x)) for x in (ours - reference, reference - before))
    return LeafDeviation(path, absolute, _part(absolute, largest), _part(apart, moved))


def _relative_deviation(x: float, reference: float) -> float:
    return _part(abs(x - reference), abs(reference))


def _part(difference: float, size: float) -> float:
    """Returns `difference / size`; infinity if that is not a number."""
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else math.inf if difference else 0.0


def _step_cells(x: StepPair) -> tuple[str, ...]:
    pairs = ((x.loss, x.reference_loss), (x.grad_norm, x.reference_grad_norm))
    return tuple(cell for a, b in pairs for cell in (f"{a:.7g}", f"{b:.7g}", f"{_relative_deviation(a, b):.2g}"))
