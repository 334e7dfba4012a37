"""What Orbax writes of a checkpoint, and how: its items, their handlers, and the writers of arrays.

jzero writes the arrays: Orbax would write no parts that differ in size, no records, and chunks without checksums. It
reads them like any others.

[Note: Checksums]
The database of chunks has checksums of its own pages, but none of the numbers. So each chunk ends with a CRC-32C, a
codec of Zarr 3: whatever reads it, also plain Orbax, refuses a chunk in which a bit has flipped. That covers what
happens after a chunk is encoded; a bit that flips in memory before is saved as it is. Random keys have no checksum,
since Orbax writes them, with what their kind needs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jzero.checkpoint.disk_saving import DiskArray, Snapshot
from jzero.core.base.types import DType
from jzero.core.layout.box import Box, Index

ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo

STATE = "default"
"""Item of a checkpoint that holds the state: the default name of Orbax's own manager."""
EXTRA = "extra"
EXTRA_ARRAYS = "extra_arrays"
ITERATOR = "data_iterator"
NOTES = "jzero"
"""Item with jzero's notes, as JSON."""


@dataclasses.dataclass(frozen=True)
class MemoryArray:
    """An array in memory to write, perhaps padded. A leaf of the tree for Orbax.

    Attributes:
      array: The array as stored.
      shape: Its shape on disk, without padding.
      replica: Which of the devices that hold a part writes it.
    """

    array: jax.Array
    shape: tuple[int, ...]
    replica: int

    @property
    def dtype(self) -> DType:
        """Its dtype on disk."""
        return dtype_on_disk(self.array.dtype)

    def shards(self) -> list[jax.Shard]:
        """Returns the shards for this process to write."""
        return [shard for shard in self.array.addressable_shards if shard.replica_id == self.replica]

    def parts(self) -> list[tuple[Index, np.ndarray]]:
        """Returns what they hold, on the host, each with its place in the natural array."""
        boxes = ((shard, Box.of(shard.index, self.array.shape)) for shard in self.shards())
        inside = ((shard, box, box & Box.whole(self.shape)) for shard, box in boxes)
        return [
            (place.slices, np.asarray(shard.data)[place.within(box).slices].astype(self.dtype, copy=False))
            for shard, box, place in inside
            if place is not None
        ]


def dtype_on_disk(dtype: DType) -> DType:
    """Returns the dtype of numbers on disk: bytes, for whole numbers of fewer bits that Orbax cannot write."""
    if can_store(dtype) or not jnp.issubdtype(dtype, jnp.integer):
        return dtype
    return np.dtype("uint8" if jnp.issubdtype(dtype, jnp.unsignedinteger) else "int8")


def can_store(dtype: DType) -> bool:
    """Whether Orbax can write arrays of a dtype; for PRNG keys it writes their words."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    try:
        ts.dtype(np.dtype(dtype).name)
    except (TypeError, ValueError):
        return False
    return True


class _MemoryArrayHandler(ocp.type_handlers.ArrayHandler):
    """Writes `MemoryArray`s, as ordinary arrays on disk."""

    def typestr(self) -> str:
        """The kind for readers. For a `jax.Array`, Orbax would need metadata that only it can write."""
        return "np.ndarray"

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Copies to the host, then returns a future that writes in the background."""
        args = args or [None] * len(values)
        for shard in itertools.chain.from_iterable(x.shards() for x in values):
            shard.data.copy_to_host_async()
        writing = [_write(x, x.parts(), info, arg) for x, info, arg in zip(values, infos, args, strict=True)]

        async def write_all() -> None:
            await asyncio.gather(*writing)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write_all(), name="memory_array_handler")]


async def _write(
    x: MemoryArray, parts: Sequence[tuple[Index, np.ndarray]], info: ParamInfo, arg: ocp.SaveArgs | None
) -> None:
    # No two processes share a chunk.
    opened = await _create(x, x.array.sharding.shard_shape(x.array.shape), info, arg)
    # The host's copy does not change: a step that is given the array for donation finds it in use.
    writing = (opened[place].write(part, can_reference_source_data_indefinitely=True) for place, part in parts)
    await asyncio.gather(*writing)


