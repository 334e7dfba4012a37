"""Parameters from safetensors files, read straight into shards."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from jzero._types import State
from jzero.checkpoint.contents import Contents, StoredLeaf
from jzero.checkpoint.extras import everywhere
from jzero.checkpoint.leaves import Keys, TargetLeaf
from jzero.checkpoint.mapped import MappedTensor, Problems, map_tensors
from jzero.checkpoint.matching import renamed_paths
from jzero.checkpoint.restoring import PARAMS, Choice, Target, check_fit, warn_unless_complete
from jzero.checkpoint.safetensors_files import TensorFile, find_tensors
from jzero.checkpoint.shards import placed
from jzero.layout.cut import Cut, Index
from jzero.layout.misfits import describe_misfit
from jzero.plan.plan import ZeroPlan
from jzero.plan.table import format_bytes
from jzero.pretrained.mapping import Mapping as NameMapping
from jzero.pretrained.presets import resolve_mapping
from jzero.state.adapter import adapt_sharded
from jzero.state.pending import apply_pending
from jzero.state.train_state import check_alive


def load_params(
    state: State,
    path: epath.PathLike,
    *,
    paths: str | None = None,
    rename: Mapping[str, str] | None = None,
    mapping: NameMapping | str | None = None,
    strict: bool = True,
    donate: bool = False,
) -> State:
    r"""Returns the state with parameters from safetensors files, masters included; nothing else changes.

    Each process reads the slices for its devices. The result shares all other arrays with `state`; gradients that wait
    for a later step are applied first (`apply_pending`).

    Args:
      state: A sharded train state with values.
      path: A safetensors file, an index of several, or a directory with either (not with both, unless the index lists
        the file). In a directory with more, `model.safetensors` or its index counts.
      paths: Regular expression over whole key paths such as `"decoder/.*"`, as for `export_params`; other parameters
        do not change. All parameters by default; without adapters: `r"(?!.*/lora_[ab]).*"`.
      rename: Regular expressions over whole names in the files, with their replacements, as for `re.sub`:
        `{r"model\.(.*)": r"\1"}`. Names of parameters are keys joined by dots.
      mapping: Which tensors make which parameters, where they are not the same under other names: transposed, stacked,
        fused. A `jzero.Mapping`; or the name of a family that `jzero.hf.read_config` knows, for a model with the paths
        of `examples/llm/decoder.py`; or `"auto"`, the family that the folder's `config.json` names.
      strict: Whether it is an error if the files lack parameters, or have others. If not, missing parameters do not
        change, and a warning lists both.
      donate: Free the replaced parameters before anything is read.

    Returns:
      A state of the same class.

    Raises:
      CheckpointError: There are no such files, or they are damaged.
      ValueError: They are of another model (one message lists all that does not fit, before anything is read), hold a
        tied parameter twice with different numbers, or hold numbers that the state's dtypes cannot; `paths` matches no
        parameter, or both `rename` and `mapping` are given.
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
    tensors = everywhere(lambda: _find(path, names, adapted.ties(), rename, mapping))
    everywhere(lambda: tensors.check(path, [x.keys for x in names.values() if is_chosen(x.keys, paths)], strict))
    matched, report = everywhere(
        lambda: target.match(tensors.contents(path), dataclasses.replace(choice, strict=False))
    )
    target.check_kept(matched)
    target = Target(adapt_sharded(apply_pending(state, donate=donate)))  # a later step would change what was loaded
    if jax.process_count() > 1:
        for i, leaf in matched.items():
            target.leaves[i] = _in_long_runs(tensors.sources[leaf.keys][0], target.leaves[i], target.plan)
    if donate:
        target.free(matched)

    def read(i: int) -> jax.Array:
        x = everywhere(lambda: _place(tensors.sources[matched[i].keys], target.leaves[i]))
        check_fit({i: x}, target.leaves)
        return x

    num_bytes = sum(leaf.num_bytes for leaf in matched.values())
    logging.getLogger("jzero").info("Reading %s of weights from %s.", format_bytes(num_bytes), path)
    keep = dataclasses.replace(choice, donate=True)  # shares the other arrays
    loaded = target.fill(_WhenAsked(read, matched), None, keep)
    warn_unless_complete(report, dataclasses.replace(choice, params_only=False))
    return loaded


