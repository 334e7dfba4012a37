"""Parameters from safetensors files, read straight into shards."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from jzero.arrays.misfits import describe_misfit
from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.extras import everywhere
from jzero.checkpoint.leaves import Keys, WantedLeaf
from jzero.checkpoint.matching import renamed_paths
from jzero.checkpoint.restoring import PARAMS, Choice, Target, warn_unless_complete
from jzero.checkpoint.safetensors_files import TensorFile, find_tensors
from jzero.checkpoint.shards import placed
from jzero.plan.layout import Cut
from jzero.state.pending import apply_pending
from jzero.state.train_state import adapt_sharded, check_alive

__all__ = ["is_chosen", "load_params", "name_of"]


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


def name_of(keys: Keys) -> str:
    """Returns the name of a parameter in files."""
    return ".".join(keys[1:])


def is_chosen(keys: Keys, paths: str | None) -> bool:
    """Whether `paths` matches the path of a parameter."""
    return paths is None or re.fullmatch(paths, "/".join(keys[1:])) is not None


def _names(target: Target, choice: Choice) -> dict[str, Keys]:
    """Returns the keys of each parameter by its name."""
    chosen = choice.selector(target.adapted.state)
    return {name_of(leaf.keys): leaf.keys for leaf in target.wanted if chosen(leaf)}


def _over_whole_paths(paths: str, names: Mapping[str, Keys]) -> str:
    """Turns an expression over key paths into one over paths of leaves, which begin with a field of the state."""
    try:
        re.compile(paths)
    except re.error as error:
        raise ValueError(f"`paths` {paths!r} is not a regular expression: {error}.") from error
    if not any(is_chosen(keys, paths) for keys in names.values()):
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
