"""The answer of a memory command: model and workload, the ledger, DeepSpeed's formula, and a plan, fit or analysis."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Protocol

from jzero.analysis.ledger import Ledger
from jzero.cli.request import Request
from jzero.cli.source import Source
from jzero.deepspeed.formulas import BUFFER_FACTOR, find_row, tabulate
from jzero.plan.table import format_bytes
from jzero.state.model_size import count_params

BYTES = {1: "4 + 12/N bytes per parameter", 2: "4 + 16/N bytes per parameter", 3: "18/N bytes per parameter"}
"""The terms of DeepSpeed's formulas at each stage."""

PER_LAYER = ("inverse_frequencies", "windows")
"""Fields that are long, and change no size."""


class _Result(Protocol):
    def to_json(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Account:
    """The answer of a memory command.

    Attributes:
      title: Model and workload, a line each.
      ledger: The memory of a step.
      num_params: The parameters of the model, adapters included.
      num_devices: The devices.
      stage: The ZeRO stage.
      deepspeed_bytes: The states of one device by DeepSpeed's formula; `None` at stage 0, which has none.
      sizes: The sizes of a decoder, as data.
      result: The plan, fit or analysis; `None` if there is none.
    """

    title: tuple[str, str]
    ledger: Ledger
    num_params: int
    num_devices: int
    stage: int
    deepspeed_bytes: int | None
    sizes: dict[str, Any] | None
    result: _Result | None

    def __str__(self) -> str:
        lines = [*self.title, str(self.ledger)]
        if self.deepspeed_bytes is not None:
            lines.append(f"DeepSpeed's formula: {format_bytes(self.deepspeed_bytes)} ({self._why_other()})")
        return "\n".join(lines if self.result is None else [*lines, "", str(self.result)])

    def _why_other(self) -> str:
        if self.stage < 3:
            return f"{BYTES[self.stage]}, all trained"
        on_all = self.ledger.states_bytes + self.ledger.host
        ours = on_all * self.num_devices / self.num_params
        return f"{BYTES[3]}, not {ours:.3g}/N, and the largest layer whole"

    def to_json(self) -> str:
        """Returns all of it as JSON, with the fields of the result at the same level."""
        data = {
            "num_params": self.num_params,
            "num_devices": self.num_devices,
            "stage": self.stage,
            "sizes": self.sizes,
            **self.ledger.to_dict(),
            "deepspeed_bytes": self.deepspeed_bytes,
        }
        extra = {} if self.result is None else json.loads(self.result.to_json())
        return json.dumps({**extra, **data}, indent=2, ensure_ascii=False)


def account(request: Request, source: Source, ledger: Ledger, *, stage: int, result: _Result | None = None) -> Account:
    """Returns the answer.

    Args:
      request: The options of the command.
      source: Its model.
      ledger: Its memory.
      stage: The stage that the ledger is of.
      result: The plan, fit or analysis, if any.
    """
    number = request.num_devices
    num_params, largest = count_params(source.model.state)
    trained = f", adapters of rank {request.lora_rank} trained" if request.lora_rank else ""
    stored = f", the others stored as {request.quantize}" if request.quantize != "none" else ""
    title = (
        f"{source.title}: {num_params:,} parameters{trained}{stored}",
        f"{request.where}, {request.precision}, batch {source.batch}, stage {stage}",
    )
    fields = {} if source.sizes is None else dataclasses.asdict(source.sizes)
    sizes = {name: size for name, size in fields.items() if name not in PER_LAYER} or None
    formula = _formula(stage, num_params, largest, number) if stage else None
    return Account(title, ledger, num_params, number, stage, formula, sizes, result)


def _formula(stage: int, num_params: int, largest: int, num_devices: int) -> int:
    """Returns the bytes of one device with all states on the devices, by DeepSpeed's documentation."""
    layer = largest if stage == 3 else None
    estimate = tabulate(stage, num_params, layer, num_devices, 1, BUFFER_FACTOR, "documented")
    switches = {"cpu_offload_params": False, "zero_init": True} if stage == 3 else {}
    return find_row(estimate, cpu_offload=False, **switches).gpu_bytes
