"""The one description of weights in files: a box of a tensor is a box of a parameter, in another order and shape.

[Note: Entries]
All that loading and exporting do follows from entries, which are known before a byte is read. To load a shard is to
read, of each entry whose part it meets, the box of the tensor that lies behind (`Entry.read`). To export a tensor is to
write the parts of its entries into it (`Entry.write`). A parameter that is a tensor as it is has one entry, of all of
both. Stacks of layers and experts have one entry per index, fused tensors one per section, joined ones one per source.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jzero.core.layout.box import Box, Index, before_reshape, reshaped_dims, tile
from jzero.weights.mapping import From, Sources

Shape: TypeAlias = tuple[int, ...]
Rule: TypeAlias = Mapping[Shape, Sequence[tuple[str, From]]]
"""What makes a parameter, by index of its stacked dimensions: names of tensors, and how each is turned."""
AS_IT_IS = From("as it is")
"""How a tensor that is a parameter is turned: not at all."""
ROWS = 64
"""Rows of a source that are copied at once, so that lines of memory are filled while they are in a cache."""
MAX_LINES = 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """A box of a tensor, which is a box of a parameter.

    Attributes:
      tensor: The name of the tensor.
      box: The box of it.
      permute: The order of its dimensions in the parameter.
      path: The key path of the parameter.
      part: The box of that.
      num_stacked: How many leading dimensions of the parameter are those of a stack.
    """

    tensor: str
    box: Box
    permute: tuple[int, ...]
    path: str
    part: Box
    num_stacked: int = 0

    @property
    def ordered(self) -> Shape:
        """The shape of the box in the parameter's order of dimensions."""
        return self.box.transposed(self.permute).shape

    @property
    def _back(self) -> list[int]:
        """The order of the parameter's dimensions in the tensor."""
        return sorted(range(len(self.permute)), key=self.permute.__getitem__)

    @property
    def is_straight(self) -> bool:
        """Whether both boxes have the same elements in the same order."""
        return self.permute == tuple(range(len(self.permute)))

    @property
    def slowest(self) -> int | None:
        """The parameter's dimension that is cut where the file is cut into consecutive bytes; `None` if none is."""
        first = {dims[0]: new[0] for dims, new in reshaped_dims(self.ordered, self.part.shape) if dims}
        return next((first[dim] for dim in self._back if dim in first), None)

    def read(self, view: Callable[[Index], np.ndarray], box: Box) -> np.ndarray:
        """Returns a box of the parameter, inside of the part, as a view where possible; `view` has the tensor's."""
        near, shape, inside = before_reshape(box.within(self.part), self.part.shape, self.ordered)
        there = near.transposed(self._back).beyond(self.box.start)
        return inside.take(view(there.slices).transpose(self.permute).reshape(shape))

    def write(self, part: np.ndarray, out: np.ndarray) -> None:
        """Writes the part into an array of the tensor's shape."""
        copy_into(self.box.take(out), part.reshape(self.ordered).transpose(self._back))


@dataclasses.dataclass
class Problems:
    """Mismatches between tensors and parameters, by name, with an explanation.

    Attributes:
      shapes: Parameters whose tensors have other shapes.
      missing: Parameters without tensors.
      unexpected: Tensors without parameters.
    """

    shapes: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: dict[str, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.shapes or self.missing or self.unexpected)

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


def rule_of(sources: Sources, shape: Sequence[int]) -> Rule:
    """Returns what makes a parameter of a shape: what the stars of its sources stand for."""
    return {at: [(x.at(at), x) for x in sources] for at in np.ndindex(*shape[: sources[0].num_stacked])}


def names_in(rule: Rule) -> list[str]:
    """Returns the names of the tensors of a rule, source by source."""
    return [name for layer in zip(*rule.values(), strict=True) for name, _ in layer]


def entries_of(path: str, shape: Shape, rule: Rule, tensors: Mapping[str, Shape]) -> tuple[list[Entry], str]:
    """Returns the entries of a parameter, and why they do not make it; an empty text if they do.

    Args:
      path: The key path of the parameter.
      shape: Its shape.
      rule: What makes it.
      tensors: The shapes of the tensors, by name; all that the rule names must be there.
    """
    entries: list[Entry] = []
    for at, sources in rule.items():
        stack, inner = shape[: len(at)], shape[len(at) :]
        layer = Box((*at, *(0 for _ in inner)), (*(1 for _ in at), *inner))
        here: list[Entry] = []
        made: list[Shape] = []
        end = 0
        for name, source in sources:
            turned = _turned(source, tensors[name])
            if isinstance(turned, str):
                return [], f"{turned} of {name}: {list(tensors[name])}"
            box, order, result = turned
            first = [0] * len(result)
            if len(sources) > 1 and source.axis < len(result):
                first[source.axis], end = end, end + result[source.axis]
            made.append(result)
            part = Box((*at, *first), (*(1 for _ in at), *result))
            here.append(Entry(name, box, order, path, part, len(at)))
        if any(len(x) != len(inner) for x in made) or not tile([x.part.within(layer) for x in here], layer.shape):
            there = ", ".join(f"{name}: {list(tensors[name])}" for name, _ in sources)
            where = "in the file" if sources[0][1] is AS_IT_IS else f"from {there}"
            return [], f"{' and '.join(str([*stack, *x]) for x in made)} {where}"
        entries += here
    return entries, ""


