"""How commands start and end: the devices that jax finds, results on stdout, messages, and the exit status."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import sysconfig
import threading
import traceback as tracebacks
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from jzero.core.base.text import Report

EXPECTED = (ValueError, TypeError, ImportError, OSError, RuntimeError)
"""Errors that users can cause, from the library, jax and the file system; their messages need no traceback."""

DOES_NOT_FIT = 3
"""The exit status of a memory command whose verdict is that the step does not fit."""

JZERO = pathlib.Path(__file__).parents[1]
STANDARD_LIBRARY = sysconfig.get_path("stdlib")

Json = Annotated[bool, typer.Option("--json", help="Print only JSON to stdout.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error.")]


def show(result: Report, as_json: bool) -> None:
    """Prints a result as text or JSON. A terminal gets lines that fit it."""
    from jzero.core.base.text import printed  # imports jax, which `--help` does without

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    typer.echo(result.to_json() if as_json else printed(result.parts(), width, in_flags))


def warn(text: str) -> None:
    """Prints a message to stderr."""
    typer.echo(f"jzero: {in_flags(text)}", err=True)


NOT_ARGUMENTS = frozenset({"model", "params", "batch", "config", "disk"})
"""Options whose names the library uses for other things."""
OF_LIBRARY = {"largest_layer_params": "--largest-layer", "total_params": "--params", "auto": "--set"}
"""Arguments of the library that options have other names for."""
_flags: contextvars.ContextVar[dict[str, tuple[str, str]]] = contextvars.ContextVar("flags", default={})  # noqa: B039


def name_flags(context: typer.Context) -> None:
    """Lets messages name the options of the command that is about to run: each argument's flag, and the negated one."""
    command: Any = context.command
    options = [x for x in command.commands[context.invoked_subcommand].params if x.param_type_name == "option"]
    flags = {name: (flag, flag) for name, flag in OF_LIBRARY.items()}
    for option in options:
        flag = option.opts[0]
        for name in {option.name, flag.removeprefix("--").replace("-", "_")} - NOT_ARGUMENTS:
            flags[name] = flag, (option.secondary_opts or [flag])[0]
    _flags.set(flags)


def in_flags(text: str) -> str:
    """Returns a message with the options of the running command in place of the library's arguments.

    The library says "`hbm_bytes=80e9`" where the command line takes "`--hbm-bytes 80e9`".
    """

    def as_flag(match: re.Match[str]) -> str:
        name, value = match[1], match[3]
        if name not in _flags.get():
            return match[0]
        flag, negated = _flags.get()[name]
        if value in ("True", "False"):
            return f"`{flag if value == 'True' else negated}`"
        return f"`{flag} {value}`" if value else f"`{flag}`"

    return re.sub(r"`(\w+)(=([^`,{]*))?`", as_flag, text)


@contextlib.contextmanager
def messages(traceback: bool) -> Iterator[None]:
    """Turns errors into messages on stderr and exit status 2; redirects stdout to stderr meanwhile.

    Meanwhile stderr says what takes long.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr), shown_status():
            logging.getLogger("jzero").info("Loading jax.")
            yield
    except Exception as error:
        text = str(error) or type(error).__name__ if isinstance(error, EXPECTED) else _in_users_code(error)
        if traceback or text is None:
            tracebacks.print_exception(error)
        else:
            warn(f"{text}\n(`--traceback` prints the traceback.)")
        raise typer.Exit(2) from error


def _in_users_code(error: Exception) -> str | None:
    """Returns where a user's code raised an error; `None` if jzero did."""
    frames = [
        x for x in tracebacks.extract_tb(error.__traceback__) if _is_of_jzero(x.filename) or not _is_library(x.filename)
    ]
    if not frames or _is_of_jzero(frames[-1].filename):
        return None
    name = os.path.relpath(frames[-1].filename)
    return f"{type(error).__name__} in {name}, line {frames[-1].lineno}, `{frames[-1].line}`: {error}."


def _is_of_jzero(file: str) -> bool:
    return pathlib.Path(file).is_relative_to(JZERO)  # also where jzero itself is in `site-packages`


def _is_library(file: str) -> bool:
    return "site-packages" in pathlib.Path(file).parts or pathlib.Path(file).is_relative_to(STANDARD_LIBRARY)


def choose_devices(
    topology: str | None, devices: int | None, *, compiles: bool = False, plans_only: bool = False
) -> None:
    """Selects the devices that jax will find. Call it before any code uses them, and so before users' modules load.

    Args:
      topology: Another machine.
      devices: Virtual CPU devices.
      compiles: Whether that machine's compiler is needed, which is checked before the model is built.
      plans_only: Whether no program runs, so that the devices need not exist.
    """
    if topology is not None and devices is not None:
        raise ValueError(
            f"`--topology {topology}` means a machine, `--devices {devices}` so many devices of no machine: pass only "
            "one of them."
        )
    if topology is None and devices is None:
        return
    use_cpu(None if plans_only else devices)
    if topology is not None:
        from jzero.machines.machine import machine

        machine(topology)  # whose name may be wrong
    if topology is not None and compiles:
        from jzero.machines.topologies import topology_devices

        topology_devices(topology)


def use_cpu(count: int | None) -> None:
    """Lets jax find CPU devices only, so many of them."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        # Otherwise XLA's CPU client may have only one thread per core, and running programs deadlock.
        os.environ.setdefault("PJRT_NPROC", str(4 * count))
        jax.config.update("jax_num_cpu_devices", count)


EVERY_S = 2.0
"""Seconds from one line to the next where lines stay."""


@contextlib.contextmanager
def shown_status() -> Iterator[None]:
    """Shows the newest message of jzero's log, and keeps its warnings."""
    log = logging.getLogger("jzero")
    level, propagate = log.level, log.propagate
    stays = not sys.stderr.isatty() or os.environ.get("TERM") == "dumb"
    with _Lines() if stays else _Line() as handler:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False  # to the root's handler, which absl adds
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate


class _Status(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Shows a message; one that is a warning stays."""
        text = f"jzero: {self.format(record)}"
        if record.levelno > logging.INFO:
            self.keep(text)
        else:
            self.show(text)

    def keep(self, text: str) -> None:
        """Writes a line that stays."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def show(self, text: str) -> None:
        """Shows what jzero does from now on."""
        raise NotImplementedError


class _Line(_Status):
    """One line with a clock, which rich draws; other output scrolls above it."""

    def __enter__(self) -> _Line:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("jzero", total=None)
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, text: str) -> None:
        self._progress.reset(self._task, description=text)


class _Lines(_Status):
    """A line every `EVERY_S` seconds, if there is news."""

    def __enter__(self) -> _Lines:
        self._newest = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def show(self, text: str) -> None:
        self._newest = text

    def _run(self) -> None:
        written = ""
        while not self._ends.wait(EVERY_S):
            newest = self._newest
            if newest != written:
                self.keep(newest)
                written = newest
