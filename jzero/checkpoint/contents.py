"""The contents of a checkpoint on disk: its leaves, by keys, and jzero's notes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jzero.checkpoint.damage import REMEDY, CheckpointError, DamageError, is_there, reading
from jzero.checkpoint.leaves import Keys
from jzero.checkpoint.opening import METADATA_FILE, keeping_chunks, open_tree
from jzero.checkpoint.orbax_io import EXTRA, ITERATOR, NOTES, STATE
from jzero.core.base.types import DType
from jzero.core.config.documents import parse
from jzero.core.config.settings import (
    ANY,
    FLAG,
    TEXT,
    Setting,
    block,
    block_of,
    check,
    integer,
    list_of,
    number,
    one_of,
)

FORMAT = 2
"""Version of jzero's notes. A reader rejects later versions."""

T = TypeVar("T")
DIGEST = "digest"
_COUNT, _CHECKSUM = integer(0, most=2**31 - 1), integer(0, most=2**32 - 1)
_LOSS_SCALE = {
    "scale": number("a number above 0, up to 2^100", lambda x: 0 < x <= 2.0**100),
    "good_steps": _COUNT,
    "hysteresis": _COUNT,
    "exhausted": FLAG,
    "overflowed": list_of(FLAG),
}
_PRECISION = {"loss_scale": block(_LOSS_SCALE, required=_LOSS_SCALE), "num_updates": _COUNT}
_NOTES: dict[str, Setting[Any]] = {
    **dict.fromkeys(("jzero", "jax"), TEXT),
    "config": block({"stage": one_of(0, 1, 2, 3)}, required=["stage"]),
    "mesh": block_of(integer(1)),
    "num_processes": integer(1),
    "precision": block(_PRECISION),
}
_LATER_NOTES: dict[str, Setting[Any]] = {
    **dict.fromkeys(("checksums", "digests"), block_of(_CHECKSUM)),
    **dict.fromkeys(("keys", "param_fields", "paths"), list_of(TEXT)),
    "ties": block_of(TEXT),
}
_ITEMS = {EXTRA: block({}), ITERATOR: block({"positions": list_of(ANY)}, required=["positions"])}
"""What jzero's JSON has: its notes, of which some are not in every checkpoint, and other items."""


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One array of a checkpoint.

    Attributes:
      keys: The keys of its path.
      shape: Its shape; for PRNG keys, that of their words.
      dtype: Its dtype.
      is_key: Whether it holds PRNG keys; `None` if unknown.
    """

    keys: Keys
    shape: tuple[int, ...]
    dtype: DType
    is_key: bool | None = None

    @property
    def path(self) -> str:
        """The keys as text, such as `"params/decoder/kernel"`."""
        return "/".join(self.keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, uncompressed."""
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Contents:
    """A checkpoint on disk.

    Attributes:
      directory: The checkpoint.
      state_directory: The directory with the tree of arrays.
      leaves: The arrays by keys, in order.
      arrays: The same, open.
      notes: jzero's notes; empty if another program wrote the checkpoint.
    """

    directory: epath.Path
    state_directory: epath.Path
    leaves: Mapping[Keys, StoredLeaf]
    arrays: Mapping[Keys, Any]
    notes: Mapping[str, Any]

    def open(self, pieces: Mapping[Keys, tuple[int, ...]]) -> dict[Keys, Any]:
        """Returns arrays as open TensorStores.

        Args:
          pieces: The keys of each, with the shape of what will be read at a time if reads share chunks, see
            `keeping_chunks`.

        Raises:
          CheckpointError: One cannot be opened.
        """
        with self.errors():
            return {
                keys: keeping_chunks(self.arrays[keys], piece) if piece else self.arrays[keys]
                for keys, piece in pieces.items()
            }

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Turns the libraries' errors about arrays into a `CheckpointError`, see `reading`."""
        return reading(self.state_directory, self._names)

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """The paths of leaves by Orbax's names."""
        return {".".join(keys): "/".join(keys) for keys in self.leaves}

    def has(self, item: str) -> bool:
        """Whether the checkpoint has an item of this name beside the state."""
        return is_there(self.directory / item)

    def read_json(self, item: str) -> Any:
        """Returns an item that was written as JSON; `None` if there is none."""
        path = self.directory / item / "metadata"
        if not is_there(path) and item not in self.notes.get("digests", {}):
            return None
        with reading(path):
            value = _checked(item, json.loads(path.read_text()), _ITEMS.get(item, ANY), path)
        if digest(value) != self.notes.get("digests", {}).get(item, digest(value)):
            raise DamageError(f"{path} is damaged: it is not what was written.\n{REMEDY}")
        return value


def absolute(path: epath.PathLike) -> epath.Path:
    """Returns an absolute path, as Orbax needs it."""
    return epath.Path(path).expanduser().absolute()


