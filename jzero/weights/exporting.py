"""Parameters as safetensors, written from a state or a checkpoint. What is written is known before a byte is read."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from etils import epath
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jzero.checkpoint.contents import absolute, read_contents
from jzero.checkpoint.format_1 import check_sums
from jzero.checkpoint.leaves import TargetLeaf, natural_state
from jzero.checkpoint.parts import boxes_in_parts
from jzero.checkpoint.restoring import PARAMS
from jzero.core.base.types import State
from jzero.core.layout.box import Box
from jzero.core.layout.placement import on_device
from jzero.core.layout.stored import Stored
from jzero.core.plan.state_fields import frozen_fields
from jzero.core.processes.exchange import succeed_together
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.train_state import check_alive
from jzero.weights.draft import Boxes, Decode, Form, draft_export
from jzero.weights.loading import path_of
from jzero.weights.mapping import Mapping as NameMapping
from jzero.weights.safetensors_files import ExportReport

MAX_FILE_BYTES = 5_000_000_000


def export_params(
    state: State,
    path: epath.PathLike,
    *,
    dtype: DTypeLike | None = None,
    paths: str | None = None,
    mapping: NameMapping | str | None = None,
    like: epath.PathLike | None = None,
    decode: Decode | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportReport:
    """Writes the parameters as safetensors, frozen ones included, one leaf, or one layer of a mapped one, at a time.

    Names are the keys joined by dots, such as `decoder.layer_0.kernel`; `__metadata__`, which the format reserves,
    gets one more underscore, and `load_params` finds it. Shapes are natural. A leaf that a model holds in several
    places is written once, and the file notes its other names. For 16-bit parameters, the masters are written. Peak
    host memory is one leaf and its cast. With several processes, each must call it, the first one writes, and each
    device also holds one whole leaf.

    With a `mapping` the result is what `load_params` reads with it, such as a folder for `transformers`.

    Args:
      state: A sharded train state.
      path: A file that ends in `.safetensors`, or else a directory for `model.safetensors`. Must not exist yet; of two
        programs that write it at the same time, one is refused.
      dtype: The dtype of floating-point parameters, such as `"bfloat16"`; by default each keeps its own.
      paths: Regular expression over whole key paths such as `"decoder/.*"`; all parameters by default. With the weights
        of a model `like`, tensors of what it leaves out are copied from there, to the byte.
      mapping: As for `load_params`, the other way round; `"auto"` goes by the `config.json` of `like`.
      like: The folder of the published model. Names and shapes are compared with it before anything is written, and
        `config.json`, tokenizer and chat template are put beside the weights.
      decode: Makes of each layer of a parameter what is written, on the host: `decode(path, leaves)`, where `leaves`
        are NumPy arrays by the last key of their paths: the parameter, and those beside it that `mapping` does not
        name, such as adapters. See `jzero.lora.merged`.
      max_file_bytes: Above this size the export has several files, `model-00001-of-00003.safetensors` and so on, with
        an index `model.safetensors.index.json`, as other libraries read them.

    Returns:
      The files that were written.

    Raises:
      ValueError: Files exist already, `paths` matches nothing, two leaves have the same name, the format lacks their
        dtypes, or `dtype` cannot hold their numbers; or they are not those of `mapping` or of the model `like`.
      TypeError: The state was not sharded by jzero.
      CheckpointError: The files could not be written, and none is left; or another program writes them.

    Example:
      >>> _ = jzero.export_params(state, f"{tmp}/model.safetensors", dtype="bfloat16")
      >>> from safetensors.numpy import load_file
      >>> {name: str(x.dtype) for name, x in load_file(f"{tmp}/model.safetensors").items()}
      {'w': 'bfloat16'}
    """
    return export_form(state, path, Form(dtype, paths, mapping, like, decode), max_file_bytes)


def export_form(state: State, path: epath.PathLike, form: Form, max_file_bytes: int) -> ExportReport:
    """See `export_params`."""
    adapted = adapt_sharded(state)
    plan = adapted.state.tx.plan
    check_alive(adapted.state)
    fields = (PARAMS, *frozen_fields(adapted.state))
    _, leaves, arrays = natural_state(adapted.state, plan)
    params = [i for i, leaf in enumerate(leaves) if leaf.keys[0] in fields]
    described = {leaves[i].keys: (leaves[i].leaf.shape, leaves[i].leaf.dtype) for i in params}
    ties = {other: name for name, others in adapted.ties().items() for other in others}
    draft = succeed_together(lambda: draft_export(described, form, ties))
    tensors = draft.tensors(_from_state({path_of(leaves[i].keys): (arrays[i], leaves[i]) for i in params}, draft.boxes))
    first = jax.process_index() == 0

    def write() -> ExportReport:
        try:
            return draft.write(absolute(path), tensors if first else None, max_file_bytes)
        finally:
            if jax.process_count() > 1:
                for _ in tensors:  # each process must take part in all gathers, even after an error
                    pass

    report: ExportReport = succeed_together(write)
    return report


def export_checkpoint(
    checkpoint: epath.PathLike,
    path: epath.PathLike,
    *,
    dtype: DTypeLike | None = None,
    paths: str | None = None,
    mapping: NameMapping | str | None = None,
    like: epath.PathLike | None = None,
    decode: Decode | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportReport:
    """Writes the parameters of a checkpoint as safetensors, without the model, as `jzero export` does.

    Compares each chunk with its checksum, and writes one while it reads the next. Some 24 MiB of numbers are in host
    memory at a time, or two chunks, and what decoding takes; or two whole leaves, if their chunks do not end with rows.
    With a `mapping`, it reads layer by layer.

    Args:
      checkpoint: As for `restore_checkpoint`.
      path: As for `export_params`.
      dtype: As for `export_params`.
      paths: As for `export_params`.
      mapping: As for `export_params`.
      like: As for `export_params`.
      decode: As for `export_params`.
      max_file_bytes: As for `export_params`.

    Returns:
      The files that were written.

    Raises:
      ValueError: As for `export_params`, or the checkpoint holds no parameters.
      CheckpointError: The checkpoint cannot be read, or the files cannot be written.

    Example:
      >>> jzero.save_checkpoint(f"{tmp}/for_export", state)
      >>> report = jzero.export_checkpoint(f"{tmp}/for_export", f"{tmp}/exported")
      >>> [pathlib.Path(file).name for file in report.files]
      ['model.safetensors']
    """
    contents = read_contents(checkpoint)
    fields = contents.notes.get("param_fields", [PARAMS])
    leaves = {path_of(leaf.keys): leaf for leaf in contents.leaves.values() if leaf.keys[0] in fields}
    described = {leaf.keys: (leaf.shape, leaf.dtype) for leaf in leaves.values()}
    draft = draft_export(described, Form(dtype, paths, mapping, like, decode), contents.notes.get("ties", {}))
    boxes = [(leaves[name], box) for tensor in draft.boxes for name, box in tensor]
    check_sums(contents, {leaf.keys: leaf for leaf, _ in boxes}.values())
    return draft.write(absolute(path), draft.tensors(boxes_in_parts(contents, boxes)), max_file_bytes)


def _from_state(arrays: Mapping[str, tuple[Stored, TargetLeaf]], boxes: Boxes) -> Iterator[Iterator[np.ndarray]]:
    """Yields boxes of a state's parameters, each in one part. With several processes, each must ask for the same.

    What is stored elsewhere is in device memory while the boxes of one tensor are taken.

    Args:
      arrays: Stored arrays by path, with how they are stored.
      boxes: The boxes.
    """
    on_devices: dict[str, jax.Array] = {}
    for own in boxes:
        on_devices = {path: on_devices[path] if path in on_devices else on_device(arrays[path][0]) for path, _ in own}
        for path, box in own:
            yield iter([_to_host(on_devices[path], arrays[path][1].sharding, box)])


def _to_host(x: jax.Array, sharding: NamedSharding, box: Box) -> np.ndarray:
    """Returns a box of an array, which is gathered if it has parts in other processes; caches nothing."""
    num = next((d for d, n in enumerate(box.shape) if n != 1), len(box.shape))
    spec = PartitionSpec(*sharding.spec[num:]) if x.is_fully_addressable else PartitionSpec()
    layer = _layer(x, box.start[:num], NamedSharding(sharding.mesh, spec))
    shards = {str(shard.index): shard for shard in layer.addressable_shards}  # one of each, if they are replicated
    host = np.empty(layer.shape, layer.dtype)
    for shard in shards.values():
        host[shard.index] = np.asarray(shard.data)
    return host[box.slices[num:]].reshape(box.shape)


@functools.partial(jax.jit, static_argnums=2)
def _layer(x: jax.Array, at: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Returns a layer as an array of its own, since jax keeps the NumPy array that an array was converted to."""
    for i in at:
        x = lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
    return lax.with_sharding_constraint(x, sharding)
