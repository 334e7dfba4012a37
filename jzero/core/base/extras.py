"""Packages that are extras: imported where they are used, or else named."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, needs: str) -> Any:
    """Returns a module of an extra.

    Raises:
      ImportError: Its package is not installed, and `needs` says what to install. What an installed package lacks is an
        error of its own.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(needs) from error
