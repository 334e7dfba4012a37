"""Parameters as safetensors, written from a state or a checkpoint leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jzero.arrays.casts import round_to
from jzero.arrays.misfits import describe_misfit
from jzero.arrays.placement import gather_leaves, on_device
from jzero.checkpoint.contents import absolute, read_contents
from jzero.checkpoint.extras import everywhere
from jzero.checkpoint.leaves import Keys, WantedLeaf, natural_state
from jzero.checkpoint.loading import is_chosen, name_of
from jzero.checkpoint.parts import checked_leaves
from jzero.checkpoint.restoring import PARAMS
from jzero.checkpoint.safetensors_files import (
    FOUR_BITS,
    METADATA,
    ExportReport,
    TensorSpec,
    as_dtype,
    is_known,
    write_tensors,
)
from jzero.state.train_state import adapt_sharded, check_alive

__all__ = ["export_checkpoint", "export_params"]

MAX_FILE_BYTES = 5_000_000_000


def export_params(
    state: Any, path: Any, *, dtype: Any = None, paths: str | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> ExportReport:
    """Writes the parameters as safetensors, frozen ones included, one leaf at a time.

    Names are the keys joined by dots, such as `decoder.layer_0.kernel`; `__metadata__`, which the format reserves,
    gets one more underscore, and `load_params` finds it. Shapes are natural. A leaf that a model holds in several
    places is written once, and the file notes its other names. For 16-bit parameters, the masters are written. Peak
    host memory is one leaf and its cast. With several processes, each must call it, the first one writes, and each
    device also holds one whole leaf.

    Args:
      state: A sharded train state.
      path: A file that ends in `.safetensors`, or else a directory for `model.safetensors`. Must not exist yet; of two
        programs that write it at the same time, one is refused.
      dtype: The dtype of floating-point parameters, such as `"bfloat16"`; by default each keeps its own.
      paths: Regular expression over whole key paths such as `"decoder/.*"`; all parameters by default.
      max_file_bytes: Above this size the export has several files, `model-00001-of-00003.safetensors` and so on, with
        an index `model.safetensors.index.json`, as other libraries read them.

    Returns:
      The files that were written.

    Raises:
      ValueError: Files exist already, `paths` matches nothing, two leaves have the same name, the format lacks their
        dtypes, or `dtype` cannot hold their numbers.
      TypeError: The state was not sharded by jzero.
      CheckpointError: The files could not be written, and none is left; or another program writes them.

    Example:
      >>> _ = jzero.export_params(state, f"{tmp}/model.safetensors", dtype="bfloat16")
      >>> from safetensors.numpy import load_file
      >>> {name: str(x.dtype) for name, x in load_file(f"{tmp}/model.safetensors").items()}
      {'w': 'bfloat16'}
    """
    adapted = adapt_sharded(state)
    plan = adapted.state.tx.plan
    check_alive(adapted.state)
    fields = (PARAMS, *getattr(adapted.state, "frozen_fields", ()))
    _, leaves, arrays = natural_state(adapted.state, plan)
    chosen = [i for i, leaf in enumerate(leaves) if leaf.keys[0] in fields and is_chosen(leaf.keys, paths)]
    wanted = None if dtype is None else as_dtype(dtype)
    specs, renamed = _specs(
        [(leaves[i].keys, leaves[i].leaf.shape, leaves[i].leaf.dtype) for i in chosen], wanted, paths
    )
    whole = ([_whole(arrays[i], leaves[i], spec, plan.mesh)] for i, spec in zip(chosen, specs, strict=True))
    names = {spec.name for spec in specs}
    notes = {other: name for name, others in adapted.ties().items() if name in names for other in others} | renamed
    first = jax.process_index() == 0

    def write() -> ExportReport:
        try:
            return write_tensors(
                absolute(path), specs, whole if first else None, max_file_bytes, {"format": "flax", **notes}
            )
        finally:
            if jax.process_count() > 1:
                for _ in whole:  # each process must take part in all gathers, even after an error
                    pass

    report: ExportReport = everywhere(write)
    return report


def export_checkpoint(
    checkpoint: Any, path: Any, *, dtype: Any = None, paths: str | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> ExportReport:
    """Writes the parameters of a checkpoint as safetensors, without the model, as `jzero export` does.

    Compares each leaf with its checksum while it is written, and reads the next ones meanwhile. Some 24 MiB of numbers
    are in host memory at a time, and what decoding takes; or a whole leaf, if its chunks do not end with rows.

    Args:
      checkpoint: As for `restore_checkpoint`.
      path: As for `export_params`.
      dtype: As for `export_params`.
      paths: As for `export_params`.
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
    chosen = [leaf for leaf in contents.leaves.values() if leaf.keys[0] in fields and is_chosen(leaf.keys, paths)]
    wanted = None if dtype is None else as_dtype(dtype)
    specs, renamed = _specs([(leaf.keys, leaf.shape, leaf.dtype) for leaf in chosen], wanted, paths)
    read = zip(checked_leaves(contents, chosen), specs, strict=True)
    tensors = ((_check_fits(x, spec).astype(spec.dtype, copy=False) for x in parts) for parts, spec in read)
    notes = {"format": "flax", **contents.notes.get("ties", {}), **renamed}
    return write_tensors(absolute(path), specs, tensors, max_file_bytes, notes)


