"""Parameters from safetensors files, read straight into shards."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jzero.checkpoint.contents import StoredLeaf
from jzero.checkpoint.leaves import Keys, TargetLeaf
from jzero.checkpoint.matching import renamed_paths
from jzero.checkpoint.restoring import PARAMS, Choice, RestoreTarget, check_fit, warn_unless_complete
from jzero.checkpoint.shards import place
from jzero.core.base.types import State
from jzero.core.layout.box import Box
from jzero.core.layout.casts import describe_misfit
from jzero.core.layout.cut import Cut
from jzero.core.plan.table import format_bytes
from jzero.core.processes.exchange import succeed_together
from jzero.core.state.access import apply_pending
from jzero.core.state.adapter import adapt_sharded
from jzero.core.state.train_state import check_alive
from jzero.weights.entries import AS_IT_IS, Entry, Problems, Rule, copy_into, match_tensors, names_in, rule_of
from jzero.weights.families import resolve_mapping
from jzero.weights.mapping import Mapping as NameMapping
from jzero.weights.safetensors_files import TensorFile, find_tensors


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
    target = RestoreTarget(adapted)
    choice = Choice(params_only=True, strict=strict, donate=donate)
    leaves = [leaf for leaf in target.leaves if choice.selector(adapted.state)(leaf)]
    if paths is not None:
        choice = dataclasses.replace(choice, paths=_over_whole_paths(paths, leaves))
    found = succeed_together(lambda: _find(path, leaves, adapted.ties(), rename, mapping))
    succeed_together(lambda: found.check(path, paths, strict))
    matched, report = succeed_together(lambda: target.match(found.leaves(), choice, path))
    target.check_kept(matched)
    target = RestoreTarget(
        adapt_sharded(apply_pending(state, donate=donate))
    )  # a later step would change what was loaded
    if jax.process_count() > 1:
        for i, leaf in matched.items():
            target.leaves[i] = _in_long_runs(found.sources[leaf.keys][0].slowest, target.leaves[i])
    if donate:
        target.free(matched)

    def read(i: int) -> jax.Array:
        x = succeed_together(lambda: _place(found.sources[matched[i].keys], target.leaves[i]))
        check_fit({i: x}, target.leaves)
        return x

    num_bytes = sum(leaf.num_bytes for leaf in matched.values())
    logging.getLogger("jzero").info("Reading %s of weights from %s.", format_bytes(num_bytes), path)
    loaded = target.fill(matched, read, shares=True)
    warn_unless_complete(report, is_partial=paths is not None)
    return loaded


def name_of(keys: Keys) -> str:
    """Returns the name of a parameter in files."""
    return ".".join(keys[1:])


def path_of(keys: Keys) -> str:
    """Returns the path of a parameter, as `paths` and mappings have it."""
    return "/".join(keys[1:])


def is_chosen(keys: Keys, paths: str | None) -> bool:
    """Whether `paths` matches the path of a parameter."""
    return paths is None or re.fullmatch(paths, path_of(keys)) is not None


def _over_whole_paths(paths: str, leaves: Sequence[TargetLeaf]) -> str:
    """Turns an expression over key paths into one over paths of leaves, which begin with a field of the state."""
    try:
        re.compile(paths)
    except re.error as error:
        raise ValueError(f"`paths` {paths!r} is not a regular expression: {error}.") from error
    if not any(is_chosen(leaf.keys, paths) for leaf in leaves):
        some = ", ".join(repr(path_of(leaf.keys)) for leaf in leaves[:5])
        raise ValueError(
            f"`paths` {paths!r} matches no parameter: it must match a whole key path. The first are {some}."
        )
    return f"[^/]*/(?:{paths})"


class ParamSource:
    """What makes a parameter: its entries, and the tensors of files that they are about.

    Attributes:
      shape: Its shape.
      slowest: See `Entry.slowest`.
      first: The first of the tensors.
      dtype: The dtype that holds the numbers of all.
    """

    def __init__(self, shape: tuple[int, ...], entries: Sequence[Entry], tensors: Mapping[str, TensorFile]) -> None:
        self.shape, self.slowest = shape, entries[0].slowest
        self._num_stacked = entries[0].num_stacked
        self._entries: dict[tuple[int, ...], list[Entry]] = {}  # by index of the stack, of which there may be thousands
        for entry in entries:
            self._entries.setdefault(entry.part.start[: self._num_stacked], []).append(entry)
        self._tensors = {x.tensor: tensors[x.tensor] for x in entries}
        self.first = self._tensors[entries[0].tensor]
        dtypes = {x.dtype for x in self._tensors.values()}
        self.dtype = np.dtype(functools.reduce(jnp.promote_types, sorted(dtypes, key=str)))

    def read(self, box: Box) -> np.ndarray:
        """Returns a box of the parameter."""
        out = np.empty(box.shape, self.dtype)
        stack = (range(a, a + n) for a, n in zip(box.start, box.shape[: self._num_stacked], strict=False))
        for entry in itertools.chain.from_iterable(self._entries[at] for at in itertools.product(*stack)):
            if here := box & entry.part:
                copy_into(here.within(box).take(out), entry.read(self._tensors[entry.tensor].view, here))
        return out


@dataclasses.dataclass(frozen=True)
class _Found:
    """The tensors of a file that belong to a state.

    Attributes:
      sources: What makes each parameter, by its keys; several sources of a tied one must be equal.
      problems: What does not fit, by name.
      keys_of: The keys of parameters by name, as `mapping` or `rename` have it.
      is_mapped: Whether names are those of a mapping.
    """

    sources: dict[Keys, list[ParamSource]]
    problems: Problems
    keys_of: Mapping[str, Keys]
    is_mapped: bool

    def check(self, path: epath.PathLike, paths: str | None, strict: bool) -> None:
        """Raises if the file lacks a tensor of the parameters to load, or has unexpected ones."""
        asked = {name for name, keys in self.keys_of.items() if is_chosen(keys, paths)}
        bad = Problems({name: text for name, text in self.problems.shapes.items() if name in asked})
        if strict:
            bad.missing = {name: text for name, text in self.problems.missing.items() if name in asked}
            bad.unexpected = self.problems.unexpected
        if bad:
            raise ValueError(
                f"The tensors of {path} are not those of the state, in names as "
                + ("`mapping` takes" if self.is_mapped else "`rename` makes")
                + f" them:\n{bad}\nCorrect the names there"
                + (", list tensors that nothing needs in its `ignore`" if self.is_mapped else "")
                + "; leave parameters out with `paths`; or keep those without tensors, and skip what is left over, "
                "with `strict=False`." + ("" if self.is_mapped else " Transposed or stacked ones take a `mapping`.")
            )

    def leaves(self) -> list[StoredLeaf]:
        """Returns the tensors as the leaves of a checkpoint."""
        leaves = [StoredLeaf(keys, sources[0].shape, sources[0].dtype) for keys, sources in self.sources.items()]
        others = [(PARAMS, *name.split(".")) for name in self.problems.unexpected]
        return leaves + [StoredLeaf(keys, (), np.dtype(np.int8)) for keys in others]


def _find(
    path: epath.PathLike,
    leaves: Sequence[TargetLeaf],
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
    named = {name_of(x.keys) if resolved is None else path_of(x.keys): x for x in leaves}
    shapes = {name: x.leaf.shape for name, x in named.items()}
    if resolved is None:
        rules, unexpected = _rules_by_name(shapes, renamed_paths(tensors, rename or {}), _same_names(ties, notes))
    else:
        slashed = {name.replace(".", "/"): [x.replace(".", "/") for x in others] for name, others in ties.items()}
        rules, unexpected = _rules_by_mapping(resolved, shapes, slashed, tensors)

    def lacks(names: Sequence[str]) -> str:
        if not names:
            return "" if resolved is None else "no key of the mapping matches it"
        return f"there is no {names[0]}" + (f", nor {len(names) - 1} more" if len(names) > 1 else "")

    found, problems = match_tensors(shapes, rules, {name: tensor.shape for name, tensor in tensors.items()}, lacks)
    problems.unexpected = {new: f"{tensors[x].dtype}{list(tensors[x].shape)}" for new, x in unexpected.items()}
    keys_of = {name: x.keys for name, x in named.items()}
    sources = {keys_of[name]: [ParamSource(shapes[name], x, tensors) for x in made] for name, made in found.items()}
    return _Found(sources, problems, keys_of, resolved is not None)


def _rules_by_name(
    names: Iterable[str], named: Mapping[str, str], same: Mapping[str, str]
) -> tuple[dict[str, list[Rule]], dict[str, str]]:
    """Returns the rules of parameters that are tensors of their names, and tensors of none: new names and old."""
    rules: dict[str, list[Rule]] = {name: [] for name in names}
    main = {new: new if new in rules else same.get(new, new) for new in named}
    for new, old in named.items():
        if main[new] in rules:
            rules[main[new]].append({(): [(old, AS_IT_IS)]})
    return rules, {new: old for new, old in named.items() if main[new] not in rules}


def _rules_by_mapping(
    mapping: NameMapping,
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, Sequence[str]],
    tensors: Mapping[str, TensorFile],
) -> tuple[dict[str, list[Rule]], dict[str, str]]:
    """Returns the rules of parameters by a mapping, and the tensors that none names."""
    rules: dict[str, list[Rule]] = {}
    for name, shape in shapes.items():
        sources = [mapping.of(x) for x in (name, *ties.get(name, ()))]
        rules[name] = [rule_of(x, shape) for x in sources if x]
    used = {x for own in rules.values() for rule in own for x in names_in(rule)}
    there = {x: name for x, name in mapping.same.items() if x in tensors and name in tensors and x not in used}
    again = {name: x for x, name in there.items()}
    for own in rules.values():
        repeated = [rule for rule in own if again.keys() >= {*names_in(rule)}]
        own += [{at: [(again[name], x) for name, x in layer] for at, layer in rule.items()} for rule in repeated]
    used |= {*again.values()}
    return rules, {name: name for name in tensors if name not in used and not mapping.ignores(name)}


def _same_names(ties: Mapping[str, Sequence[str]], notes: Mapping[str, str]) -> dict[str, str]:
    """Returns, for each other name of a tied parameter, here or in the files, its main name."""
    here = {other: name for name, others in ties.items() for other in others}
    there = {name: other for other, name in notes.items()}
    return {**there, **{other: here.get(name, name) for name, other in there.items()}, **here}


def _in_long_runs(dim: int | None, target_leaf: TargetLeaf) -> TargetLeaf:
    """Returns how to cut a leaf while it is read, so that each process reads its own part of the file's pages.

    If the parts of a process were columns of the tensor, it would touch every page, and so would all others. So each
    takes rows (`dim`, see `Entry.slowest`); devices exchange them for what they keep when the state is filled.
    """
    leaf = target_leaf.leaf
    if dim is None or leaf.cut is None or (target_leaf.cut or leaf.cut).dim == dim:
        return target_leaf
    if dim < len(leaf.base) and leaf.base[dim] is not None:
        return target_leaf
    form = dataclasses.replace(target_leaf.form, cut=Cut(dim, leaf.shape, leaf.cut.num_shards))
    return TargetLeaf(target_leaf.keys, leaf, form)


def _place(sources: Sequence[ParamSource], target_leaf: TargetLeaf) -> jax.Array:
    """Reads a parameter into this process's shards. Sources of a tied one must be equal."""
    (source, *others), first = sources, sources[0].first
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(source.dtype))

    def read(box: Box) -> np.ndarray:
        values = source.read(box)
        for other in others:
            if other.read(box).tobytes() != values.tobytes():
                raise ValueError(
                    f"{first.name!r} and {other.first.name!r} are one parameter of the state, {target_leaf.path}, but "
                    f"not the same in {first.path}: take one of them out of the file, or untie the parameter."
                )
        if why := describe_misfit(values, dtype):
            raise ValueError(
                f"{first.name!r} in {first.path}, read into {target_leaf.path}, holds {why}: enable wider numbers, "
                "`jax.config.update('jax_enable_x64', True)`."
            )
        return values.astype(dtype, copy=False)

    return place(target_leaf, dtype, read)