def read_contents(path: epath.PathLike) -> Contents:
    """Returns the contents of a checkpoint: a step of a manager, one that `save_checkpoint` made, or Orbax's own.

    Args:
      path: The directory of the checkpoint. For a manager's directory, this takes the newest step.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged.
      ValueError: It holds several trees of arrays, or a later version of jzero wrote it.
    """
    directory = absolute(path)
    state_directory = _find_state(directory)
    if state_directory is None and (steps := find_steps(directory)):
        directory = steps[max(steps)]
        state_directory = _find_state(directory)
    if state_directory is None:
        hint = "Name the directory of a step, one that `save_checkpoint` made, or a manager's."
        if not is_there(directory):
            raise CheckpointError(f"There is no checkpoint at {path}.\n{hint}")
        raise DamageError(f"There is no checkpoint at {path}: it holds no tree of arrays.\n{hint}")
    notes = _read_notes(directory)
    paths = notes.get("paths", notes.get("checksums", ()))  # format 1 had sums of its own
    with reading(state_directory, {path.replace("/", "."): path for path in paths}):
        arrays = open_tree(state_directory)
    leaves = {
        keys: StoredLeaf(
            keys, tuple(x.shape), x.dtype.numpy_dtype, "/".join(keys) in notes["keys"] if "keys" in notes else None
        )
        for keys, x in arrays.items()
    }
    if notes and (differ := sorted({*paths} ^ {leaf.path for leaf in leaves.values()})):
        raise DamageError(f"{state_directory / METADATA_FILE} is damaged: it differs about {differ[:5]}.\n{REMEDY}")
    return Contents(directory, state_directory, leaves, arrays, notes)


def find_steps(directory: epath.Path) -> dict[int, epath.Path]:
    """Returns the complete steps in a manager's directory."""
    named = [child for child in _children(directory) if re.fullmatch(r"0|[1-9]\d*", child.name) and is_there(child)]
    return {int(child.name): child for child in named if _is_complete(child)}


def _is_complete(step: epath.Path) -> bool:
    """Whether a step is complete: where folders are renamed, by its name, else as Orbax marks it."""
    if "://" in str(step):
        return bool(ocp.path.step.is_path_finalized(step))
    return _is_folder(step)


def _is_folder(path: epath.Path) -> bool:
    with reading(path):
        return is_there(path) and bool(path.stat().is_directory)


def _children(directory: epath.Path) -> list[epath.Path]:
    """Returns what a directory holds, in order; an empty list if there is none."""
    if not _is_folder(directory):
        return []
    with reading(directory):
        return sorted(directory.iterdir())


def _find_state(directory: epath.Path) -> epath.Path | None:
    """Returns the directory with the tree of arrays of a checkpoint; `None` if there is none."""
    if is_there(directory / METADATA_FILE):
        return directory
    states = [child for child in _children(directory) if is_there(child / METADATA_FILE)]
    named = [child for child in states if child.name in (STATE, "state", "train_state", "pytree")]
    states = named or states
    if len(states) > 1:
        raise ValueError(
            f"The checkpoint at {directory} holds several trees of arrays: {[x.name for x in states]}. Name the "
            "directory of one of them."
        )
    return states[0] if states else None


def _read_notes(directory: epath.Path) -> dict[str, Any]:
    path = directory / NOTES / "metadata"
    with reading(path):
        if not is_there(path.parent) and NOTES not in _items_of(directory):
            return {}
        notes = parse(path.read_bytes(), path)
    if notes.get(DIGEST) != digest({k: x for k, x in notes.items() if k != DIGEST}):
        raise DamageError(f"{path} is damaged: it is not what was written.\n{REMEDY}")
    if _checked("format", notes.get("format"), integer(1), path) > FORMAT:
        raise ValueError(
            f"The checkpoint at {directory} was written by jzero {notes.get('jzero')} in format {notes['format']}, but "
            f"this version knows formats up to {FORMAT}: install a later jzero."
        )
    return _checked("", notes, block(_NOTES | _LATER_NOTES, required=_NOTES), path)


def _checked(name: str, value: object, setting: Setting[T], path: epath.Path) -> T:
    try:
        return check(name, value, setting, file=path)
    except ValueError as error:
        raise DamageError(f"The checkpoint is damaged: {error}\n{REMEDY}") from error


def _items_of(directory: epath.Path) -> Mapping[str, Any]:
    """Returns the items that Orbax wrote, from its metadata."""
    path = directory / "_CHECKPOINT_METADATA"
    handlers = json.loads(path.read_text()).get("item_handlers") if is_there(path) else None
    return handlers if isinstance(handlers, dict) else {}


def sign(notes: Mapping[str, object]) -> dict[str, object]:
    """Returns notes with their digest, which shows damage."""
    return {**notes, DIGEST: digest(notes)}


def digest(value: object) -> int:
    """Returns a checksum of an array, or of data for JSON."""
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