def match_tensors(
    shapes: Mapping[str, Shape],
    rules: Mapping[str, Sequence[Rule]],
    tensors: Mapping[str, Shape],
    lacks: Callable[[Sequence[str]], str],
) -> tuple[dict[str, list[list[Entry]]], Problems]:
    """Returns the entries of each parameter, once for each of its rules whose tensors are there, and what does not fit.

    Args:
      shapes: The shapes of the parameters, by path.
      rules: What makes each; several rules of a tied one say the same.
      tensors: The shapes of the tensors, by name.
      lacks: What to say of a parameter without tensors, given the names of those that are not there.
    """
    found: dict[str, list[list[Entry]]] = {}
    problems = Problems()
    for path, shape in shapes.items():
        absent = [[x for x in names_in(rule) if x not in tensors] for rule in rules.get(path, ())]
        if all(absent):
            problems.missing[path] = lacks(absent[0] if absent else ())
        for rule in (rule for rule, names in zip(rules.get(path, ()), absent, strict=True) if not names):
            entries, why = entries_of(path, shape, rule, tensors)
            if why:
                problems.shapes[path] = f"{list(shape)} in the state, but {why}"
            elif entries:
                found.setdefault(path, []).append(entries)
    return found, problems


@functools.lru_cache  # stacks of layers and experts ask the same of each
def _turned(source: From, shape: Shape) -> tuple[Box, tuple[int, ...], Shape] | str:
    """Returns the box of a tensor that a source takes, its order of dimensions and the result's shape, or why not."""
    box, order = Box.whole(shape), source.permute or tuple(range(len(shape)))
    if source.section is not None:
        dim, start, size = source.section
        if dim >= len(shape) or start + size > shape[dim]:
            return f"section {source.section} is not inside"
        box = Box(*((*x[:dim], new, *x[dim + 1 :]) for x, new in zip(box, (start, size), strict=True)))
    if len(order) != len(shape):
        return f"permute {source.permute} has another number of dimensions"
    if source.shape is not None and math.prod(source.shape) != box.size:
        return f"shape {source.shape} has another number of elements"
    return box, order, source.shape or box.transposed(order).shape


def shapes_made(rules: Iterable[tuple[Shape, Rule]]) -> dict[str, Shape]:
    """Returns the shapes of tensors that follow from parameters alone: of those that are not reshaped or joined.

    Args:
      rules: The shape of each parameter, and what makes it.
    """
    made: dict[str, list[int]] = {}
    for shape, rule in rules:
        for at, ((name, source), *others) in rule.items():
            inner = shape[len(at) :]
            permute = source.permute or tuple(range(len(inner)))
            if others or source.shape is not None or len(permute) != len(inner):
                continue
            sizes = [inner[permute.index(d)] for d in range(len(inner))]
            if source.section is not None and source.section[0] < len(sizes):
                sizes[source.section[0]] = sum(source.section[1:])
            before = made.setdefault(name, sizes)
            if source.section is not None and len(before) == len(sizes):  # as far as the last of its sections
                made[name] = [max(*pair) for pair in zip(before, sizes, strict=True)]
    return {name: tuple(sizes) for name, sizes in made.items()}


def copy_into(out: np.ndarray, x: np.ndarray) -> None:
    """Copies an array into another one of its shape; in strips, if the order of their dimensions in memory differs."""
    bits = x.dtype.itemsize
    if x.dtype == out.dtype and bits in (1, 2, 4, 8):  # NumPy knows these, and copies others number by number
        x, out = x.view(f"u{bits}"), out.view(f"u{bits}")
    strides = [[abs(step) if n > 1 else 0 for step, n in zip(y.strides, y.shape, strict=True)] for y in (x, out)]
    slowest, other = (y.index(max(y, default=0)) if y else 0 for y in strides)
    if slowest == other:
        out[...] = x
        return
    for start in range(0, x.shape[slowest], ROWS):
        strip: Any = (*[slice(None)] * slowest, slice(start, start + ROWS))
        out[strip] = x[strip]
