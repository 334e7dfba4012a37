"""The answer of a memory command: model and workload, the ledger, DeepSpeed's formula, and a plan, fit or analysis."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jzero.analysis.fit_report import Fit
from jzero.analysis.memory_table import MemoryTable
from jzero.cli.request import PlanRequest
from jzero.cli.source import ModelSource
from jzero.core.base.text import Part, Report, picked
from jzero.core.config.offload import Offload
from jzero.core.config.zero import ZeroConfig
from jzero.core.plan.table import format_bytes
from jzero.core.state.model_size import count_params
from jzero.core.state.shard import plan_train_state
from jzero.deepspeed.formulas import BUFFER_FACTOR, find_row, tabulate

HOST = Offload(optimizer="host")
TERMS = {
    (1, Offload()): "4 + 12/N bytes per parameter",
    (2, Offload()): "4 + 16/N bytes per parameter",
    (3, Offload()): "18/N bytes per parameter",
    (1, HOST): "4 bytes per parameter",
    (2, HOST): "2 bytes per parameter",
    (3, HOST): "2/N bytes per parameter",
}
"""The terms of DeepSpeed's formulas; it has none for other layouts."""

PER_LAYER = ("inverse_frequencies", "windows")
"""Fields that are long, and change no size."""


@dataclasses.dataclass(frozen=True)
class Account(Report):
    """The answer of a memory command.

    Attributes:
      title: Model and workload, a line each.
      ledger: The memory of a step.
      num_params: The parameters of the model, adapters included.
      num_devices: The devices.
      config: The layout.
      deepspeed_bytes: The states of one device by DeepSpeed's formula; `None` for a layout that has none.
      sizes: The sizes of a decoder, as data.
      result: The plan, fit or analysis; `None` if there is none.
      every: Whether all rows of a fit are shown.
    """

    title: tuple[str, str]
    ledger: MemoryTable
    num_params: int
    num_devices: int
    config: ZeroConfig
    deepspeed_bytes: int | None
    sizes: dict[str, Any] | None
    result: Report | None
    every: bool = False

    def parts(self) -> list[Part]:
        """Returns the ledger, then the result."""
        lines = [*self.title, *self.ledger.parts()]
        if self.deepspeed_bytes is not None:
            lines.append(f"DeepSpeed's formula: {format_bytes(self.deepspeed_bytes)} ({self._why_other()})")
        if self.result is None:
            return lines
        result = (
            self.result.parts(max_rows=None) if self.every and isinstance(self.result, Fit) else self.result.parts()
        )
        return [*lines, "", *result]

    def _why_other(self) -> str:
        terms = TERMS[self.config.stage, self.config.offload]
        return f"{terms}, {'all trained' if self.config.stage < 3 else 'and the largest layer whole'}"

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain data, with the fields of the result and the ledger at the same level."""
        own = picked(self, "num_params", "num_devices", "sizes", "deepspeed_bytes")
        of_result = {} if self.result is None else self.result.to_dict()
        return {**of_result, **own, "stage": self.config.stage, **self.ledger.to_dict()}


def account(
    request: PlanRequest, source: ModelSource, ledger: MemoryTable, *, config: ZeroConfig, result: Report | None = None
) -> Account:
    """Returns the answer.

    Args:
      request: The options of the command.
      source: Its model.
      ledger: Its memory.
      config: The layout that the ledger is of.
      result: The plan, fit or analysis, if any.
    """
    number = request.num_devices
    num_params, largest = count_params(source.model.state)
    trained = f", adapters of rank {request.lora_rank} trained" if request.lora_rank else ""
    stored = "" if request.quantize == "none" else _stored(request, source, config)
    title = (
        f"{source.title}: {num_params:,} parameters{trained}{stored}",
        f"{request.where}, {request.precision}, batch {source.batch}, stage {config.stage}",
    )
    fields = {} if source.sizes is None else dataclasses.asdict(source.sizes)
    sizes = {name: size for name, size in fields.items() if name not in PER_LAYER} or None
    formula = _formula(config, num_params, largest, number)
    return Account(title, ledger, num_params, number, config, formula, sizes, result)


def _stored(request: PlanRequest, source: ModelSource, config: ZeroConfig) -> str:
    """Returns how much of what is not trained is stored in few bits; the rest is whole, small or of an odd shape."""
    model = source.model
    plan = plan_train_state(model.state, config=config, mesh=request.mesh, trainable=model.trainable)
    frozen = [leaf.param for leaf in plan.leaves if not leaf.trained]
    rounded = sum(math.prod(x.shape) for x in frozen if x.cut is not None and x.cut.blocks is not None)
    return f", {rounded / sum(math.prod(x.shape) for x in frozen):.0%} of the others stored as {request.quantize}"


def _formula(config: ZeroConfig, num_params: int, largest: int, num_devices: int) -> int | None:
    """Returns the bytes of one device by DeepSpeed's documentation; `None` for a layout that it has no formula for."""
    if (config.stage, config.offload) not in TERMS:
        return None
    layer = largest if config.stage == 3 else None
    estimate = tabulate(config.stage, num_params, layer, num_devices, 1, BUFFER_FACTOR, "documented")
    switches = {"cpu_offload_params": False, "zero_init": True} if config.stage == 3 else {}
    return find_row(estimate, cpu_offload=config.offload == HOST, **switches).gpu_bytes
