"""What became of a DeepSpeed configuration, key by key, as data and as text."""

from __future__ import annotations

import collections
import dataclasses
import json
import textwrap
from collections.abc import Callable
from typing import Any

from jzero._text import Report, format_rows
from jzero.deepspeed.key import Verdict

NOT_SET = "(not set)"
"""The value of a key that the file does not have, but whose default in DeepSpeed changes the numbers."""

ORDER: tuple[Verdict, ...] = ("open", "refused", "honoured", "compiler", "ignored")
IN_WORDS = {
    "open": "open",
    "refused": "refused",
    "honoured": "honoured",
    "compiler": "left to the compiler",
    "ignored": "ignored",
}
WAY_OUT = (
    "Decide it as a trainer does, `from_deepspeed(..., auto={'learning_rate': 2e-5, 'bf16': True})`, or by key, or by "
    "`batch_size=`, `optimizer=`, `precision=`"
)
WIDTH = 24
"""Characters of a value that the table shows."""


@dataclasses.dataclass(frozen=True)
class KeyVerdict:
    """One key of a configuration.

    Attributes:
      key: The names that lead to it, as the file has them, joined by dots.
      value: Its value.
      verdict: "honoured", "compiler" (left to XLA), "ignored" (means nothing here), "open" ("auto", and the numbers of
        a run depend on what a trainer would fill in) or "refused" (jzero lacks it, or does other numbers).
      note: Which field or argument took it; or why it means nothing; or what to do instead.
      is_undecided: Whether it is "auto", and nothing here decides it.
    """

    key: str
    value: Any
    verdict: Verdict
    note: str
    is_undecided: bool = False


@dataclasses.dataclass(frozen=True)
class DeepSpeedReport(Report):
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

    @property
    def open(self) -> tuple[KeyVerdict, ...]:
        """The rows of what is undecided and changes the numbers of a run."""
        return tuple(row for row in self.rows if row.verdict == "open")

    @property
    def undecided(self) -> tuple[KeyVerdict, ...]:
        """The rows of what is "auto", which neither an argument of `from_deepspeed` nor another key decides.

        Those that are not open have DeepSpeed's default, which trainers fill in as well, or change no numbers.
        """
        return tuple(row for row in self.rows if row.is_undecided)

    def verify(self) -> None:
        """Raises a `ValueError` that lists what is refused or open, if anything is."""
        if self.refused:
            raise ValueError(
                f"jzero does not do all that this DeepSpeed configuration asks for:\n{_listed(self.refused)}"
            )
        if self.open:
            raise ValueError(
                f'Nothing decides what is "auto" in this DeepSpeed configuration:\n{_listed(self.open)}\n{WAY_OUT}.'
            )

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
        data["open"] = [row.key for row in self.open]
        data["undecided"] = [row.key for row in self.undecided]
        data["rows"] = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps(data, indent=2, ensure_ascii=False, default=str)

    def __str__(self) -> str:
        words = [IN_WORDS[row.verdict] for row in self.rows]
        counts = collections.Counter(words)
        head = ", ".join(
            f"{counts[word]} {word}" for word in map(IN_WORDS.__getitem__, ORDER) if word != "open" or self.open
        )
        ordered = sorted(zip(self.rows, words, strict=True), key=lambda pair: ORDER.index(pair[0].verdict))
        table = [("key", "value", "verdict", "what becomes of it")]
        table += [(row.key, _short(row.value), word, row.note) for row, word in ordered]
        return "\n".join(
            [f"DeepSpeed configuration: {head}", *self._left_open(), *self._facts(), "", *format_rows(table, left=4)]
        )

    def _left_open(self) -> list[str]:
        """What nobody has decided, before anything else."""
        if not self.open:
            return []
        names = ", ".join(row.key for row in self.open)
        text = f'open, since "auto" is for a trainer to fill in: {names}'
        return [
            *textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False),
            *textwrap.wrap(WAY_OUT, 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False),
        ]

    def _mark_open(self, prefix: str, text: str) -> str:
        """A fact, unless an "auto" leaves it open."""
        is_open = any(row.key.startswith(prefix) for row in self.open)
        return f"{text} (open)" if is_open else text

    def _facts(self) -> list[str]:
        sizes = (self.train_batch_size, self.micro_batch_size, self.accumulate_steps, self.num_devices)
        total, micro, steps, devices = ("?" if size is None else str(size) for size in sizes)
        made = {"gradient_clipping": "none" if self.clip_norm is None else f"at a norm of {self.clip_norm:g}"}
        made |= {"optimizer": "none" if self.optimizer is None else "yes"}
        made |= {"scheduler": "none" if self.schedule is None else "yes"}
        clipping, optimizer, schedule = (self._mark_open(key, text) for key, text in made.items())
        return [
            f"batch: {total} rows a step = {micro} in a micro-batch x {steps} micro-batches x {devices} devices",
            f"clipping: {clipping}; optimizer: {optimizer}; schedule: {schedule}",
        ]


def _short(value: Any) -> str:
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    text = value if value == NOT_SET else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _listed(rows: tuple[KeyVerdict, ...]) -> str:
    return "\n".join(f"  `{row.key}` = {_short(row.value)}: {row.note}" for row in rows)
