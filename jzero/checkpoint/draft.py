"""An export before anything is written: its tensors, what makes them, and the files beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from etils import epath
from jax.typing import DTypeLike

from jzero._types import DType
from jzero.checkpoint.damage import CheckpointError
from jzero.checkpoint.layers import Layers
from jzero.checkpoint.leaves import Keys
from jzero.checkpoint.loading import is_chosen, name_of, path_of
from jzero.checkpoint.outline import Outline, as_they_are, names_of, outline_tensors, sources_of
from jzero.checkpoint.safetensors_files import (
    FOUR_BITS,
    INDEX_SUFFIX,
    METADATA,
    SUFFIX,
    ExportReport,
    TensorFile,
    TensorSpec,
    as_dtype,
    find_tensors,
    is_known,
    write_tensors,
)
from jzero.layout.misfits import describe_misfit
from jzero.pretrained.folder import companions, known_shapes
from jzero.pretrained.mapping import Mapping as NameMapping
from jzero.pretrained.presets import resolve_mapping

Decode: TypeAlias = Callable[[str, Mapping[str, np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Form:
    """The arguments of an export that say what is written, see `export_params`."""

    dtype: DTypeLike | None = None
    paths: str | None = None
    mapping: NameMapping | str | None = None
    like: epath.PathLike | None = None
    decode: Decode | None = None

    def __post_init__(self) -> None:
        for name in ("like", "decode"):
            if self.mapping is None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` needs a `mapping`, which says what the tensors of that model are made of.")
        if self.mapping == "auto" and self.like is None:
            raise ValueError(
                "`mapping='auto'` goes by the `config.json` of a published model: pass its folder as `like`."
            )


@dataclasses.dataclass(frozen=True)
class Draft:
    """What an export will write.

    Attributes:
      outlines: Its tensors, and what makes them.
      specs: The same tensors as they are written.
      copied: Tensors of the model `like` that are written as they are there.
      beside: By path of a parameter, the parameters beside it that `decode` gets, too.
      decode: See `export_params`.
      notes: What the files note.
      files: Other files of the export, by name.
    """

    outlines: Sequence[Outline]
    specs: Sequence[TensorSpec]
    copied: Sequence[TensorFile]
    beside: Mapping[str, Sequence[str]]
    decode: Decode | None
    notes: Mapping[str, str]
    files: Mapping[str, bytes]

    @property
    def num_stacked(self) -> dict[str, int]:
        """The number of leading dimensions of each parameter that are taken one index at a time."""
        num_stacked = {part.path: len(part.at) for outline in self.outlines for part in outline.parts}
        return num_stacked | {x: num_stacked[path] for path, others in self.beside.items() for x in others}

    def tensors(self, layers: Layers) -> Iterator[list[np.ndarray]]:
        """Yields each tensor, made of layers of parameters, or in the memory of the file that it is copied from."""
        for outline, spec in zip(self.outlines, self.specs, strict=True):
            paths = [part.path for part in outline.parts]
            layers.keep([*paths, *(x for path in paths for x in self.beside.get(path, ()))])
            held = [self._decoded(layers, part.path, part.at) for part in outline.parts]
            yield [outline.fill([fitted(x, spec) for x in held])]
        for tensor in self.copied:
            yield [tensor.view((slice(None),) * len(tensor.shape))]

    def _decoded(self, layers: Layers, path: str, at: tuple[int, ...]) -> np.ndarray:
        layer = layers.get(path, at)
        if self.decode is None:
            return layer
        beside = {other.rsplit("/", 1)[-1]: layers.get(other, at) for other in self.beside.get(path, ())}
        decoded = np.asarray(self.decode(path, {**beside, path.rsplit("/", 1)[-1]: layer}))
        if decoded.shape != layer.shape:
            raise ValueError(
                f"`decode` must keep the shape of {path}, {list(layer.shape)}: it made {list(decoded.shape)}."
            )
        return decoded

    def write(
        self, path: epath.Path, tensors: Iterable[Iterable[np.ndarray]] | None, max_file_bytes: int
    ) -> ExportReport:
        """Writes the tensors, and the other files before them; `None` in a process that writes nothing."""
        specs = [*self.specs, *(TensorSpec(tensor.name, tensor.shape, tensor.dtype) for tensor in self.copied)]
        if not self.files or tensors is None:
            return write_tensors(path, specs, tensors, max_file_bytes, self.notes)
        if path.name.endswith(SUFFIX) or (path.exists() and any(path.iterdir())):
            raise ValueError(f"An export with `like` makes a folder, but {path} is a file or holds some: name another.")
        with contextlib.ExitStack() as undo:
            try:
                path.mkdir(parents=True, exist_ok=True)
                for name, content in self.files.items():
                    undo.callback((path / name).unlink, missing_ok=True)
                    (path / name).write_bytes(content)
            except OSError as error:
                raise CheckpointError(f"The parameters could not be written to {path} ({error}).") from error
            report = write_tensors(path, specs, tensors, max_file_bytes, self.notes)
            undo.pop_all()
        return report


def fitted(x: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Returns an array in the dtype of a tensor; raises if that cannot hold its numbers."""
    if why := describe_misfit(x, spec.dtype):
        raise ValueError(f"{spec.name} cannot be exported: it holds {why}. Pass a wider `dtype`.")
    return x.astype(spec.dtype, copy=False)