def _specs(
    leaves: Sequence[tuple[Keys, tuple[int, ...], Any]], dtype: np.dtype[Any] | None, paths: str | None
) -> tuple[list[TensorSpec], dict[str, str]]:
    """Returns the tensors to write, and the replacements of names that the format does not allow."""
    if not leaves:
        what = "There are no parameters to export" if paths is None else f"`paths` {paths!r} matches no parameter"
        raise ValueError(f"{what}.")
    specs: list[TensorSpec] = []
    bad: list[str] = []
    names = {name_of(keys) for keys, _, _ in leaves}
    renamed: dict[str, str] = {}
    for keys, shape, given in leaves:
        is_float = jax.numpy.issubdtype(given, np.floating)
        wanted = dtype if dtype is not None and is_float else given
        name = name_of(keys)
        if name == METADATA:
            renamed[name] = name = next(x for i in itertools.count(1) if (x := METADATA + "_" * i) not in names)
        if is_known(wanted) and np.dtype(wanted) == FOUR_BITS and math.prod(shape) % 2:
            bad.append(
                f"  {name}: shape {tuple(shape)}, an odd number of {wanted}, of which safetensors packs two in a byte"
            )
        elif not is_known(wanted):
            bad.append(f"  {name}: {wanted}, which safetensors does not have")
        elif not _is_text(name):
            bad.append(f"  {name!r}: a name that is no valid Unicode")
        else:
            specs.append(TensorSpec(name, tuple(shape), np.dtype(wanted)))
    if bad:
        raise ValueError(
            "These parameters cannot be exported:\n"
            + "\n".join(bad)
            + "\nLeave them out with `paths`, or cast or rename "
            "them before. `dtype=` casts floating-point parameters alone."
        )
    return specs, renamed


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_fits(x: Any, spec: TensorSpec) -> Any:
    """Returns an array as it is; raises if it has numbers that the dtype of the export cannot hold."""
    if why := describe_misfit(x, spec.dtype):
        raise ValueError(f"{spec.name} cannot be exported: it holds {why}. Pass a wider `dtype`.")
    return x


def _whole(x: jax.Array, wanted: WantedLeaf, spec: TensorSpec, mesh: Any) -> np.ndarray:
    """Returns a leaf on the host, in its natural shape; caches nothing in `x`."""
    x = _cast_copy(_check_fits(on_device(x), spec), spec.dtype)
    if not x.is_fully_addressable:
        (whole,) = gather_leaves([x], [dataclasses.replace(wanted.leaf, cut=wanted.cut)], mesh)
        return np.asarray(whole.addressable_data(0))
    host = np.empty(x.shape, spec.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            host[shard.index] = np.asarray(shard.data)
    return host if wanted.cut is None else host[tuple(slice(0, size) for size in wanted.leaf.shape)]


@functools.partial(jax.jit, static_argnums=1)
def _cast_copy(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a copy, since a jax array caches the NumPy array that it was converted to."""
    return round_to(x.copy(), dtype)
