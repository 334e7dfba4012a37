"""Starts a module of the tests in several processes that find each other on a free port."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[1]
TIME_LIMIT = 300  # seconds, in place of for ever


def run_processes(module: str, arguments: Callable[[int, int], list[object]], num: int) -> list[tuple[int, str, str]]:
    """Returns `(exit status, stdout, stderr)` of each process.

    Args:
      module: What each runs.
      arguments: Its arguments, by its index and the port.
      num: How many there are.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", module, *map(str, arguments(index, port))],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(num)
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()  # no more than a formality, unless one of them hangs
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
