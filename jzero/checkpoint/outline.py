"""What an export writes: tensors, and the parts of parameters that make each. Known before anything is read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jzero._types import DType
from jzero.checkpoint.mapped import Problems, misfit
from jzero.checkpoint.pieces import Piece
from jzero.checkpoint.safetensors_files import TensorSpec
from jzero.pretrained.mapping import Mapping as NameMapping
from jzero.pretrained.mapping import Sources


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a parameter, in a tensor.

    Attributes:
      path: The parameter.
      at: Which layer of it, an index of its stacked dimensions.
      piece: The place in the tensor; `None` if the parameter is the tensor.
      along: Which slice of the layer, along a dimension; `None` for all.
    """

    path: str
    at: tuple[int, ...] = ()
    piece: Piece | None = None
    along: tuple[slice, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Outline:
    """A tensor to write.

    Attributes:
      name: Its name.
      shape: Its shape.
      dtype: The dtype of the parameters.
      parts: What makes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[Part, ...]

    def fill(self, layers: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor, made of the layers of its parts."""
        if self.parts[0].piece is None:
            return layers[0]
        out = np.empty(self.shape, layers[0].dtype)
        for part, layer in zip(self.parts, layers, strict=True):
            assert part.piece is not None
            part.piece.write(layer if part.along is None else layer[part.along], out)
        return out


def as_they_are(leaves: Mapping[str, TensorSpec]) -> list[Outline]:
    """Returns the tensors of an export without a mapping, one for each parameter: a tensor's name by its path."""
    return [Outline(spec.name, spec.shape, spec.dtype, (Part(path),)) for path, spec in leaves.items()]


def sources_of(mapping: NameMapping, names: Sequence[str]) -> Sources:
    """Returns the sources of a parameter, by the first of its paths that has some."""
    return next(filter(None, map(mapping.of, names)), ())


def names_of(sources: Sources, shape: Sequence[int]) -> list[str]:
    """Returns the names of the tensors that a parameter of some shape makes, or makes a part of."""
    return [source.at(at) for source in sources for at in np.ndindex(*shape[: source.num_stacked])]


def outline_tensors(
    mapping: NameMapping,
    leaves: Mapping[str, TensorSpec],
    names: Mapping[str, Sequence[str]],
    published: Mapping[str, tuple[int, ...]] | None,
) -> tuple[list[Outline], Problems]:
    """Returns the tensors that parameters make by a mapping, and what does not fit. Ignores parameters without a key.

    Args:
      mapping: The mapping.
      leaves: The parameters, by path.
      names: The path of each, and its other ones if it is tied.
      published: The shapes of all tensors that there should be, by name; `None` if that is not known.
    """
    problems = Problems()
    chosen = {path: x for path in leaves if (x := sources_of(mapping, names[path]))}
    there = _derived(chosen, leaves) if published is None else published
    tensors = {name: TensorSpec(name, shape, None) for name, shape in there.items()}
    claimed: set[str] = set()
    parts: dict[str, list[Part]] = {}
    for path, sources in chosen.items():
        shape = leaves[path].shape
        claimed.update(needed := names_of(sources, shape))
        if absent := [name for name in needed if name not in tensors]:
            what = "its shape in the file is not known: pass `like`" if published is None else "that model has none"
            problems.shapes[path] = f"makes {absent[0]}, but {what}"
        elif why := misfit(sources, shape, tensors):
            problems.shapes[path] = f"{list(shape)} in the state, but {why}"
        else:
            _add_parts(parts, path, sources, shape, tensors)
    outlines = []
    for name, held in parts.items():
        if why := _not_whole(held, tensors[name].shape):
            problems.shapes[held[0].path] = f"makes {name} of {list(tensors[name].shape)}, but {why}"
        dtype = functools.reduce(jnp.promote_types, [leaves[part.path].dtype for part in held])
        outlines.append(Outline(name, tensors[name].shape, dtype, tuple(held)))
    for name, shape in (published or {}).items():
        if name not in claimed and name not in mapping.same and not mapping.ignores(name):
            problems.unexpected[name] = str(list(shape))
    return outlines, problems


def _derived(chosen: Mapping[str, Sources], leaves: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors that follow from the parameters alone: of those that are not reshaped or joined."""
    indices: dict[str, list[int]] = {}
    for path, sources in chosen.items():
        (source, *others), shape = sources, leaves[path].shape
        inner = shape[source.num_stacked :]
        permute = source.permute or tuple(range(len(inner)))
        if others or source.shape is not None or len(permute) != len(inner):
            continue
        sizes = [inner[permute.index(d)] for d in range(len(inner))]
        if source.section is not None and source.section[0] < len(sizes):
            sizes[source.section[0]] = sum(source.section[1:])
        for at in np.ndindex(*shape[: source.num_stacked]):
            before = indices.setdefault(source.at(at), sizes)
            if source.section is not None and len(before) == len(sizes):  # as far as the last of its sections
                indices[source.at(at)] = [max(*pair) for pair in zip(before, sizes, strict=True)]
    return {name: tuple(sizes) for name, sizes in indices.items()}


def _add_parts(
    parts: dict[str, list[Part]], path: str, sources: Sources, shape: Sequence[int], tensors: Mapping[str, TensorSpec]
) -> None:
    for at in np.ndindex(*shape[: sources[0].num_stacked]):
        start = 0
        for source in sources:
            piece = Piece(source, tensors[source.at(at)].shape)
            along = None
            if len(sources) > 1:
                size = piece.shape[source.axis]
                along = (*[slice(None)] * source.axis, slice(start, start + size))
                start += size
            parts.setdefault(source.at(at), []).append(Part(path, at, piece, along))


def _not_whole(parts: Sequence[Part], shape: Sequence[int]) -> str:
    """Returns why parts do not make a tensor, each element once; an empty string if they do."""
    sections = [part.piece.source.section for part in parts if part.piece is not None]
    numbered = sorted(section for section in sections if section is not None)
    if len(parts) == 1 and not numbered:
        return ""
    others = sorted({part.path for part in parts[1:]})
    if len(numbered) < len(parts) or len({dim for dim, _, _ in numbered}) > 1:
        return f"{' and '.join(others) or 'nothing'} makes it, too"
    end = 0
    for _, start, size in numbered:
        if start != end:
            return f"sections {numbered} overlap or leave a gap"
        end = start + size
    return "" if end == shape[numbered[0][0]] else f"sections {numbered} are not all of it"
