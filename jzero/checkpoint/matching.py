"""Matches the leaves of a checkpoint with those of a state, and finds what is missing on either side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from etils import epath

from jzero.checkpoint.contents import StoredLeaf
from jzero.checkpoint.leaves import TargetLeaf
from jzero.checkpoint.orbax_io import dtype_on_disk
from jzero.core.base.text import Part, Report, few
from jzero.core.base.types import DType
from jzero.core.layout.leaves import StateLeaf

Rename = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class RestoreReport(Report):
    """What a restore did, or would do.

    Attributes:
      directory: The checkpoint.
      restored: Paths of the restored leaves.
      missing: Paths of leaves of the state that the checkpoint lacks; they keep their values.
      unexpected: Paths of leaves that only the checkpoint has; they are not read.
      skipped: Paths of leaves of the state that were not asked for; they keep their values.
      renamed: Path in the checkpoint and path in the state, for each leaf that `rename` renamed.
      cast: Path, dtype on disk and dtype in memory, for each leaf that was cast.

    Example:
      >>> with jzero.CheckpointManager(f"{tmp}/reported") as manager:
      ...     _ = manager.save(state)
      ...     _ = manager.restore(state, params_only=True)
      ...     print(manager.last_restore.restored, len(manager.last_restore.skipped))
      ('params/w',) 4
    """

    directory: str
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    cast: tuple[tuple[str, str, str], ...]

    def parts(self) -> list[Part]:
        """Returns the leaves by what became of them."""
        lines: list[Part] = [f"Restored {len(self.restored)} leaves from {self.directory}"]
        lines += _format_list("missing in the checkpoint, kept as they were", self.missing)
        lines += _format_list("only in the checkpoint, not read", self.unexpected)
        lines += _format_list("not asked for, kept as they were", self.skipped)
        lines += _format_list("renamed", [f"{old} → {new}" for old, new in self.renamed])
        lines += _format_list("cast", [f"{path}: {old} → {new}" for path, old, new in self.cast])
        return lines


def _format_list(title: str, entries: Sequence[str]) -> list[str]:
    return [f"  {title} ({len(entries)}):", "    " + few(entries, 20, between="\n    ")] if entries else []


def match_leaves(
    target_leaves: Sequence[TargetLeaf],
    stored_leaves: Iterable[StoredLeaf],
    where: epath.PathLike,
    *,
    chosen: Callable[[TargetLeaf], bool],
    rename: Rename,
    strict: bool,
) -> tuple[dict[int, StoredLeaf], RestoreReport]:
    """Returns the stored leaf for each leaf of the state, by its number, and a report.

    Args:
      target_leaves: The leaves of the state.
      stored_leaves: The leaves of the checkpoint.
      where: The checkpoint, for messages.
      chosen: Whether the user asked for a leaf of the state.
      rename: Patterns of paths in the checkpoint, and their replacements.
      strict: Whether missing and unexpected leaves are errors.

    Raises:
      ValueError: Leaves do not fit; the message lists all of them.
    """
    by_path = {leaf.path: leaf for leaf in stored_leaves}
    stored = {new: by_path[old] for new, old in renamed_paths(by_path, rename).items()}
    asked = [i for i, leaf in enumerate(target_leaves) if chosen(leaf)]
    if not asked:
        some = ", ".join(repr(leaf.path) for leaf in target_leaves[:5])
        raise ValueError(
            f"`paths` matches no leaf of the state: it must match a whole path. The first paths are {some}."
        )
    matched = {i: stored[target_leaves[i].path] for i in asked if target_leaves[i].path in stored}
    paths = {leaf.path for leaf in target_leaves}
    missing = tuple(target_leaves[i].path for i in asked if i not in matched)
    unexpected = tuple(path for path in stored if path not in paths)
    bad = [line for i, leaf in matched.items() if (line := _misfit(target_leaves[i], leaf))]
    if bad:
        listed = few(bad, 40, between="\n  ")
        raise ValueError(
            f"The checkpoint at {where} is of another model or optimizer: these leaves do not fit.\n  {listed}\n"
            "Restore into a state of the model that wrote it, or leave these out with `paths`."
        )
    everything = len(asked) == len(target_leaves)
    if strict and (missing or (unexpected and everything)):
        lines = _format_list("missing in the checkpoint", missing)
        lines += _format_list("only in the checkpoint", unexpected)  # a missing leaf may have another name there
        raise ValueError(
            f"The checkpoint at {where} and the state do not have the same leaves:\n"
            + "\n".join(lines)
            + "\nIf that is meant, pass `strict=False`; if leaves have other names there, `rename`; for some leaves "
            "alone, `paths` or `params_only`."
        )
    report = RestoreReport(
        directory=str(where),
        restored=tuple(target_leaves[i].path for i in matched),
        missing=missing,
        unexpected=unexpected,
        skipped=tuple(leaf.path for leaf in target_leaves if not chosen(leaf)),
        renamed=tuple((leaf.path, path) for path, leaf in stored.items() if leaf.path != path),
        cast=tuple(
            (target_leaves[i].path, str(leaf.dtype), str(target_leaves[i].leaf.dtype))
            for i, leaf in matched.items()
            if not _is_key(target_leaves[i].leaf)
            and leaf.dtype not in (target_leaves[i].leaf.dtype, dtype_on_disk(target_leaves[i].leaf.dtype))
        ),
    )
    return matched, report


def renamed_paths(paths: Iterable[str], rename: Rename) -> dict[str, str]:
    """Returns the old path of each new one.

    Raises:
      ValueError: A pattern is not a regular expression or matches nothing, or two paths become equal.
    """
    patterns = {}
    for pattern, new in rename.items():
        try:
            patterns[re.compile(pattern)] = new
        except re.error as error:
            raise ValueError(f"`rename` key {pattern!r} is not a regular expression: {error}.") from error
    old_of: dict[str, str] = {}
    used: set[str] = set()
    for old in paths:
        path = old
        for compiled, new in patterns.items():
            if (hit := compiled.fullmatch(old)) is not None:
                path = hit.expand(new)
                used.add(compiled.pattern)
                break
        if path in old_of:
            raise ValueError(f"`rename` gives two leaves the path {path!r}: {old_of[path]!r} and {old!r}.")
        old_of[path] = old
    unused = [pattern for pattern in rename if pattern not in used]
    if unused:
        some = ", ".join(map(repr, list(old_of.values())[:5]))
        raise ValueError(
            f"`rename` patterns {unused} match no leaf of the checkpoint: each must match a whole path. The first "
            f"paths are {some}."
        )
    return old_of


def _misfit(target_leaf: TargetLeaf, stored: StoredLeaf) -> str:
    """Returns why a stored leaf does not fit; an empty string if it does.

    Args:
      target_leaf: The leaf of the state.
      stored: The leaf in the checkpoint.
    """
    leaf = target_leaf.leaf
    shape, kind = leaf.shape, _kind(leaf.dtype)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype))
        shape, kind = data.shape, _kind(data.dtype)
    is_key = _is_key(leaf) if stored.is_key is None else stored.is_key
    if stored.shape == shape and _kind(stored.dtype) == kind and is_key == _is_key(leaf):
        return ""
    was = "" if target_leaf.path == stored.path else f" (there {stored.path})"
    there = f"{stored.dtype}{list(stored.shape)}" + (" of PRNG keys" if is_key else "")
    return f"{target_leaf.path}{was}: {there} in the checkpoint, {leaf.dtype}{list(shape)} in the state"


def _is_key(leaf: StateLeaf) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _kind(dtype: DType) -> str:
    """Returns the kind of a dtype; numbers of one kind can be cast into each other."""
    kinds = {"number that is not whole": np.floating, "whole number": np.integer, "complex": np.complexfloating}
    return next((name for name, kind in kinds.items() if jax.numpy.issubdtype(dtype, kind)), str(dtype))
