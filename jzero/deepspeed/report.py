"""What became of a DeepSpeed configuration, key by key, as data and as text."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from jzero._table import format_rows
from jzero.deepspeed.key import Verdict

__all__ = ["NOT_SET", "DeepSpeedReport", "KeyVerdict"]

NOT_SET = "(not set)"
"""The value of a key that the file does not have, but whose default in DeepSpeed changes the numbers."""

ORDER: tuple[Verdict, ...] = ("refused", "honoured", "compiler", "ignored")
IN_WORDS = {
    "refused": "refused",
    "honoured": "honoured",
    "compiler": "left to the compiler",
    "ignored": "ignored",
}
WIDTH = 24
"""Characters of a value that the table shows."""


@dataclasses.dataclass(frozen=True)
class KeyVerdict:
    """One key of a configuration.

    Attributes:
      key: The names that lead to it, as the file has them, joined by dots.
      value: Its value.
      verdict: "honoured", "compiler" (left to XLA), "ignored" (means nothing here) or "refused" (jzero lacks it, or
        does other numbers).
      note: Which field or argument took it; or why it means nothing; or what to do instead.
    """

    key: str
    value: Any
    verdict: Verdict
    note: str


@dataclasses.dataclass(frozen=True)
class DeepSpeedReport:
    """What `ZeroConfig.from_deepspeed` made of a file: a verdict on each key, and what is not the config's to hold.

    `print` it for a table. What is `None` is not in the file, or "auto", or depends on a number of devices that was not
    given.

    Attributes:
      rows: One for each key, in the order of the file; and for the keys that it lacks whose default counts.
      num_devices: What `from_deepspeed` was told.
      train_batch_size: Rows of the batch that a step is called with.
      micro_batch_size: Rows of one device in one micro-batch.
      accumulate_steps: Micro-batches in a step.
      clip_norm: The largest norm of the gradients; `None` if they are not clipped.
      optimizer: An optax transformation with the numbers of the file's optimizer, its schedule included. `None` also if
        optimizer or schedule have a value that is refused, or "auto" where only a trainer knows better.
      schedule: `schedule(step)` is the learning rate of that step, the first being 0.

    Example:
      >>> _, report = jzero.ZeroConfig.from_deepspeed({"train_batch_size": 32, "gradient_clipping": 0.5}, num_devices=8)
      >>> report.step_arguments()
      {'accumulate_steps': 1, 'clip_norm': 0.5}
      >>> [(row.key, row.verdict) for row in report.rows]
      [('train_batch_size', 'honoured'), ('gradient_clipping', 'honoured')]
    """

    rows: tuple[KeyVerdict, ...]
    num_devices: int | None
    train_batch_size: int | None
    micro_batch_size: int | None
    accumulate_steps: int | None
    clip_norm: float | None
    optimizer: Any = dataclasses.field(repr=False, compare=False)
    schedule: Callable[[Any], Any] | None = dataclasses.field(repr=False, compare=False)

    @property
    def refused(self) -> tuple[KeyVerdict, ...]:
        """The rows of what jzero lacks, or does with other numbers."""
        return tuple(row for row in self.rows if row.verdict == "refused")

    def verify(self) -> None:
        """Raises a `ValueError` that lists what is refused, if anything is."""
        if self.refused:
            listed = "\n".join(f"  `{row.key}` = {_short(row.value)}: {row.note}" for row in self.refused)
            raise ValueError(f"jzero does not do all that this DeepSpeed configuration asks for:\n{listed}")

    def step_arguments(self) -> dict[str, Any]:
        """Returns what the file says about a step, for `make_train_step(loss_fn, **report.step_arguments())`.

        Raises:
          ValueError: The number of micro-batches is not known.
        """
        if self.accumulate_steps is None:
            raise ValueError(
                "The number of micro-batches is not known: a batch size is 'auto', or it follows from the number of "
                "devices. Give `from_deepspeed` its `num_devices`, write the sizes into the file, or hand "
                "`make_train_step` its `accumulate_steps` yourself."
            )
        return {"accumulate_steps": self.accumulate_steps, "clip_norm": self.clip_norm}

    def to_json(self) -> str:
        """Returns all of it but `optimizer` and `schedule` as JSON."""
        names = ("num_devices", "train_batch_size", "micro_batch_size", "accumulate_steps", "clip_norm")
        data = {name: getattr(self, name) for name in names}
        data["has_optimizer"], data["has_schedule"] = self.optimizer is not None, self.schedule is not None
        data["rows"] = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps(data, indent=2, ensure_ascii=False, default=str)

    def __str__(self) -> str:
        counts = collections.Counter(row.verdict for row in self.rows)
        head = ", ".join(f"{counts[verdict]} {IN_WORDS[verdict]}" for verdict in ORDER)
        ordered = sorted(self.rows, key=lambda row: ORDER.index(row.verdict))
        table = [("key", "value", "verdict", "what becomes of it")]
        table += [(row.key, _short(row.value), IN_WORDS[row.verdict], row.note) for row in ordered]
        return "\n".join([f"DeepSpeed configuration: {head}", *self._facts(), "", *format_rows(table, left=4)])

    def _facts(self) -> list[str]:
        sizes = (self.train_batch_size, self.micro_batch_size, self.accumulate_steps, self.num_devices)
        total, micro, steps, devices = ("?" if size is None else str(size) for size in sizes)
        made = [
            "none" if self.clip_norm is None else f"at a norm of {self.clip_norm:g}",
            *("yes" if x is not None else "none" for x in (self.optimizer, self.schedule)),
        ]
        clipping, optimizer, schedule = made
        return [
            f"batch: {total} rows a step = {micro} in a micro-batch x {steps} micro-batches x {devices} devices",
            f"clipping: {clipping}; optimizer: {optimizer}; schedule: {schedule}",
        ]


def _short(value: Any) -> str:
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    text = value if value == NOT_SET else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
