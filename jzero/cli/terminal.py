"""How commands start and end: the devices that jax finds, results on stdout, messages and exit status 2 for errors."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback as tracebacks
from collections.abc import Iterator
from typing import Annotated, Protocol

import typer

EXPECTED = (ValueError, TypeError, ImportError, OSError, RuntimeError)
"""Errors that users can cause, from the library, jax and the file system; their messages need no traceback."""

Json = Annotated[bool, typer.Option("--json", help="Print only JSON to stdout.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")]


class _Result(Protocol):
    def to_json(self) -> str: ...


def show(result: _Result, as_json: bool) -> None:
    """Prints a result as text or JSON."""
    typer.echo(result.to_json() if as_json else str(result))


def warn(text: str) -> None:
    """Prints a message to stderr."""
    typer.echo(f"jzero: {text}", err=True)


@contextlib.contextmanager
def messages(traceback: bool) -> Iterator[None]:
    """Turns errors into messages on stderr and exit status 2; redirects stdout to stderr meanwhile.

    A terminal also sees what takes long, as the library logs it.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr), _progress() if sys.stderr.isatty() else contextlib.nullcontext():
            yield
    except Exception as error:
        if traceback or not isinstance(error, EXPECTED):
            tracebacks.print_exception(error)
        else:
            warn(f"{str(error) or type(error).__name__}\n(`--traceback` prints the traceback.)")
        raise typer.Exit(2) from error


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    log, handler = logging.getLogger("jzero"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("jzero: %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def choose_devices(
    topology: str | None, devices: int | None, *, compiles: bool = False, plans_only: bool = False
) -> None:
    """Selects the devices that jax will find. Call it before any code uses them, and so before users' modules load.

    Args:
      topology: Another machine.
      devices: Virtual CPU devices.
      compiles: Whether that machine's compiler is needed; it must say so before the model is built.
      plans_only: Whether there will be no programs, so that as many devices need not exist.
    """
    if topology is not None and devices is not None:
        raise ValueError(
            f"`--topology {topology}` means a machine, `--devices {devices}` so many devices of no machine: pass only "
            "one of them."
        )
    if topology is None and devices is None:
        return
    use_cpu(None if plans_only else devices)
    if topology is not None and compiles:
        from jzero.analysis.topologies import topology_devices

        topology_devices(topology)


def use_cpu(count: int | None) -> None:
    """Lets jax find CPU devices only, so many of them."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        # Otherwise XLA's CPU client may have only one thread per core, and running programs deadlock.
        os.environ.setdefault("PJRT_NPROC", str(4 * count))
        jax.config.update("jax_num_cpu_devices", count)
