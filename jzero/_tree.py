"""Key paths as text."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["key_names", "path_str"]


def key_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the keys along a key path, e.g. `("decoder", "kernel")`."""
    names = (jax.tree_util.keystr((key,), simple=True) for key in path if str(key))  # that of a padded leaf is none
    return tuple(names)


def path_str(path: tuple[Any, ...]) -> str:
    """Returns a key path as text, e.g. `"decoder/kernel"`."""
    return "/".join(key_names(path))
