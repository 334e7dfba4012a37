"""Parameters as safetensors: written from a state or a checkpoint leaf by leaf, read straight into shards."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from jzero.arrays.casts import round_to
from jzero.arrays.misfits import describe_misfit
from jzero.arrays.placement import gather_leaves, on_device
from jzero.checkpoint.contents import Contents, StoredLeaf, absolute, read_contents
from jzero.checkpoint.extras import everywhere
from jzero.checkpoint.leaves import Keys, WantedLeaf, natural_state
from jzero.checkpoint.matching import renamed_paths
from jzero.checkpoint.parts import checked_leaves
from jzero.checkpoint.restoring import PARAMS, Choice, Target, warn_unless_complete
from jzero.checkpoint.safetensors_files import (
    FOUR_BITS,
    METADATA,
    ExportReport,
    TensorFile,
    TensorSpec,
    as_dtype,
    find_tensors,
    is_known,
    write_tensors,
)
from jzero.checkpoint.shards import placed
from jzero.plan.layout import Cut
from jzero.state.pending import apply_pending
from jzero.state.train_state import adapt_sharded, check_alive

__all__ = ["export_checkpoint", "export_params", "load_params"]

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
    chosen = [i for i, leaf in enumerate(leaves) if leaf.keys[0] in fields and _is_chosen(leaf.keys, paths)]
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
    chosen = [leaf for leaf in contents.leaves.values() if leaf.keys[0] in fields and _is_chosen(leaf.keys, paths)]
    wanted = None if dtype is None else as_dtype(dtype)
    specs, renamed = _specs([(leaf.keys, leaf.shape, leaf.dtype) for leaf in chosen], wanted, paths)
    read = zip(checked_leaves(contents, chosen), specs, strict=True)
    tensors = ((_check_fits(x, spec).astype(spec.dtype, copy=False) for x in parts) for parts, spec in read)
    notes = {"format": "flax", **contents.notes.get("ties", {}), **renamed}
    return write_tensors(absolute(path), specs, tensors, max_file_bytes, notes)


def load_params(
    state: Any,
    path: Any,
    *,
    paths: str | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    donate: bool = False,
) -> Any:
    r"""Returns the state with parameters from safetensors files, masters included; nothing else changes.

    Each process reads the slices for its devices. The result shares all other arrays with `state`; gradients that wait
    for a later step are applied first (`apply_pending`).

    Args:
      state: A sharded train state with values.
      path: A safetensors file, an index of several, or a directory with either (not with both, unless the index lists
        the file).
      paths: Regular expression over whole key paths such as `"decoder/.*"`, as for `export_params`; other parameters
        do not change. All parameters by default; without adapters: `r"(?!.*/lora_[ab]).*"`.
      rename: Regular expressions over whole names in the files, with their replacements, as for `re.sub`:
        `{r"model\.(.*)": r"\1"}`. Names of parameters are keys joined by dots.
      strict: Whether it is an error if the files lack parameters, or have others. If not, missing parameters do not
        change, and a warning lists both.
      donate: Free the replaced parameters before anything is read.

    Returns:
      A state of the same class.

    Raises:
      CheckpointError: There are no such files, or they are damaged.
      ValueError: They are of another model, hold a tied parameter twice with different numbers, or hold numbers that
        the state's dtypes cannot; or `paths` matches no parameter.
      TypeError: The state was not sharded by jzero.

    Example:
      >>> _ = jzero.export_params(state, f"{tmp}/to_load")
      >>> loaded = jzero.load_params(state, f"{tmp}/to_load")
      >>> bool((jzero.get_full_param(loaded, "w") == jzero.get_full_param(state, "w")).all())
      True
    """
    adapted = adapt_sharded(state)
    check_alive(adapted.state)
    target = Target(adapted)
    choice = Choice(params_only=True, strict=strict, donate=donate)
    names = _names(target, choice)
    if paths is not None:
        choice = dataclasses.replace(choice, paths=_over_whole_paths(paths, names))
    tensors, notes = everywhere(lambda: find_tensors(path))
    named = {new: tensors[old] for new, old in renamed_paths(tensors, rename or {}).items()}
    contents, sources = _as_contents(path, named, names, _same_names(adapted.ties(), notes))
    found, report = everywhere(lambda: target.match(contents, choice))
    unexpected = [path for path in report.unexpected if path not in {leaf.path for leaf in target.wanted}]
    if strict and unexpected:
        raise ValueError(
            f"{path} holds tensors that the state has no parameters for: {unexpected[:10]}"
            + (f" and {len(unexpected) - 10} more" if len(unexpected) > 10 else "")
            + ". If that is meant, pass `strict=False`; if parameters have other names there, `rename`."
        )
    target.check_kept(found)
    target = Target(adapt_sharded(apply_pending(state, donate=donate)))  # a later step would change what was loaded
    if donate:
        target.free(found)
    read = everywhere(lambda: {i: _place(sources[leaf.keys], target.wanted[i]) for i, leaf in found.items()})
    loaded = target.fill(read, None, dataclasses.replace(choice, donate=True))  # shares the other arrays
    warn_unless_complete(report, dataclasses.replace(choice, params_only=False))
    return loaded


def _name(keys: Keys) -> str:
    return ".".join(keys[1:])


def _is_chosen(keys: Keys, paths: str | None) -> bool:
    return paths is None or re.fullmatch(paths, "/".join(keys[1:])) is not None


def _specs(
    leaves: Sequence[tuple[Keys, tuple[int, ...], Any]], dtype: np.dtype[Any] | None, paths: str | None
) -> tuple[list[TensorSpec], dict[str, str]]:
    """Returns the tensors to write, and the replacements of names that the format does not allow."""
    if not leaves:
        what = "There are no parameters to export" if paths is None else f"`paths` {paths!r} matches no parameter"
        raise ValueError(f"{what}.")
    specs: list[TensorSpec] = []
    bad: list[str] = []
    names = {_name(keys) for keys, _, _ in leaves}
    renamed: dict[str, str] = {}
    for keys, shape, given in leaves:
        is_float = jax.numpy.issubdtype(given, np.floating)
        wanted = dtype if dtype is not None and is_float else given
        name = _name(keys)
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


def _names(target: Target, choice: Choice) -> dict[str, Keys]:
    """Returns the keys of each parameter by its name."""
    chosen = choice.selector(target.adapted.state)
    return {_name(leaf.keys): leaf.keys for leaf in target.wanted if chosen(leaf)}


def _over_whole_paths(paths: str, names: Mapping[str, Keys]) -> str:
    """Turns an expression over key paths into one over paths of leaves, which begin with a field of the state."""
    try:
        re.compile(paths)
    except re.error as error:
        raise ValueError(f"`paths` {paths!r} is not a regular expression: {error}.") from error
    if not any(_is_chosen(keys, paths) for keys in names.values()):
        some = ", ".join(repr("/".join(keys[1:])) for keys in list(names.values())[:5])
        raise ValueError(
            f"`paths` {paths!r} matches no parameter: it must match a whole key path. The first are {some}."
        )
    return f"[^/]*/(?:{paths})"


def _same_names(ties: Mapping[str, Sequence[str]], notes: Mapping[str, str]) -> dict[str, str]:
    """Returns, for each other name of a tied parameter, here or in the files, its main name."""
    here = {other: name for name, others in ties.items() for other in others}
    there = {name: other for other, name in notes.items()}
    return {**there, **{other: here.get(name, name) for name, other in there.items()}, **here}


def _as_contents(
    path: Any, named: Mapping[str, TensorFile], names: Mapping[str, Keys], same: Mapping[str, str]
) -> tuple[Contents, dict[Keys, list[TensorFile]]]:
    """Returns tensors as the contents of a checkpoint: by their keys in the state, tied ones together."""
    sources: dict[Keys, list[TensorFile]] = {}
    for name, tensor in named.items():
        known = name if name in names else same.get(name, name)
        keys = names.get(known, (PARAMS, *known.split(".")))
        sources.setdefault(keys, []).append(tensor)
    leaves = {keys: StoredLeaf(keys, tensors[0].shape, tensors[0].dtype) for keys, tensors in sources.items()}
    directory = epath.Path(path)
    return Contents(directory, directory, leaves, None, {}), sources


def _place(tensors: Sequence[TensorFile], wanted: WantedLeaf) -> jax.Array:
    """Reads a tensor into this process's shards. Tied tensors must be equal."""
    tensor = tensors[0]
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(tensor.dtype))

    def part(index: Any) -> np.ndarray:
        found = _padded_part(tensor, wanted.cut, index)
        for other in tensors[1:]:
            if other.shape != tensor.shape or _padded_part(other, wanted.cut, index).tobytes() != found.tobytes():
                raise ValueError(
                    f"{tensor.name!r} and {other.name!r} are one parameter of the state, {wanted.path}, but not the "
                    f"same in {tensor.path}: take one of them out of the file, or untie the parameter."
                )
        if why := describe_misfit(found, dtype):
            raise ValueError(
                f"{tensor.name!r} in {tensor.path}, read into {wanted.path}, holds {why}: enable wider numbers, "
                "`jax.config.update('jax_enable_x64', True)`."
            )
        return found.astype(dtype, copy=False)

    return placed(wanted.shape, wanted.sharding, part)


def _padded_part(tensor: TensorFile, cut: Cut | None, index: tuple[slice, ...]) -> np.ndarray:
    if cut is None:
        return tensor.read(index)
    start, stop, _ = index[cut.dim].indices(cut.stored_size)
    inside = min(stop, cut.natural_size)
    if start >= inside:  # nothing but padding
        return np.zeros([len(range(*i.indices(n))) for i, n in zip(index, cut.stored_shape, strict=True)], tensor.dtype)
    found = tensor.read((*index[: cut.dim], slice(start, inside), *index[cut.dim + 1 :]))
    widths = [(0, 0)] * found.ndim
    widths[cut.dim] = (0, stop - start - found.shape[cut.dim])
    return np.pad(found, widths)
