"""Checksums of format 1, which has one for each leaf. What is written now has one in each chunk, see [Note: Checksums].

The sum modulo 2^32 of a leaf's words of at most 32 bits, in the order of the natural array, each mixed with its place
by the finalizer of MurmurHash3. It is compared before anything else is done, so these checkpoints are read twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.damage import REMEDY, DamageError, files_of
from jzero.checkpoint.parts import boxes_in_parts
from jzero.core.layout.box import Box

CHUNK = 1 << 16
"""Words that are mixed at once, in a core's cache."""


def check_sums(contents: Contents, leaves: Iterable[StoredLeaf]) -> None:
    """Reads the leaves that have a checksum of format 1, and raises a `DamageError` if one differs from it."""
    for leaf in leaves:
        if leaf.path in contents.notes.get("checksums", {}):
            check_leaf(contents, leaf)


def check_leaf(contents: Contents, leaf: StoredLeaf) -> None:
    """Reads a leaf; raises a `CheckpointError` if it cannot be read, or differs from its checksum of format 1."""
    noted = contents.notes.get("checksums", {}).get(leaf.path)
    total = first = 0
    for parts in boxes_in_parts(contents, [(leaf, Box.whole(leaf.shape))]):
        for part in parts:
            if noted is not None:
                words = words_of(part)
                total, first = total + sum_of(words, first), first + len(words)
    if noted is not None and total % 2**32 != noted:
        files = ", ".join(files_of(contents.state_directory, ".".join(leaf.keys) + "/")[:4])
        raise DamageError(
            f"The checkpoint at {contents.state_directory} is damaged: leaf {leaf.path!r} is not what was written, by "
            f"its checksum" + (f", file {files}" if files else "") + f".\n{REMEDY}"
        )


def words_of(x: np.ndarray) -> np.ndarray:
    """Returns the bits of numbers as words of 32, or of as many as a number has if that is less."""
    bits = jax.dtypes.iinfo(x.dtype).bits if jax.dtypes.issubdtype(x.dtype, np.integer) else 32
    words = np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * min(4, x.dtype.itemsize)}")
    return words & ((1 << bits) - 1) if bits < 8 else words


def sum_of(words: np.ndarray, first: int) -> int:
    """Returns the share of consecutive words, given the place of the first."""
    total = 0
    for at in range(0, len(words), CHUNK):
        part = words[at : at + CHUNK].astype(np.uint32)
        places = np.arange(first + at, first + at + len(part), dtype=np.uint64).astype(np.uint32)
        part ^= places * np.uint32(0x9E3779B1)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            part ^= part >> np.uint32(shift)
            part *= np.uint32(factor)
        total += int((part ^ (part >> np.uint32(16))).sum(dtype=np.uint64))
    return total
