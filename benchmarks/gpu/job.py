"""What a part of the GPU pack is given, and how it tells what it finds: as lines of JSON.

A line holds figures of one program of one part; later lines add to earlier ones. So nothing is lost if a part is ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator

from benchmarks.tables import Figures


@dataclasses.dataclass(frozen=True)
class Job:
    """A part to do.

    Attributes:
      part: Its name, such as `steps/llama_1b/8/3`.
      lines: The file for what it finds; holds what earlier parts found.
      seconds: How long it may take.
      small: Whether to try everything at the least size, not to measure.
      models: Which models to train; empty for those that suit the devices.
    """

    part: str
    lines: pathlib.Path
    seconds: float
    small: bool
    models: tuple[str, ...] = ()
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def remaining(self) -> float:
        """Seconds that are left."""
        return self.started + self.seconds - time.monotonic()

    def tell(self, program: str, **figures: object) -> None:
        """Adds a line."""
        add_line(self.lines, self.part, program, figures)

    @contextlib.contextmanager
    def recorded(self, program: str) -> Iterator[None]:
        """Tells of an error instead of raising it: the other programs go on."""
        try:
            yield
        except Exception as error:  # whatever it is belongs into the report
            self.tell(program, failed=f"{type(error).__name__}: {error}"[:1500])


def add_line(path: pathlib.Path, part: str, program: str, figures: Figures) -> None:
    """Adds a line to a file."""
    with path.open("a") as file:
        file.write(json.dumps({"part": part, "program": program, **figures}) + "\n")


def figures_of(path: pathlib.Path) -> dict[str, dict[str, Figures]]:
    """Returns the figures of each program of each part."""
    parts: dict[str, dict[str, Figures]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        x = json.loads(line)
        parts.setdefault(x.pop("part"), {}).setdefault(x.pop("program"), {}).update(x)
    return parts