def draft_export(described: Mapping[Keys, tuple[tuple[int, ...], DType]], form: Form, ties: Mapping[str, str]) -> Draft:
    """Returns what an export will write; raises if it cannot.

    Args:
      described: The shapes and dtypes of all parameters, by their keys.
      form: What is asked for.
      ties: Other names of tied parameters, with the name of each.
    """
    params = {path_of(keys): TensorSpec(name_of(keys), shape, x) for keys, (shape, x) in described.items()}
    leaves = {path_of(keys): params[path_of(keys)] for keys in described if is_chosen(keys, form.paths)}
    if not leaves:
        what = f"`paths` {form.paths!r} matches no parameter"
        raise ValueError(f"{'There are no parameters to export' if form.paths is None else what}.")
    dtype = None if form.dtype is None else as_dtype(form.dtype)
    mapping = resolve_mapping(form.mapping, form.like)
    if mapping is None:
        specs, renamed = _specs(as_they_are(leaves), dtype)
        written = {spec.name for spec in specs}
        notes = {other: name for other, name in ties.items() if name in written} | renamed
        return Draft(as_they_are(leaves), specs, (), {}, None, {"format": "flax", **notes}, {})
    names = {path: [path, *(x.replace(".", "/") for x, y in ties.items() if y == params[path].name)] for path in params}
    there = {} if form.like is None else tensors_there(form.like)
    left_out = {
        name
        for path in params.keys() - leaves.keys()
        for name in names_of(sources_of(mapping, names[path]), params[path].shape)
    }
    outlines, beside = _mapped(mapping, leaves, names, left_out & there.keys(), form)
    left_out -= {outline.name for outline in outlines}
    copied = [tensor for name, tensor in there.items() if name in left_out]
    specs, _ = _specs(outlines, dtype)
    held = {x.dtype for x in specs} | {x.dtype for x in copied}
    dtypes = {str(dtype) for dtype in held if jax.numpy.issubdtype(dtype, np.floating)}
    files = {} if form.like is None else companions(form.like, dtypes.pop() if len(dtypes) == 1 else None)
    return Draft(outlines, specs, copied, beside, form.decode, {"format": "pt"}, files)


def _mapped(
    mapping: NameMapping,
    leaves: Mapping[str, TensorSpec],
    names: Mapping[str, Sequence[str]],
    copied: Collection[str],
    form: Form,
) -> tuple[list[Outline], dict[str, list[str]]]:
    """Returns the tensors of an export by a mapping, and the parameters beside those that make them.

    Args:
      mapping: The mapping.
      leaves: The parameters, by path.
      names: The path of each, and its other ones if it is tied.
      copied: Names of tensors that other parameters make.
      form: What is asked for.
    """
    shapes = None if form.like is None else shapes_there(form.like)
    outlines, problems = outline_tensors(mapping, leaves, names, shapes)
    stacks = {part.path: leaves[part.path].shape[: len(part.at)] for outline in outlines for part in outline.parts}
    beside: dict[str, list[str]] = {}
    for path, spec in leaves.items():
        if path in stacks or path in problems.shapes:
            continue
        home = path.rpartition("/")[0]
        heads = [x for x, stack in stacks.items() if x.rpartition("/")[0] == home and spec.shape[: len(stack)] == stack]
        for head in heads if form.decode is not None else ():
            beside.setdefault(head, []).append(path)
        if form.decode is None or not heads:
            problems.missing[path] = "no key of the mapping matches it"
    problems.unexpected = {name: shape for name, shape in problems.unexpected.items() if name not in copied}
    if problems.shapes or problems.missing or problems.unexpected:
        model = "" if form.like is None else f", as those of {form.like} are"
        raise ValueError(
            f"The parameters do not make tensors by `mapping`{model}:\n{problems}\nCorrect the names there; leave "
            "parameters out with `paths`, or merge adapters with `decode=jzero.lora.merged(...)`."
        )
    return outlines, beside


def tensors_there(like: epath.PathLike) -> dict[str, TensorFile]:
    """Returns the tensors of a published model; none if there is its `config.json` alone."""
    folder = epath.Path(like).expanduser()
    if folder.is_dir() and any(path.name.endswith((SUFFIX, INDEX_SUFFIX)) for path in folder.iterdir()):
        return find_tensors(folder)[0]
    return {}


def shapes_there(like: epath.PathLike) -> dict[str, tuple[int, ...]] | None:
    """Returns the shapes of a published model's tensors: from its files, or else by its `config.json`."""
    return {name: tensor.shape for name, tensor in tensors_there(like).items()} or known_shapes(like)


def _specs(outlines: Sequence[Outline], dtype: DType | None) -> tuple[list[TensorSpec], dict[str, str]]:
    """Returns the tensors to write, and the replacements of names that the format does not allow."""
    specs: list[TensorSpec] = []
    bad: list[str] = []
    names = {outline.name for outline in outlines}
    renamed: dict[str, str] = {}
    for outline in outlines:
        name, shape, own_dtype = outline.name, outline.shape, outline.dtype
        is_float = jax.numpy.issubdtype(own_dtype, np.floating)
        target_dtype = dtype if dtype is not None and is_float else own_dtype
        if name == METADATA:
            renamed[name] = name = next(x for i in itertools.count(1) if (x := METADATA + "_" * i) not in names)
        if is_known(target_dtype) and np.dtype(target_dtype) == FOUR_BITS and math.prod(shape) % 2:
            bad.append(
                f"  {name}: shape {tuple(shape)}, an odd number of {target_dtype}, and safetensors packs two in a byte"
            )
        elif not is_known(target_dtype):
            bad.append(f"  {name}: {target_dtype}, which safetensors does not have")
        elif not _is_text(name):
            bad.append(f"  {name!r}: a name that is no valid Unicode")
        else:
            specs.append(TensorSpec(name, tuple(shape), np.dtype(target_dtype)))
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
