"""Decides which checkpoints are kept, by policies of Orbax and one of its own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsFloat

import orbax.checkpoint as ocp
from etils import epath

from jzero.checkpoint.damage import is_there, reading


@dataclasses.dataclass(frozen=True)
class Retention:
    """The rules that keep checkpoints: arguments of `CheckpointManager`."""

    max_to_keep: int | None
    keep_every_steps: int | None
    best_metric: str | None
    best_mode: Literal["max", "min"]

    def policy(self) -> Any:
        """Returns the rules as Orbax's policy."""
        policies = ocp.checkpoint_managers
        if self.max_to_keep is None:
            return policies.LatestN(None)
        rules: list[Any] = [policies.LatestN(self.max_to_keep if self.best_metric is None else 1)]
        if self.best_metric is not None:
            rules.append(_Best(self, self.max_to_keep))
        if self.keep_every_steps is not None:
            rules.append(policies.EveryNSteps(self.keep_every_steps))
        return policies.AnyPreservationPolicy(rules)

    def has_metric(self, metrics: Mapping[str, SupportsFloat] | None) -> bool:
        """Whether a checkpoint was saved with the metric that ranks checkpoints."""
        return metrics is not None and self.best_metric in metrics

    def score(self, metrics: Mapping[str, SupportsFloat] | None) -> float:
        """Returns a checkpoint's score by its metrics; the worst if the metric is missing or NaN."""
        value = float((metrics or {}).get(str(self.best_metric), math.nan))
        if math.isnan(value):
            return -math.inf
        return value if self.best_mode == "max" else -value

    def check(self, metrics: Mapping[str, SupportsFloat] | None) -> None:
        """Raises unless `metrics` has the metric that ranks checkpoints."""
        if self.best_metric is not None and not self.has_metric(metrics):
            raise ValueError(
                f"`metrics` must hold {self.best_metric!r}, by which checkpoints are kept: got "
                f"{None if metrics is None else sorted(metrics)}."
            )

    def best(self, steps: Mapping[int, epath.Path]) -> int | None:
        """Returns the best of the steps, the latest among equals; `None` if none has the metric."""
        if self.best_metric is None:
            raise ValueError("There is no best step without a metric: pass `best_metric=` to the manager.")
        scores = {}
        for step, path in steps.items():
            file = path / "metrics" / "metrics"
            with reading(file):
                if is_there(file):
                    scores[step] = self.score(json.loads(file.read_text()))
        ranked = [step for step, score in scores.items() if score > -math.inf]
        return max(ranked, key=lambda step: (scores[step], step), default=None)


@dataclasses.dataclass(frozen=True)
class _Best:
    """Ranks by one metric of several: Orbax's `BestN` drops checkpoints without it, this keeps them."""

    retention: Retention
    num: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        ranked = [info for info in checkpoints if self.retention.has_metric(info.metrics)]
        ranked.sort(key=lambda info: self.retention.score(info.metrics))
        best = {info.step for info in ranked[-self.num :]}
        return [info.step in best or not self.retention.has_metric(info.metrics) for info in checkpoints]
