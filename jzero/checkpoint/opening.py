"""Opens the arrays of a checkpoint for reading, by TensorStore, which reads and decodes in threads of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jzero.checkpoint.leaves import Keys

METADATA_FILE = "_METADATA"
"""The file that marks a directory with a tree of arrays, written by Orbax."""


def open_tree(directory: epath.Path) -> dict[Keys, ts.TensorStore]:
    """Returns the arrays of a tree that Orbax or jzero wrote, open, by their keys, in the order of the tree.

    Orbax would open them anew for each read, and leave tasks behind if one fails.
    """
    described = json.loads((directory / METADATA_FILE).read_text())
    in_database = ocp.type_handlers.is_ocdbt_checkpoint(directory)
    context = ocp.type_handlers.get_ts_context(use_ocdbt=in_database)
    paths = [
        tuple(str(x["key"]) for x in leaf["key_metadata"])
        for leaf in described["tree_metadata"].values()
        if not leaf["value_metadata"]["skip_deserialize"] and leaf["value_metadata"]["value_type"] != "string"
    ]
    opening: dict[Keys, Any] = {}
    for keys in sorted(paths, key=_in_order):
        info = ocp.type_handlers.ParamInfo(
            name=".".join(keys),
            parent_dir=directory,
            is_ocdbt_checkpoint=in_database,
            use_zarr3=described.get("use_zarr3", False),
            ts_context=context,
        )
        spec = ts.Spec(ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=in_database))
        opening[keys] = ts.open(spec, open=True, context=context)
    return {keys: array.result() for keys, array in opening.items()}


def _in_order(keys: Keys) -> list[tuple[int, str]]:
    return [(int(key) if key.isdecimal() else 0, key) for key in keys]  # the tenth of a list comes after the ninth


def keeping_chunks(array: ts.TensorStore, piece: Sequence[int]) -> ts.TensorStore:
    """Returns an array whose chunks stay in memory while reads of so large a piece, in order, share them."""
    chunk: Any = array.chunk_layout.read_chunk.shape
    counts = [min(-(-(n + c - 1) // c), -(-size // c)) for n, c, size in zip(piece, chunk, array.shape, strict=True)]
    cache_bytes = math.prod(counts) * math.prod(chunk) * array.dtype.numpy_dtype.itemsize
    spec = array.spec(retain_context=False)
    return ts.open(spec, open=True, context=ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})).result()