class _WhenAsked(dict[int, Any]):
    """Leaves by number, read on access, so that few are in memory in the file's dtype."""

    def __init__(self, read: Callable[[int], jax.Array], numbers: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(numbers))
        self._read = read

    def __getitem__(self, i: int) -> jax.Array:
        if super().__getitem__(i) is None:
            self[i] = self._read(i)
        return super().__getitem__(i)


def name_of(keys: Keys) -> str:
    """Returns the name of a parameter in files."""
    return ".".join(keys[1:])


def path_of(keys: Keys) -> str:
    """Returns the path of a parameter, as `paths` and mappings have it."""
    return "/".join(keys[1:])


def is_chosen(keys: Keys, paths: str | None) -> bool:
    """Whether `paths` matches the path of a parameter."""
    return paths is None or re.fullmatch(paths, path_of(keys)) is not None


def _names(target: Target, choice: Choice) -> dict[str, TargetLeaf]:
    """Returns each parameter by its name."""
    chosen = choice.selector(target.adapted.state)
    return {name_of(leaf.keys): leaf for leaf in target.leaves if chosen(leaf)}


def _over_whole_paths(paths: str, names: Mapping[str, TargetLeaf]) -> str:
    """Turns an expression over key paths into one over paths of leaves, which begin with a field of the state."""
    try:
        re.compile(paths)
    except re.error as error:
        raise ValueError(f"`paths` {paths!r} is not a regular expression: {error}.") from error
    if not any(is_chosen(leaf.keys, paths) for leaf in names.values()):
        some = ", ".join(repr(path_of(leaf.keys)) for leaf in list(names.values())[:5])
        raise ValueError(
            f"`paths` {paths!r} matches no parameter: it must match a whole key path. The first are {some}."
        )
    return f"[^/]*/(?:{paths})"


@dataclasses.dataclass(frozen=True)
class _Found:
    """The tensors of a file that belong to a state.

    Attributes:
      sources: The tensors of each parameter, by its keys; several of a tied one must be equal.
      problems: What does not fit, by names as `mapping` or `rename` have them.
      is_mapped: Whether names are those of a mapping.
    """

    sources: dict[Keys, list[TensorFile | MappedTensor]]
    problems: Problems
    is_mapped: bool

    def check(self, path: epath.PathLike, chosen: Collection[Keys], strict: bool) -> None:
        """Raises if the file lacks a tensor, or has unexpected ones.

        Args:
          path: The file.
          chosen: The keys of the parameters to load.
          strict: Whether missing parameters and unexpected tensors are errors.
        """
        asked = {path_of(keys) if self.is_mapped else name_of(keys) for keys in chosen}
        bad = Problems({name: text for name, text in self.problems.shapes.items() if name in asked})
        if strict:
            bad.missing = {name: text for name, text in self.problems.missing.items() if name in asked}
            bad.unexpected = self.problems.unexpected
        if bad.shapes or bad.missing or bad.unexpected:
            raise ValueError(
                f"The tensors of {path} are not those of the state, in names as "
                + ("`mapping` takes" if self.is_mapped else "`rename` makes")
                + f" them:\n{bad}\nCorrect the names there"
                + (", list tensors that nothing needs in its `ignore`" if self.is_mapped else "")
                + "; leave parameters out with `paths`; or keep those without tensors, and skip what is left over, "
                "with `strict=False`." + ("" if self.is_mapped else " Transposed or stacked ones take a `mapping`.")
            )

    def contents(self, path: epath.PathLike) -> Contents:
        """Returns the tensors as the contents of a checkpoint."""
        leaves = {keys: StoredLeaf(keys, sources[0].shape, sources[0].dtype) for keys, sources in self.sources.items()}
        others = [(PARAMS, *name.split(".")) for name in self.problems.unexpected]
        leaves |= {keys: StoredLeaf(keys, (), np.dtype(np.int8)) for keys in others}
        return Contents(epath.Path(path), epath.Path(path), leaves, None, {})


