"""The guard of checks: what a check does not understand is unknown, and no reason to stop a right step.

A check looks at what others wrote: programs, values, names. Nobody knows all that it will meet there, so it runs in
`attempt`. It only finds the reason to refuse something, or to warn; the caller does so, outside of `attempt`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def attempt(check: Callable[..., T], *args: Any) -> T | None:
    """Returns what a check finds; `None`, and a line in the log, if it fails."""
    try:
        return check(*args)
    except Exception as error:
        note_failure(error)
        return None


def note_failure(error: Exception) -> None:
    """Logs the error of a check. In tests it raises it instead: there it is a fault of the check."""
    logging.getLogger("jzero").warning("A check failed, and the step goes on without it.", exc_info=error)


def warn(text: str) -> None:
    """Warns of the line outside of jzero, and of jax, which calls jzero back, that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "jzero"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