async def _create(
    x: MemoryArray | DiskArray, chunk: tuple[int, ...], info: ParamInfo, arg: ocp.SaveArgs | None
) -> ts.TensorStore:
    """Returns a new array of a checkpoint, to be written in chunks."""
    await info.await_path_creation()
    streams, process = isinstance(x, DiskArray), jax.process_index()
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=bool(info.is_ocdbt_checkpoint),
        global_shape=x.shape,
        local_shape=chunk,
        dtype=x.dtype,
        process_index=(f"{process}disk" if streams else process) if info.is_ocdbt_checkpoint else None,
        arg=arg,
    )
    spec["metadata"]["codecs"] = CODECS
    if streams and info.is_ocdbt_checkpoint:
        spec["kvstore"]["config"]["max_decoded_node_bytes"] = NODE_BYTES
    if process == 0:
        await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
    return await ts.open(ts.Spec(spec), open=True, assume_metadata=True, context=info.ts_context)


CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
"""How a chunk becomes bytes, see [Note: Checksums]."""
NODE_BYTES = 1 << 14
"""Most bytes of a node of the database of streamed chunks, which is a database of its own. Each commit writes a node
anew, and a stream makes many commits. Orbax's own arrays take few, and are all in one node."""


class _DiskArrayHandler(ocp.type_handlers.ArrayHandler):
    """Writes `DiskArray`s, all of one snapshot, as ordinary arrays on disk; then releases the snapshot."""

    def typestr(self) -> str:
        """The kind for readers, as for a `MemoryArray`."""
        return "np.ndarray"

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Returns a future that reads and writes in the background."""
        args = args or [None] * len(values)
        by_param: dict[int, list[Any]] = {}
        for x, info, arg in zip(values, infos, args, strict=True):
            by_param.setdefault(x.param, []).append((x, info, arg))

        async def write_all() -> None:
            for fields in by_param.values():
                await _write_from_disk(fields)

        future = ocp.future.CommitFutureAwaitingContractedSignals(write_all(), name="disk_array_handler")
        # Not in `write_all`, which never begins if Orbax cannot make its folders: steps wait for the release.
        threading.Thread(target=_release_after, args=(future, values[0].snapshot), daemon=True).start()
        return [future]


def _release_after(future: ocp.future.Future, snapshot: Snapshot) -> None:
    with contextlib.suppress(BaseException):  # Orbax raises it, too
        future.result()
    snapshot.release()


async def _write_from_disk(fields: Sequence[tuple[DiskArray, ParamInfo, ocp.SaveArgs | None]]) -> None:
    """Writes all that is on disk of a parameter, chunk by chunk, each record read once."""
    snapshot, i = fields[0][0].snapshot, fields[0][0].param
    opened = [await _create(x, snapshot.chunk_shape(i), info, arg) for x, info, arg in fields]
    under_way: collections.deque[tuple[int, Any]] = collections.deque()
    # Small chunks go together, since each commit costs time, see `NODE_BYTES`.
    left = 2 * snapshot.plan.config.offload.chunk_bytes
    for chunk, arrays in snapshot.chunks(i):
        here = [arrays[x.field] for x, _, _ in fields]
        size = sum(x.nbytes for x in here)
        while under_way and size > left:
            freed, done = under_way.popleft()
            await done
            left += freed
        writing = [
            array[chunk.slices].write(x, can_reference_source_data_indefinitely=True)
            for array, x in zip(opened, here, strict=True)
        ]
        under_way.append((size, asyncio.gather(*writing)))
        left -= size
    for _, done in under_way:
        await done


def state_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns the handler of a tree of arrays to write, which may have `MemoryArray`s and `DiskArray`s.

    Compression would take more time than all the rest, for a twelfth of the space: numbers are mostly noise.
    """
    handlers = ocp.type_handlers
    registry = handlers.create_type_handler_registry(
        (MemoryArray, _MemoryArrayHandler()),
        (DiskArray, _DiskArrayHandler()),
        *((kind, handlers.get_type_handler(kind)) for kind in (int, float, np.number, np.ndarray, jax.Array, str)),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False, use_zarr3=True)


def handler_registry() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Returns the handlers that write the items of a checkpoint."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name in (STATE, EXTRA_ARRAYS):
        registry.add(name, ocp.args.PyTreeSave, state_handler())
    for name in (EXTRA, ITERATOR, NOTES):
        registry.add(name, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return registry