def _find(
    path: epath.PathLike,
    names: Mapping[str, TargetLeaf],
    ties: Mapping[str, Sequence[str]],
    rename: Mapping[str, str] | None,
    mapping: NameMapping | str | None,
) -> _Found:
    """Returns the tensors of a file that belong to parameters, without reading their values."""
    if rename and mapping is not None:
        raise ValueError(
            f"`mapping` names every tensor, so `rename={dict(rename)!r}` contradicts it: drop one of them."
        )
    source = epath.Path(path).expanduser()
    resolved = resolve_mapping(mapping, source.parent if source.is_file() else source)
    tensors, notes = find_tensors(path)
    if resolved is not None:
        keys = {path_of(leaf.keys): leaf.keys for leaf in names.values()}
        shapes = {path_of(leaf.keys): leaf.leaf.shape for leaf in names.values()}
        slashed = {name.replace(".", "/"): [x.replace(".", "/") for x in others] for name, others in ties.items()}
        mapped, problems = map_tensors(resolved, shapes, slashed, tensors)
        return _Found({keys[name]: [*tensors] for name, tensors in mapped.items()}, problems, True)
    named = {new: tensors[old] for new, old in renamed_paths(tensors, rename or {}).items()}
    same = _same_names(ties, notes)
    sources: dict[Keys, list[TensorFile | MappedTensor]] = {}
    problems = Problems()
    for name, tensor in named.items():
        main_name = name if name in names else same.get(name, name)
        if main_name not in names:
            problems.unexpected[name] = f"{tensor.dtype}{list(tensor.shape)}"
            continue
        sources.setdefault(names[main_name].keys, []).append(tensor)
        if tensor.shape != (shape := names[main_name].leaf.shape):
            problems.shapes[main_name] = f"{list(shape)} in the state, {list(tensor.shape)} in the file"
    problems.missing = {name: "" for name, leaf in names.items() if leaf.keys not in sources}
    return _Found(sources, problems, False)


def _same_names(ties: Mapping[str, Sequence[str]], notes: Mapping[str, str]) -> dict[str, str]:
    """Returns, for each other name of a tied parameter, here or in the files, its main name."""
    here = {other: name for name, others in ties.items() for other in others}
    there = {name: other for other, name in notes.items()}
    return {**there, **{other: here.get(name, name) for name, other in there.items()}, **here}


def _in_long_runs(tensor: TensorFile | MappedTensor, target_leaf: TargetLeaf, plan: ZeroPlan) -> TargetLeaf:
    """Returns how to cut a leaf while it is read, so that each process reads its own part of the file's pages.

    If the parts of a process were columns of the tensor, it would touch every page, and so would all others. So each
    takes rows; devices exchange them for what they keep when the state is filled (`stored_from`).
    """
    leaf = target_leaf.leaf
    dim = tensor.slowest if isinstance(tensor, MappedTensor) else None
    if dim is None or leaf.cut is None or (target_leaf.cut or leaf.cut).dim == dim:
        return target_leaf
    if dim < len(leaf.base) and leaf.base[dim] is not None:
        return target_leaf
    form = dataclasses.replace(target_leaf.form, cut=Cut(dim, leaf.shape, leaf.cut.num_shards))
    return TargetLeaf(target_leaf.keys, leaf, form)


def _place(tensors: Sequence[TensorFile | MappedTensor], target_leaf: TargetLeaf) -> jax.Array:
    """Reads a tensor into this process's shards. Tied tensors must be equal."""
    tensor = tensors[0]
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(tensor.dtype))

    def part(index: Index) -> np.ndarray:
        values = _read_part(tensor, target_leaf.cut, index)
        for other in tensors[1:]:
            if other.shape != tensor.shape or _read_part(other, target_leaf.cut, index).tobytes() != values.tobytes():
                raise ValueError(
                    f"{tensor.name!r} and {other.name!r} are one parameter of the state, {target_leaf.path}, but not "
                    f"the same in {tensor.path}: take one of them out of the file, or untie the parameter."
                )
        if why := describe_misfit(values, dtype):
            raise ValueError(
                f"{tensor.name!r} in {tensor.path}, read into {target_leaf.path}, holds {why}: enable wider numbers, "
                "`jax.config.update('jax_enable_x64', True)`."
            )
        return values.astype(dtype, copy=False)

    return placed(target_leaf.shape, target_leaf.sharding, part)


def _read_part(tensor: TensorFile | MappedTensor, cut: Cut | None, index: Index) -> np.ndarray:
    return tensor.read(index) if cut is None else cut.part(tensor.read, tensor.dtype, index)
