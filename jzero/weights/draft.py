"""What an export will write, known before a byte is read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.typing import DTypeLike

from jzero.checkpoint.damage import CheckpointError
from jzero.checkpoint.leaves import Keys
from jzero.core.base.types import DType
from jzero.core.layout.box import Box, tile
from jzero.core.layout.casts import describe_misfit
from jzero.weights.entries import (
    AS_IT_IS,
    Entry,
    Rule,
    Shape,
    entries_of,
    match_tensors,
    names_in,
    rule_of,
    shapes_made,
)
from jzero.weights.families import companions, known_shapes, resolve_mapping
from jzero.weights.loading import is_chosen, name_of, path_of
from jzero.weights.mapping import Mapping as NameMapping
from jzero.weights.safetensors_files import (
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

Boxes: TypeAlias = Sequence[Sequence[tuple[str, Box]]]
"""What an export reads: for each tensor, boxes of parameters, by path."""
Decode: TypeAlias = Callable[[str, Mapping[str, np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Form:
    """The arguments of an export that say what is written, see `export_params`."""

    dtype: DTypeLike | None = None
    paths: str | None = None
    mapping: NameMapping | str | None = None
    like: epath.PathLike | None = None
    decode: Decode | None = None
    shapes: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    """Of tensors that do not follow from parameters, by name."""

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
      specs: Its tensors.
      entries: Of each, what makes it.
      copied: Tensors of the model `like` that are written as they are there.
      shapes: The shapes of the parameters, by path.
      beside: By path of a parameter, the parameters beside it that `decode` gets, too.
      decode: See `export_params`.
      notes: What the files note.
      files: Other files of the export, by name.
    """

    specs: Sequence[TensorSpec]
    entries: Sequence[Sequence[Entry]]
    copied: Sequence[TensorFile]
    shapes: Mapping[str, Shape]
    beside: Mapping[str, Sequence[str]]
    decode: Decode | None
    notes: Mapping[str, str]
    files: Mapping[str, bytes]

    @property
    def boxes(self) -> Boxes:
        """The boxes of parameters that `tensors` takes, in its order."""
        return [[box for entry in entries for box in self._boxes(entry)] for entries in self.entries]

    def _boxes(self, entry: Entry) -> list[tuple[str, Box]]:
        """Returns what an entry needs: its part; or, to decode it, its layer, and those of the parameters beside."""
        if self.decode is None:
            return [(entry.path, entry.part)]
        return [(x, self._layer(entry, x)) for x in (entry.path, *self.beside.get(entry.path, ()))]

    def _layer(self, entry: Entry, path: str) -> Box:
        n = entry.num_stacked
        inner = Box.whole(self.shapes[path][n:])
        return Box((*entry.part.start[:n], *inner.start), (*entry.part.shape[:n], *inner.shape))

    def tensors(self, values: Iterator[Iterator[np.ndarray]]) -> Iterator[Iterable[np.ndarray]]:
        """Yields each tensor in consecutive parts, made of the values of `boxes`, which come in parts, too.

        Of neither is a part used once the next one is asked for.
        """
        for spec, entries in zip(self.specs, self.entries, strict=True):
            if self.decode is None and len(entries) == 1 and entries[0].is_straight:
                yield (fitted(x, spec) for x in next(values))
                continue
            out = np.empty(spec.shape, spec.dtype)
            for entry in entries:
                if self.decode is None:
                    part = _joined(next(values), entry.part.shape)
                else:
                    layers = [_joined(next(values), x.shape, keeps=True) for _, x in self._boxes(entry)]
                    part = self._decoded(entry, layers)
                entry.write(fitted(part, spec), out)
            yield [out]
        for tensor in self.copied:
            yield [tensor.view(Box.whole(tensor.shape).slices)]

    def _decoded(self, entry: Entry, layers: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the part of an entry, given its layer and those of the parameters beside it."""
        assert self.decode is not None
        path, n = entry.path, entry.num_stacked
        names = [x.rpartition("/")[2] for x in (path, *self.beside.get(path, ()))]
        given = {name: x.reshape(x.shape[n:]) for name, x in zip(names, layers, strict=True)}
        decoded = np.asarray(self.decode(path, given))
        if decoded.shape != given[names[0]].shape:
            raise ValueError(
                f"`decode` must keep the shape of {path}, {[*given[names[0]].shape]}: it made {list(decoded.shape)}."
            )
        return decoded.reshape(layers[0].shape)[entry.part.within(self._layer(entry, path)).slices]

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


def draft_export(described: Mapping[Keys, tuple[Shape, DType]], form: Form, ties: Mapping[str, str]) -> Draft:
    """Returns what an export will write; raises if it cannot.

    Args:
      described: The shapes and dtypes of all parameters, by their keys.
      form: What is asked for.
      ties: Other names of tied parameters, with the name of each.
    """
    params = {path_of(keys): TensorSpec(name_of(keys), shape, x) for keys, (shape, x) in described.items()}
    chosen = {path_of(keys): params[path_of(keys)] for keys in described if is_chosen(keys, form.paths)}
    if not chosen:
        what = f"`paths` {form.paths!r} matches no parameter"
        raise ValueError(f"{'There are no parameters to export' if form.paths is None else what}.")
    mapping = resolve_mapping(form.mapping, form.like)
    beside: dict[str, list[str]] = {}
    copied: list[TensorFile] = []
    if mapping is None:
        shapes: Mapping[str, Shape] = {x.name: x.shape for x in chosen.values()}
        made = {x.name: entries_of(path, x.shape, {(): [(x.name, AS_IT_IS)]}, shapes)[0] for path, x in chosen.items()}
    else:
        rules = _rules(mapping, params, ties)
        there = {} if form.like is None else tensors_there(form.like)
        left_out = {x for path in params.keys() - chosen.keys() for rule in rules[path] for x in names_in(rule)}
        made, shapes, beside = _mapped(mapping, chosen, rules, there, left_out, form)
        copied = [tensor for name, tensor in there.items() if name in left_out and name not in made]
    dtypes = {x: functools.reduce(jnp.promote_types, [params[y.path].dtype for y in own]) for x, own in made.items()}
    wanted = [TensorSpec(name, shapes[name], dtypes[name]) for name in made]
    specs, renamed = _specs(wanted, None if form.dtype is None else as_dtype(form.dtype))
    held = {x.dtype for x in specs} | {x.dtype for x in copied}
    floats = {str(x) for x in held if jnp.issubdtype(x, np.floating)}
    files = {} if form.like is None else companions(form.like, floats.pop() if len(floats) == 1 else None)
    notes = {"format": "pt"}
    if mapping is None:
        notes = {"format": "flax", **{x: name for x, name in ties.items() if name in made}, **renamed}
    param_shapes = {path: x.shape for path, x in chosen.items()}
    return Draft(specs, [*made.values()], copied, param_shapes, beside, form.decode, notes, files)


def _rules(mapping: NameMapping, params: Mapping[str, TensorSpec], ties: Mapping[str, str]) -> dict[str, list[Rule]]:
    """Returns the rule of each parameter, by the first of its paths that has sources; none if no path has."""
    rules: dict[str, list[Rule]] = {}
    for path, spec in params.items():
        names = (path, *(x.replace(".", "/") for x, y in ties.items() if y == spec.name))
        sources = next(filter(None, map(mapping.of, names)), ())
        rules[path] = [rule_of(sources, spec.shape)] if sources else []
    return rules


def _mapped(
    mapping: NameMapping,
    params: Mapping[str, TensorSpec],
    rules: Mapping[str, Sequence[Rule]],
    there: Mapping[str, TensorFile],
    left_out: set[str],
    form: Form,
) -> tuple[dict[str, list[Entry]], Mapping[str, Shape], dict[str, list[str]]]:
    """Returns what makes each tensor by a mapping, their shapes, and the parameters beside those that make them.

    Args:
      mapping: The mapping.
      params: The parameters to export, by path.
      rules: Of these and others.
      there: The tensors of the model `like`.
      left_out: Names of tensors that other parameters make.
      form: What is asked for.
    """
    published = None if form.like is None else {x: y.shape for x, y in there.items()} or known_shapes(form.like)
    param_shapes = {path: spec.shape for path, spec in params.items()}
    ruled = [(path, rule) for path in params for rule in rules[path]]
    made_shapes = shapes_made((param_shapes[path], rule) for path, rule in ruled)
    shapes = {**made_shapes, **form.shapes} if published is None else published
    what = "its shape in the file is not known: pass `like`" if published is None else "that model has none"
    none = "no key of the mapping matches it"
    found, problems = match_tensors(param_shapes, rules, shapes, lambda x: f"makes {x[0]}, but {what}" if x else none)
    made: dict[str, list[Entry]] = {}
    for entry in itertools.chain.from_iterable(own[0] for own in found.values()):
        made.setdefault(entry.tensor, []).append(entry)
    for name, entries in made.items():
        if why := _not_whole(entries, shapes[name]):
            problems.shapes[entries[0].path] = f"makes {name} of {list(shapes[name])}, but {why}"
    claimed = {*mapping.same, *(left_out & there.keys()), *(name for _, rule in ruled for name in names_in(rule))}
    left = [name for name in published or () if name not in claimed and not mapping.ignores(name)]
    problems.unexpected = {name: str(list(shapes[name])) for name in left}
    beside = {} if form.decode is None else _beside(param_shapes, rules, found)
    for path in itertools.chain.from_iterable(beside.values()):
        problems.missing.pop(path, None)
    if problems:
        model = "" if form.like is None else f", as those of {form.like} are"
        raise ValueError(
            f"The parameters do not make tensors by `mapping`{model}:\n{problems}\nCorrect the names there; leave "
            "parameters out with `paths`, or merge adapters with `decode=jzero.lora.merged(...)`."
        )
    return made, shapes, beside


def _not_whole(entries: Sequence[Entry], shape: Shape) -> str:
    """Returns why entries do not make a tensor, each element once; an empty text if they do."""
    if tile([x.box for x in entries], shape):
        return ""
    twice = sorted({b.path for a, b in itertools.combinations(entries, 2) if a.box & b.box})
    ends = [[f"{s.start}:{s.stop}" for s in x.box.slices] for x in entries]
    return f"{' and '.join(twice)} makes it, too" if twice else f"sections {ends} leave a gap".replace("'", "")


def _beside(
    shapes: Mapping[str, Shape], rules: Mapping[str, Sequence[Rule]], found: Mapping[str, list[list[Entry]]]
) -> dict[str, list[str]]:
    """Returns, by parameter with tensors, those beside it that no rule makes, of the same stack: `decode` gets them."""
    beside: dict[str, list[str]] = {}
    for path in (path for path in shapes if not rules[path]):
        for head, ((first, *_), *_) in found.items():
            stack = shapes[head][: first.num_stacked]
            if head.rpartition("/")[0] == path.rpartition("/")[0] and shapes[path][: len(stack)] == stack:
                beside.setdefault(head, []).append(path)
    return beside


def tensors_there(like: epath.PathLike) -> dict[str, TensorFile]:
    """Returns the tensors of a published model; none if there is its `config.json` alone."""
    folder = epath.Path(like).expanduser()
    if folder.is_dir() and any(path.name.endswith((SUFFIX, INDEX_SUFFIX)) for path in folder.iterdir()):
        return find_tensors(folder)[0]
    return {}


def shapes_there(like: epath.PathLike) -> Mapping[str, Shape] | None:
    """Returns the shapes of a published model's tensors: from its files, or else by its `config.json`."""
    return {name: tensor.shape for name, tensor in tensors_there(like).items()} or known_shapes(like)


def _specs(wanted: Sequence[TensorSpec], dtype: DType | None) -> tuple[list[TensorSpec], dict[str, str]]:
    """Returns the tensors to write, and the replacements of names that the format does not allow."""
    specs: list[TensorSpec] = []
    bad: list[str] = []
    names = {spec.name for spec in wanted}
    renamed: dict[str, str] = {}
    for spec in wanted:
        name, shape, own_dtype = spec.name, spec.shape, spec.dtype
        is_float = jnp.issubdtype(own_dtype, np.floating)
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


def _joined(parts: Iterator[np.ndarray], shape: Shape, *, keeps: bool = False) -> np.ndarray:
    """Returns an array of its consecutive parts, in memory of its own if there are several or if it `keeps` one."""
    part = next(parts)
    if part.size == math.prod(shape) and not keeps:
        return part.reshape(shape)
    out, end = np.empty(math.prod(shape), part.dtype), 0
    for x in itertools.chain([part], parts):
        start, end = end, end + x.size
        out[start:end] = x.reshape(-1)
    return out.reshape(shape)
