"""The verdicts on a DeepSpeed configuration, key by key, as data and as text."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.typing import ArrayLike

from jzero.core.base.text import Part, Report, Table, picked
from jzero.deepspeed.auto_values import trainer_name
from jzero.deepspeed.key import NOT_SET, KeyVerdict, Verdict

IN_WORDS: dict[Verdict, str] = {
    "open": "open",
    "refused": "refused",
    "honoured": "honoured",
    "compiler": "left to the compiler",
    "ignored": "ignored",
}
REMEDY = (
    "Decide each in `auto=`, by its key or as a trainer calls it (in brackets), or by `batch_size=`, `precision=` and "
    "`optimizer=`"
)
WIDTH = 24
"""Characters of a value that the table shows."""


@dataclasses.dataclass(frozen=True)
class DeepSpeedReport(Report):
    """What `jzero.from_deepspeed` made of a file: a verdict on each key, and the settings that belong to the step.

    `print` it for a table. A field is `None` if the file lacks it, leaves it "auto", or if it depends on an unknown
    number of devices.

    Attributes:
      rows: One for each key, in the order of the file, and one for each missing key whose default has an effect.
      num_devices: The argument of `from_deepspeed`, or the processes of Accelerate's file.
      train_batch_size: Rows of the batch that a step is called with.
      micro_batch_size: Rows of one device in one micro-batch.
      accumulate_steps: Micro-batches in a step.
      clip_norm: The largest norm of the gradients; `None` if they are not clipped.
      optimizer: An optax transformation with the numbers of the file's optimizer, its schedule included. `None` also if
        optimizer or schedule have a value that is refused, or "auto" where only a trainer knows better.
      schedule: `schedule(step)` is the learning rate of that step, the first being 0.

    Example:
      >>> _, report = jzero.from_deepspeed({"train_batch_size": 32, "gradient_clipping": 0.5}, num_devices=8)
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
    optimizer: optax.GradientTransformation | None = dataclasses.field(repr=False, compare=False)
    schedule: Callable[[ArrayLike], jax.Array] | None = dataclasses.field(repr=False, compare=False)

    @property
    def refused(self) -> tuple[KeyVerdict, ...]:
        """The rows of keys that jzero lacks, or computes differently."""
        return tuple(row for row in self.rows if row.verdict == "refused")

    @property
    def open(self) -> tuple[KeyVerdict, ...]:
        """The rows of undecided keys that change the numbers of a run."""
        return tuple(row for row in self.rows if row.verdict == "open")

    @property
    def undecided(self) -> tuple[KeyVerdict, ...]:
        """The rows of each "auto" that neither an argument of `from_deepspeed` nor another key decides.

        Those that are not open have DeepSpeed's default, which trainers fill in as well, or change no numbers.
        """
        return tuple(row for row in self.rows if row.is_undecided)

    def verify(self) -> None:
        """Raises a `ValueError` that lists all refused and open keys, if there are any."""
        if self.refused:
            raise ValueError(f"jzero does not support all of this DeepSpeed configuration:\n{_listed(self.refused)}")
        if self.open:
            raise ValueError(
                f'Nothing decides what is "auto" in this DeepSpeed configuration:\n{_listed(self.open)}\n'
                "Decide each in `auto=`, such as `auto={'learning_rate': 2e-5, 'bf16': True}`, or by `batch_size=`, "
                "`precision=` and `optimizer=`."
            )

    def step_arguments(self) -> dict[str, Any]:
        """Returns the settings of a step, for `make_train_step(loss_fn, **report.step_arguments())`.

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

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it but `optimizer` and `schedule` as plain data."""
        names = ("num_devices", "train_batch_size", "micro_batch_size", "accumulate_steps", "clip_norm", "rows")
        return picked(self, *names) | {
            "has_optimizer": self.optimizer is not None,
            "has_schedule": self.schedule is not None,
            "open": [row.key for row in self.open],
            "undecided": [row.key for row in self.undecided],
        }

    def parts(self) -> list[Part]:
        """Returns a table for each verdict."""
        counts = collections.Counter(row.verdict for row in self.rows)
        head = ", ".join(
            f"{counts[verdict]} {IN_WORDS[verdict]}" for verdict in IN_WORDS if verdict != "open" or self.open
        )
        rows = {words: [row for row in self.rows if row.verdict == verdict] for verdict, words in IN_WORDS.items()}
        tables = [
            Table([(words, "value", "note"), *((row.key, _short(row.value), row.note) for row in rows)], left=3)
            for words, rows in rows.items()
            if rows
        ]
        parts = [f"DeepSpeed configuration: {head}", *self._open_lines(), self._batch(), self._settings()]
        return [*parts, *(part for table in tables for part in ("", table))]

    def _open_lines(self) -> list[str]:
        """Undecided keys, first."""
        if not self.open:
            return []
        names = [row.key for row in self.open]
        names = [f"{key} ({name})" if (name := trainer_name(key)) not in (None, key) else key for key in names]
        return [f'open, since "auto" is for a trainer to fill in: {", ".join(names)}', f"  {REMEDY}."]

    def _batch(self) -> str:
        sizes = (self.train_batch_size, self.micro_batch_size, self.accumulate_steps, self.num_devices)
        if self.train_batch_size is None and self.micro_batch_size is None:
            is_open = any(row.key == "train_batch_size" for row in self.open)
            return f"batch: {'open' if is_open else 'not in the file: pass `batch_size=`'}"
        total, micro, steps, devices = ("?" if size is None else str(size) for size in sizes)
        text = f"batch: {total} rows a step = {micro} in a micro-batch x {steps} micro-batches x {devices} devices"
        return text if self.num_devices else f"{text}, with `num_devices=` for the rest"

    def _settings(self) -> str:
        clipping = "none" if self.clip_norm is None else f"at a norm of {self.clip_norm:g}"
        optimizer, schedule = self._built("optimizer", self.optimizer), self._built("scheduler", self.schedule)
        return f"clipping: {self._or_open('gradient_clipping', clipping)}; optimizer: {optimizer}; schedule: {schedule}"

    def _built(self, block: str, built: object) -> str:
        """Whether a block gave an optimizer or a schedule, and why not."""
        if built is not None:
            return "yes"
        rows = [row for row in self.rows if row.key.partition(".")[0] == block]
        is_refused = any(row.verdict == "refused" for row in rows)
        return self._or_open(f"{block}.", "none (refused)" if is_refused else "none" if rows else "none in the file")

    def _or_open(self, prefix: str, text: str) -> str:
        """Marks a fact that depends on an undecided key."""
        return f"{text} (open)" if any(row.key.startswith(prefix) for row in self.open) else text


def _short(value: object) -> str:
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    text = value if value == NOT_SET else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _listed(rows: tuple[KeyVerdict, ...]) -> str:
    return "\n".join(f"  `{row.key}` = {_short(row.value)}: {row.note}" for row in rows)
