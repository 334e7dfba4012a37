"""The plan of a train state: the layout and bytes of every leaf, and the reason for each leaf that stays whole."""

from __future__ import annotations

import dataclasses
from typing import Any

from jzero.core.base.text import Part, Report, printed
from jzero.core.plan.planned_bytes import PlannedBytes
from jzero.core.plan.table import plan_as_dict, plan_parts


@dataclasses.dataclass(frozen=True, eq=False)
class ZeroPlan(PlannedBytes, Report):
    """Where every leaf of a train state lives. Immutable, hashable, made by `plan_train_state`.

    Attributes:
      config: Its configuration.
      mesh: The mesh; abstract if the plan was made without devices.
      leaves: One `LeafPlan` per parameter.
      opt_leaves: One `StateLeaf` per leaf of the optimizer state as stored; those of the user's own optimizer first.
      other_leaves: One `StateLeaf` per leaf of the state's other fields (`step`, `batch_stats` …).
      closed_over: Arrays that the loss closes over, of more elements than the persistence threshold and than 4,096.
        Every device holds them whole; only the plan from `step.plan(state, batch)` knows them.
      kept: What a step with `remat=Keep(...)` keeps between its passes; likewise.
      matrices: The matrix work of the optimizer: what one device computes, and what all of them do.
      explicit_axes: The mesh axes that are Explicit while jax traces the loss.
      params_treedef: Structure of `state.params`.
      opt_treedef: Structure of `state.opt_state`, as stored.
      inner_treedef: Structure of the state of the user's own optimizer; equal to `opt_treedef` unless the
        precision policy, or state in records, adds state.

    Example:
      >>> plan = jzero.plan_of(state)
      >>> tuple(plan.params["w"]), plan.bytes_per_device.params == 512 * 512 * 4 // plan.num_shards
      (('data',), True)
    """

    def parts(self, *, max_rows: int | None = 40) -> list[Part]:
        """Returns what `table` prints."""
        return plan_parts(self, max_rows=max_rows)

    def table(self, *, max_rows: int | None = 40) -> str:
        """Returns the plan as text: bytes by term, one row per parameter, the leaves that stay whole.

        Args:
          max_rows: Rows per section; the rest is only counted. `None` for all rows.
        """
        return printed(self.parts(max_rows=max_rows))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data: bytes by term, one row per parameter, the leaves that stay whole."""
        return plan_as_dict(self)
