"""Runs programs: as a user does, in a process of their own, or in this one, which saves the time to start."""

import os
import pathlib
import runpy
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def environment(**variables: str) -> dict[str, str]:
    """Returns what examples find set: this checkout's jzero, and the CPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "120", "JAX_PLATFORMS": "cpu"} | variables


def run_python(*arguments: str, timeout: float = 300, **variables: str) -> str:
    """Returns what a program prints, in a process of its own; its exit status must be 0."""
    how = {"cwd": ROOT, "env": environment(**variables), "capture_output": True, "text": True, "timeout": timeout}
    finished = subprocess.run([sys.executable, *arguments], check=False, **how)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run_example(script: str, *args: str, timeout: float = 300) -> str:
    """Returns what a script prints; its exit status must be 0."""
    return run_python("-W", "error", f"examples/{script}", *args, timeout=timeout)


def run_here(script: str, *args: str, monkeypatch, capsys) -> str:
    """Returns what a script prints, run in this process."""
    path = EXAMPLES / script
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), *args])
    capsys.readouterr()
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out
