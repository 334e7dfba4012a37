"""Orbax's handlers for a checkpoint, and the writers of padded arrays and of those on disk.

Orbax reads and writes everything, with two exceptions. Arrays whose parts differ in size are written here, since no
`jax.Array` has such parts; and records on disk never are arrays. Orbax reads both like any other array.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import threading
import weakref
from collections.abc import Awaitable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jzero.checkpoint.disk_saving import DiskArray, Snapshot
from jzero.core.base.types import DType
from jzero.core.layout.box import Box, Index

T = TypeVar("T")
ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo

STATE = "default"
"""Item of a checkpoint that holds the state: the default name of Orbax's own manager."""
EXTRA = "extra"
EXTRA_ARRAYS = "extra_arrays"
ITERATOR = "data_iterator"
NOTES = "jzero"
"""Item with jzero's notes, as JSON."""


@dataclasses.dataclass(frozen=True)
class CutArray:
    """An array that Orbax cannot write as is: padded, or of a dtype that `dtype_on_disk` changes.

    A leaf of the tree for Orbax.

    Attributes:
      array: The array as stored.
      shape: Its shape on disk, without padding.
    """

    array: jax.Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        """Its dtype on disk."""
        return dtype_on_disk(self.array.dtype)

    def parts(self) -> list[tuple[Index, np.ndarray]]:
        """Returns the parts for this process to write, on the host, each with its place in the natural array."""
        shards = [shard for shard in self.array.addressable_shards if shard.replica_id == 0]
        for shard in shards:
            shard.data.copy_to_host_async()
        boxes = ((shard, Box.of(shard.index, self.array.shape)) for shard in shards)
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


class _CutArrayHandler(ocp.type_handlers.ArrayHandler):
    """Writes `CutArray`s, as ordinary arrays on disk."""

    def typestr(self) -> str:
        """The kind for readers. For a `jax.Array`, Orbax would need metadata that only it can write."""
        return "np.ndarray"

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Copies to the host, then returns a future that writes in the background."""
        args = args or [None] * len(values)
        writing = [_write(x, x.parts(), info, arg) for x, info, arg in zip(values, infos, args, strict=True)]

        async def write_all() -> None:
            await asyncio.gather(*writing)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write_all(), name="cut_array_handler")]


async def _write(
    x: CutArray, parts: Sequence[tuple[Index, np.ndarray]], info: ParamInfo, arg: ocp.SaveArgs | None
) -> None:
    # No two processes share a chunk.
    opened = await _create(x, x.array.sharding.shard_shape(x.array.shape), info, arg)
    # The host's copy does not change: a step that is given the array for donation finds it in use.
    writing = (opened[place].write(part, can_reference_source_data_indefinitely=True) for place, part in parts)
    await asyncio.gather(*writing)


async def _create(
    x: CutArray | DiskArray, chunk: tuple[int, ...], info: ParamInfo, arg: ocp.SaveArgs | None
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
    if streams and info.is_ocdbt_checkpoint:
        spec["kvstore"]["config"]["max_decoded_node_bytes"] = NODE_BYTES
    if process == 0:
        await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
    return await ts.open(ts.Spec(spec), open=True, assume_metadata=True, context=info.ts_context)


NODE_BYTES = 1 << 14
"""Most bytes of a node of the database of streamed chunks, which is a database of its own. Each commit writes a node
anew, and a stream makes many commits. Orbax's own arrays take few, and are all in one node."""


class _DiskArrayHandler(ocp.type_handlers.ArrayHandler):
    """Writes `DiskArray`s, all of one snapshot, as ordinary arrays on disk; then releases the snapshot."""

    def typestr(self) -> str:
        """The kind for readers, as for a `CutArray`."""
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
    left = 2 * snapshot.records.plan.config.offload.chunk_bytes
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


@dataclasses.dataclass
class Opened(ocp.RestoreArgs):
    """Asks for an open TensorStore in place of an array.

    Attributes:
      piece: The shape of what will be read at a time, in order: chunks that two reads share stay in memory. Empty if
        none do.
    """

    restore_type: Any = np.ndarray
    piece: tuple[int, ...] = ()


