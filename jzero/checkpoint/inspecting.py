"""Describes a checkpoint without restoring it, for `jzero inspect`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from jzero.checkpoint.contents import StoredLeaf, find_steps, read_contents
from jzero.checkpoint.damage import REMEDY, CheckpointError
from jzero.checkpoint.format_1 import check_leaf
from jzero.checkpoint.orbax_io import EXTRA, ITERATOR
from jzero.checkpoint.restoring import read_extra
from jzero.core.base.text import Part, Report, Table, picked, printed
from jzero.core.config.settings import FLAG, check
from jzero.core.plan.table import format_bytes


@dataclasses.dataclass(frozen=True)
class CheckpointInfo(Report):
    """The description of a checkpoint.

    Attributes:
      directory: Its directory.
      steps: All steps of its manager, if it is one of a manager's.
      leaves: Its arrays: path, natural shape, dtype.
      notes: jzero's notes: versions, and the writer's configuration and mesh; empty if plain Orbax wrote it.
      extra: The values saved as `extra`.
      has_data_iterator: Whether it holds the position of a data iterator.
      damaged: The damage of each damaged leaf, by path; `None` if it was not verified.

    Example:
      >>> jzero.save_checkpoint(f"{tmp}/described", state)
      >>> jzero.inspect_checkpoint(f"{tmp}/described").leaves[0].path
      'opt_state/0/count'
    """

    directory: str
    steps: tuple[int, ...]
    leaves: tuple[StoredLeaf, ...]
    notes: Mapping[str, Any]
    extra: Mapping[str, object]
    has_data_iterator: bool
    damaged: Mapping[str, str] | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(leaf.num_bytes for leaf in self.leaves)

    def table(self, *, max_rows: int | None = 60) -> str:
        """Returns the checkpoint as text.

        Args:
          max_rows: Leaves to list; the rest is only counted. `None` for all.
        """
        return printed(self.parts(max_rows=max_rows))

    def parts(self, *, max_rows: int | None = 60) -> list[Part]:
        """Returns what `table` prints."""
        lines: list[Part] = [f"checkpoint: {self.directory}"]
        if self.steps:
            lines.append(f"steps there: {', '.join(map(str, self.steps))}")
        if self.notes:
            config, mesh = self.notes["config"], self.notes["mesh"]
            axes = ", ".join(f"{name}={size}" for name, size in mesh.items())
            lines.append(
                f"written by: jzero {self.notes['jzero']}, jax {self.notes['jax']}, stage {config['stage']}, "
                f"mesh ({axes}), {self.notes['num_processes']} processes"
            )
            scale = self.notes["precision"].get("loss_scale")
            lines += [f"loss scale: {scale['scale']:g}"] if scale else []
        else:
            lines.append("written by: another program (no checksums)")
        lines.append(f"extra: {', '.join(self.extra) or 'none'}")
        lines.append(f"position of a data iterator: {'yes' if self.has_data_iterator else 'no'}")
        rows = [("leaf", "dtype", "shape", "bytes")]
        rows += [(x.path, str(x.dtype), str(list(x.shape)), format_bytes(x.num_bytes)) for x in self.leaves]
        lines += ["", Table(rows, left=3, max_rows=max_rows)]
        lines.append(f"{len(self.leaves)} leaves, {format_bytes(self.num_bytes)}")
        if self.damaged is not None:
            lines.append(f"{len(self.leaves)} leaves read, {len(self.damaged)} damaged")
            lines += [f"  {path}: {what}" for path, what in self.damaged.items()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Returns the checkpoint as plain data."""
        return picked(self, "directory", "steps", "has_data_iterator", "num_bytes", "damaged") | {
            "written_by": {name: x for name, x in self.notes.items() if name not in ("checksums", "paths")},
            "extra": sorted(self.extra),
            "leaves": [{**picked(x, "path", "dtype", "shape"), "bytes": x.num_bytes} for x in self.leaves],
        }


def inspect_checkpoint(path: epath.PathLike, *, verify: bool = False) -> CheckpointInfo:
    """Describes a checkpoint; unless `verify` is set, from its metadata alone.

    Args:
      path: As for `restore_checkpoint`.
      verify: Read every leaf, one at a time, and compare its chunks with their checksums.

    Returns:
      The description; `print` it for a table.

    Raises:
      CheckpointError: There is no checkpoint, or its metadata is damaged.

    Example:
      >>> jzero.save_checkpoint(f"{tmp}/looked_into", state, extra={"epoch": 3})
      >>> info = jzero.inspect_checkpoint(f"{tmp}/looked_into", verify=True)
      >>> len(info.leaves), info.extra, info.damaged
      (5, {'epoch': 3}, {})
    """
    check("verify", verify, FLAG)
    contents = read_contents(path)
    damaged: dict[str, str] | None = None
    if verify:
        damaged = {}
        for i, leaf in enumerate(contents.leaves.values(), 1):
            logging.getLogger("jzero").info("Reading leaf %s of %s.", i, len(contents.leaves))
            try:
                check_leaf(contents, leaf)
            except CheckpointError as error:
                damaged[leaf.path] = " ".join(str(error).removesuffix(REMEDY).split())
    steps = find_steps(contents.directory.parent)
    return CheckpointInfo(
        directory=str(contents.directory),
        steps=tuple(sorted(steps)) if contents.directory in steps.values() else (),
        leaves=tuple(contents.leaves.values()),
        notes=contents.notes,
        extra=read_extra(contents) if contents.has(EXTRA) else {},
        has_data_iterator=contents.has(ITERATOR),
        damaged=damaged,
    )
