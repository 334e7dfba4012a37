"""What benchmarks share that needs no jax: options, result files of one JSON line per program, ports, memory."""

from __future__ import annotations

import argparse
import json
import pathlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import Any

MIB, GIB = 2**20, 2**30


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that prints a module's docstring as it is."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a result file, none if there is no such file."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def complete(path: pathlib.Path, keys: Iterable[str], make: Callable[[str], dict[str, Any]]) -> None:
    """Adds the lines that a result file lacks, and prints each, so that a run can be taken up."""
    for key in keys:
        if key not in {x["key"] for x in lines_of(path)}:
            line = json.dumps({"key": key, **make(key)})
            with path.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


def free_port() -> int:
    """Returns a port that no program listens to."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def wait_for(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Waits for all, then raises if one failed."""
    ended = [(process.wait(), process.args) for process in processes]
    if failed := [arguments for code, arguments in ended if code]:
        raise RuntimeError(f"These failed: {failed}")


def resident() -> int:
    """Returns the resident bytes of this process that are not pages of files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


class Peak:
    """The most anonymous memory of this process while it is entered, sampled every 3 ms, and that before."""

    def __enter__(self) -> Peak:
        self.before = self.bytes = resident()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ends.wait(0.003):
            self.bytes = max(self.bytes, resident())
