"""Parameters made of tensors with other names; all `From`s are resolved before a byte is read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.pieces import Index, Piece, copy_into, unfit
from jzero.checkpoint.safetensors_files import TensorFile, TensorSpec
from jzero.pretrained.mapping import From, Sources
from jzero.pretrained.mapping import Mapping as NameMapping

MAX_LINES = 20


@dataclasses.dataclass
class Problems:
    """Mismatches between a file and a state, by name, with an explanation.

    Attributes:
      shapes: Parameters whose tensors have other shapes.
      missing: Parameters without tensors.
      unexpected: Tensors without parameters.
    """

    shapes: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        titles = {
            "parameters whose tensors have other shapes": self.shapes,
            "parameters without tensors": self.missing,
            "tensors without parameters": self.unexpected,
        }
        lines: list[str] = []
        for title, names in titles.items():
            lines += [f"  {title} ({len(names)}):"] if names else []
            lines += [
                f"    {name}: {text}" if text else f"    {name}" for name, text in list(names.items())[:MAX_LINES]
            ]
            lines += [f"    ... {len(names) - MAX_LINES} more"] if len(names) > MAX_LINES else []
        return "\n".join(lines)


class MappedTensor:
    """A parameter that tensors of a file make, read slice by slice as a `TensorFile` is."""

    def __init__(self, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], Sequence[_Part]]) -> None:
        """Makes a parameter of a shape of what lies at each index of its stacked dimensions."""
        self.shape, self._parts = shape, parts
        self._num_stacked = len(next(iter(parts)))
        first = parts[(0,) * self._num_stacked][0]
        self.name, self.path, self._axis = first.tensor.name, first.tensor.path, first.piece.source.axis
        dtypes = {part.tensor.dtype for layer in parts.values() for part in layer}
        self.dtype = np.dtype(functools.reduce(jnp.promote_types, sorted(dtypes, key=str)))

    @property
    def slowest(self) -> int | None:
        """The dimension whose slices are consecutive bytes of each tensor; `None` if none is."""
        dim = self._parts[(0,) * self._num_stacked][0].piece.slowest
        return None if dim is None else self._num_stacked + dim

    def read(self, index: Index) -> np.ndarray:
        """Returns one slice."""
        index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, self.shape, strict=True))
        out = np.empty([max(s.stop - s.start, 0) for s in index], self.dtype)
        num = self._num_stacked
        for at in np.ndindex(*out.shape[:num]) if out.size else ():
            layer = tuple(s.start + i for s, i in zip(index[:num], at, strict=True))
            self._read_layer(layer, index[num:], out[at])
        return out

    def _read_layer(self, at: tuple[int, ...], index: Index, out: np.ndarray) -> None:
        axis, start = self._axis, 0
        if len(self._parts[at]) == 1:
            part = self._parts[at][0]
            copy_into(out, part.piece.read(part.tensor, index))
            return
        for part in self._parts[at]:
            size = part.piece.shape[axis]
            low, high = max(index[axis].start, start), min(index[axis].stop, start + size)
            if low < high:
                inside = (*index[:axis], slice(low - start, high - start), *index[axis + 1 :])
                there = slice(low - index[axis].start, high - index[axis].start)
                copy_into(out[(*[slice(None)] * axis, there)], part.piece.read(part.tensor, inside))
            start += size


@dataclasses.dataclass(frozen=True)
class _Part:
    """A tensor of a file, and what it makes of a parameter."""

    tensor: TensorFile
    piece: Piece


def map_tensors(
    mapping: NameMapping,
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, Sequence[str]],
    tensors: Mapping[str, TensorFile],
) -> tuple[dict[str, list[MappedTensor]], Problems]:
    """Returns what makes each parameter, tensors that must be equal together, and what does not fit.

    Args:
      mapping: The mapping.
      shapes: The shapes of the parameters, by path.
      ties: The other paths of tied parameters.
      tensors: The tensors of the files.
    """
    problems = Problems()
    sources_of: dict[str, list[MappedTensor]] = {}
    chosen, used = _choose(mapping, shapes, ties, tensors, problems)
    for path, sources in chosen.items():
        for x in sources:
            if why := misfit(x, shapes[path], tensors):
                problems.shapes[path] = f"{list(shapes[path])} in the state, but {why}"
            else:
                sources_of.setdefault(path, []).append(_mapped(x, shapes[path], tensors))
    for name, tensor in tensors.items():
        if name not in used and not mapping.ignores(name):
            problems.unexpected[name] = f"{tensor.dtype}{list(tensor.shape)}"
    return sources_of, problems


def _choose(
    mapping: NameMapping,
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, Sequence[str]],
    tensors: Mapping[str, TensorFile],
    problems: Problems,
) -> tuple[dict[str, list[Sources]], set[str]]:
    """Returns the sources of each parameter that the files have, and the names of tensors that any parameter has."""
    chosen: dict[str, list[Sources]] = {}
    used: set[str] = set()
    for path, shape in shapes.items():
        sources = [x for name in (path, *ties.get(path, ())) if (x := mapping.of(name))]
        named = [[name for source in x for name in _names(source, shape)] for x in sources]
        used.update(*named)
        absent = [[name for name in names if name not in tensors] for names in named]
        chosen[path] = [x for x, names in zip(sources, absent, strict=True) if not names]
        if not sources:
            problems.missing[path] = "no key of the mapping matches it"
        elif not chosen[path]:
            more = f", nor {len(absent[0]) - 1} more" if len(absent[0]) > 1 else ""
            problems.missing[path] = f"there is no {absent[0][0]}{more}"
    single = {x[0].name: (path, x[0]) for path, sources in chosen.items() for x in sources if len(x) == 1}
    for other, name in mapping.same.items():
        if other in tensors and other not in single and name in single:
            path, source = single[name]
            chosen[path].append((dataclasses.replace(source, name=other),))
            used.add(other)
    return chosen, used


def _names(source: From, shape: Sequence[int]) -> list[str]:
    """Returns the names that the stars of a source stand for, in a parameter of a shape."""
    return [source.at(at) for at in np.ndindex(*shape[: source.num_stacked])]


def _mapped(sources: Sources, shape: tuple[int, ...], tensors: Mapping[str, TensorFile]) -> MappedTensor:
    parts: dict[tuple[int, ...], list[_Part]] = {}
    for at in np.ndindex(*shape[: sources[0].num_stacked]):
        layer = [(source, tensors[source.at(at)]) for source in sources]
        parts[at] = [_Part(tensor, Piece(source, tensor.shape)) for source, tensor in layer]
    return MappedTensor(shape, parts)


def misfit(sources: Sources, shape: tuple[int, ...], tensors: Mapping[str, TensorFile | TensorSpec]) -> str:
    """Returns why tensors do not make a parameter of a shape; an empty string if they do."""
    num, axis = sources[0].num_stacked, sources[0].axis
    for at in np.ndindex(*shape[:num]):
        layer = [(source, tensors[source.at(at)]) for source in sources]
        for source, tensor in layer:
            if why := unfit(source, tensor.shape):
                return f"{why} of {tensor.name}: {list(tensor.shape)}"
        shapes = [Piece(source, tensor.shape).shape for source, tensor in layer]
        beside = {(*x[:axis], *x[axis + 1 :]) for x in shapes}
        total = sum(x[axis] for x in shapes if axis < len(x))
        joined = shapes[0] if len(shapes) == 1 else (*shapes[0][:axis], total, *shapes[0][axis + 1 :])
        if len(beside) > 1 or joined != shape[num:]:
            there = ", ".join(f"{tensor.name}: {list(tensor.shape)}" for _, tensor in layer)
            return f"{' and '.join(str([*shape[:num], *x]) for x in shapes)} from {there}"
    return ""
