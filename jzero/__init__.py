"""ZeRO for JAX: partitions optimizer state, gradients and parameters over the data-parallel devices of any loop.

A public name is imported when it is first used, so that `import jzero` takes no time, and a program loads only what it
uses. `__init__.pyi` lists the names, for type checkers and for this file.
"""

import ast
import difflib
import importlib
import inspect
import pkgutil
from typing import Any

from jzero._version import __version__ as __version__

_IMPORTS = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
_HOME = dict(sorted((x.name, line.module) for line in _IMPORTS if isinstance(line, ast.ImportFrom) for x in line.names))
__all__ = list(_HOME)

_ROOMS_OF_STATES = (
    "jzero.analysis",
    "jzero.checkpoint",
    "jzero.debug",
    "jzero.core.state",
    "jzero.core.step",
    "jzero.training",
    "jzero.weights",
)
"""Their functions do not depend on the mesh that the program has set, see [Note: The mesh that is set]."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        near = [x for x in _HOME if x.startswith(name)] or difflib.get_close_matches(name, _HOME, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    if inspect.isfunction(value) and _HOME[name].startswith(_ROOMS_OF_STATES):
        value = importlib.import_module("jzero.core.layout.set_mesh").public(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
