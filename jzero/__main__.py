"""`python -m jzero`, and the script `jzero`: the command line, or what to install to have it."""

from __future__ import annotations

import importlib.util
import os
import sys


def main() -> None:
    """Runs the command line; exits with 2 if `typer`, which it needs, is not installed."""
    if importlib.util.find_spec("typer") is None:
        sys.exit(_missing("typer"))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA calls a program that does not fit an error
    from jzero.cli.commands import app  # noqa: PLC0415  # needs typer

    app(prog_name="jzero")


def _missing(package: str) -> int:
    sys.stderr.write(f"jzero: the command line needs {package}, which is not installed: `pip install 'jzero[cli]'`.\n")
    return 2


if __name__ == "__main__":
    main()
