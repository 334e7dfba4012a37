"""What Orbax is told: how arrays that jzero pads are written, which handlers a checkpoint has.

Orbax writes and reads everything; only an array whose parts are not all of one size is written here, since no
`jax.Array` has such parts. It is read by Orbax like any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jzero.plan.layout import Cut

__all__ = [
    "EXTRA",
    "EXTRA_ARRAYS",
    "ITERATOR",
    "NOTES",
    "STATE",
    "CutArray",
    "can_store",
    "handler_registry",
    "state_handler",
]

STATE = "default"
"""Item of a checkpoint that holds the state: the one that Orbax's own manager takes if it is told no name."""
EXTRA = "extra"
EXTRA_ARRAYS = "extra_arrays"
ITERATOR = "data_iterator"
NOTES = "jzero"
"""Item with what jzero itself notes, as JSON."""


@dataclasses.dataclass(frozen=True)
class CutArray:
    """A padded array, to be written without its padding. A leaf of the tree that is handed to Orbax.

    Attributes:
      array: The array as stored.
      cut: How it is padded; not flattened.
    """

    array: jax.Array
    cut: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on disk."""
        return self.cut.shape

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return self.array.dtype

    def parts(self) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        """Returns the parts that this process has to write, on the host, each with its place in the natural array."""
        shards = [shard for shard in self.array.addressable_shards if shard.replica_id == 0]
        for shard in shards:
            shard.data.copy_to_host_async()
        parts = []
        for shard in shards:
            start, stop, _ = shard.index[self.cut.dim].indices(self.cut.stored_size)
            size = min(stop, self.cut.natural_size) - start
            if size > 0:
                inside = [slice(None)] * len(self.shape)
                inside[self.cut.dim] = slice(0, size)
                place = list(shard.index)
                place[self.cut.dim] = slice(start, start + size)
                parts.append((tuple(place), np.asarray(shard.data)[tuple(inside)]))
        return parts


def can_store(dtype: Any) -> bool:
    """Whether arrays of a dtype can be written; of PRNG keys their words are."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    try:
        ts.dtype(np.dtype(dtype).name)
    except (TypeError, ValueError):
        return False
    return True


class _CutArrayHandler(ocp.type_handlers.ArrayHandler):
    """Writes `CutArray`s; on disk they are arrays like all others."""

    def typestr(self) -> str:
        """The kind that a reader is told. Of a `jax.Array` Orbax would want metadata that it alone can write."""
        return "np.ndarray"

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Copies to the host, then returns what writes in the background."""
        args = args or [None] * len(values)
        writing = [_write(x, x.parts(), info, arg) for x, info, arg in zip(values, infos, args, strict=True)]

        async def write_all() -> None:
            await asyncio.gather(*writing)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write_all(), name="cut_array_handler")]


async def _write(x: CutArray, parts: Any, info: Any, arg: Any) -> None:
    await info.await_path_creation()
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=x.shape,
        local_shape=x.array.sharding.shard_shape(x.cut.stored_shape),  # so that no two processes share a chunk
        dtype=x.dtype,
        process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
        arg=arg,
    )
    if jax.process_index() == 0:
        await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
    opened = await ts.open(ts.Spec(spec), open=True, assume_metadata=True, context=info.ts_context)
    # What was copied to the host does not change: a step that is donated the array finds it in use.
    writing = (opened[place].write(part, can_reference_source_data_indefinitely=True) for place, part in parts)
    await asyncio.gather(*writing)


class _PatientHandler(ocp.type_handlers.TypeHandler):
    """Reads as another handler does; if a part cannot be read, waits for the others before it says so.

    Else they would go on after their event loop was closed, and fill the output with errors that mean nothing.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._array_metadata_store = getattr(handler, "_array_metadata_store", None)  # where Orbax looks for it

    def typestr(self) -> str:
        return str(self._handler.typestr())

    async def metadata(self, infos: Sequence[Any]) -> Any:
        return await _patiently(self._handler.metadata(infos))

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Any:
        return await self._handler.serialize(values, infos, args)

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        return await _patiently(self._handler.deserialize(infos, args))


_READING: weakref.WeakKeyDictionary[Any, set[object]] = weakref.WeakKeyDictionary()
"""By event loop, what reads at the moment."""


async def _patiently(reading: Any) -> Any:
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
        while others:  # each handler reads its kind of leaves; the loop ends with the first that fails
            await asyncio.sleep(0.01)
        raise
    finally:
        others.discard(this)


def state_handler(*, reads: bool = False) -> ocp.PyTreeCheckpointHandler:
    """Returns the handler of a tree of arrays, some of which may be `CutArray`s if it is to be written."""
    handlers = ocp.type_handlers
    kinds = {kind: handlers.get_type_handler(kind) for kind in (int, float, np.number, np.ndarray, jax.Array, str)}
    if reads:
        kinds |= {kind: _PatientHandler(kinds[kind]) for kind in (np.ndarray, jax.Array)}
    placeholder = type(ocp.PLACEHOLDER)
    registry = handlers.create_type_handler_registry(
        (CutArray, _CutArrayHandler()), *kinds.items(), (placeholder, handlers.get_type_handler(placeholder))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def handler_registry() -> Any:
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
