"""The metrics of training steps: a step returns no others, and a monitor takes these from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from jzero.core.state.adapter import Metrics


class StepMetric(NamedTuple):
    """A metric of a step.

    Attributes:
      kind: "number", "flag", "rate", "share" (of a duration), or "tree" for several of the user's own.
      meaning: What it says, in which unit, and which steps return it.
    """

    kind: str
    meaning: str


def _of_records(where: str, steps: str) -> dict[str, StepMetric]:
    return {
        f"perf/{where}_read_bytes_per_s": StepMetric("rate", f"bytes/s that the update read; of {steps}"),
        f"perf/{where}_write_bytes_per_s": StepMetric("rate", f"bytes/s that the update wrote; of {steps}"),
        f"perf/{where}_wait_share": StepMetric("share", f"of the update, when the step waited for it; of {steps}"),
    }


STEP_METRICS: dict[str, StepMetric] = {
    "loss": StepMetric("number", "the mean over the global batch"),
    "grad_norm": StepMetric("number", "over all parameters, before clipping"),
    "step_applied": StepMetric("flag", "whether its gradients are applied"),
    "loss_scale": StepMetric("number", "of this step; of steps with a loss scale"),
    "aux": StepMetric("tree", "what the loss returns beside its value; of steps with `has_aux`"),
    **_of_records("disk", "steps with records on disk"),
    **_of_records("host", "steps with records in memory (`delay=1` or `zenflow`)"),
}
"""All metrics of steps, by path."""


def step_metrics(values: dict[str, Any]) -> Metrics:
    """Returns values by path, such as `perf/disk_wait_share`, as the tree of metrics that a step returns."""
    tree: Metrics = {}
    for path, value in values.items():
        assert path in STEP_METRICS, path
        *groups, name = path.split("/")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return tree
