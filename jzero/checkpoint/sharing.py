"""Whether the processes share the folder of a checkpoint."""

from __future__ import annotations

import contextlib
import time
import uuid

import jax
from etils import epath

from jzero.checkpoint.damage import CheckpointError, is_there
from jzero.core.processes.agree import exchange, succeed_together

LAG_S = 10.0
"""How long a file that one process wrote may take to appear to another."""


def check_shared(directory: epath.Path) -> None:
    """Raises in all processes unless each sees what the first writes to a directory. Each process must call it."""
    if jax.process_count() == 1:
        return
    is_first = jax.process_index() == 0
    name = exchange(lambda: uuid.uuid4().hex)[0]  # which no file system remembers as absent
    file = directory / f"jzero.{name}"

    def write() -> None:
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    succeed_together(write)
    try:
        succeed_together(lambda: _wait_for(file))
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                file.unlink()


def _wait_for(file: epath.Path) -> None:
    deadline = time.monotonic() + LAG_S
    while not is_there(file):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"Process {jax.process_index()} does not see what process 0 writes to {file.parent}: each writes a "
                "part of a checkpoint, so all must save to the same folder, on a disk that they share."
            )
        time.sleep(0.1)