async def _open_to_read(info: ParamInfo, piece: Sequence[int]) -> ts.TensorStore:
    spec = ts.Spec(ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=bool(info.is_ocdbt_checkpoint)))
    array = await ts.open(spec, open=True, context=info.ts_context)
    if not piece:
        return array
    chunk: Any = array.chunk_layout.read_chunk.shape
    counts = [min(-(-(n + c - 1) // c), -(-size // c)) for n, c, size in zip(piece, chunk, array.shape, strict=True)]
    cache_bytes = math.prod(counts) * math.prod(chunk) * array.dtype.numpy_dtype.itemsize
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}}, info.ts_context)
    return await ts.open(spec, open=True, context=context)


class _PatientHandler(ocp.type_handlers.TypeHandler):
    """Reads with another handler; if a part cannot be read, waits for the other parts before it raises.

    Otherwise they would continue after their event loop has closed, and fill the output with meaningless errors.
    """

    def __init__(self, handler: ocp.type_handlers.TypeHandler) -> None:
        self._handler = handler
        self._array_metadata_store = getattr(handler, "_array_metadata_store", None)  # Orbax reads it from here

    def typestr(self) -> str:
        return str(self._handler.typestr())

    async def metadata(self, infos: Sequence[ParamInfo]) -> Any:
        return await _patiently(self._handler.metadata(infos))

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Any:
        return await self._handler.serialize(values, infos, args)

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        return await _patiently(self._deserialize(infos, args or [None] * len(infos)))

    async def _deserialize(self, infos: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        opening = [_open_to_read(x, arg.piece) for x, arg in zip(infos, args, strict=True) if _opens(arg)]
        rest = [(x, arg) for x, arg in zip(infos, args, strict=True) if not _opens(arg)]
        opened = iter(await asyncio.gather(*opening))
        read = iter(await self._handler.deserialize(*map(list, zip(*rest, strict=True))) if rest else ())
        return [next(opened if _opens(arg) else read) for arg in args]


def _opens(arg: object) -> bool:
    return isinstance(arg, Opened)


_READING: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, set[object]] = weakref.WeakKeyDictionary()
"""The current reads, by event loop."""


async def _patiently(reading: Awaitable[T]) -> T:
    before = asyncio.all_tasks()
    others = _READING.setdefault(asyncio.get_running_loop(), set())
    this = object()
    others.add(this)
    try:
        return await reading
    except Exception:
        started = asyncio.all_tasks() - before
        await asyncio.gather(*started, return_exceptions=True)
        others.discard(this)
        while others:  # each handler reads its kind of leaves, and the first failure would end the loop
            await asyncio.sleep(0.01)
        raise
    finally:
        others.discard(this)


def state_handler(*, reads: bool = False) -> ocp.PyTreeCheckpointHandler:
    """Returns the handler of a tree of arrays; trees to write may have `CutArray`s and `DiskArray`s.

    Compression would take more time than all the rest, for a twelfth of the space: numbers are mostly noise.
    """
    handlers = ocp.type_handlers
    kinds = {kind: handlers.get_type_handler(kind) for kind in (int, float, np.number, np.ndarray, jax.Array, str)}
    if reads:
        kinds |= {kind: _PatientHandler(kinds[kind]) for kind in (np.ndarray, jax.Array)}
    placeholder = type(ocp.PLACEHOLDER)
    registry = handlers.create_type_handler_registry(
        (CutArray, _CutArrayHandler()),
        (DiskArray, _DiskArrayHandler()),
        *kinds.items(),
        (placeholder, handlers.get_type_handler(placeholder)),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


def handler_registry() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Returns the handlers of all items of a checkpoint."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name in (STATE, EXTRA_ARRAYS):
        handler = state_handler()
        registry.add(name, ocp.args.PyTreeSave, handler)
        registry.add(name, ocp.args.PyTreeRestore, handler)
    for name in (EXTRA, ITERATOR, NOTES):
        json_handler = ocp.JsonCheckpointHandler()
        registry.add(name, ocp.args.JsonSave, json_handler)
        registry.add(name, ocp.args.JsonRestore, json_handler)
    return registry
