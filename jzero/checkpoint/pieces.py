"""Pieces: a tensor of a file, or a section of it, and the part of a parameter that it makes.

A `From` says how: section, order of dimensions, shape. Here are the two directions: which box of the file an index of
the parameter needs, and what of the file a part of the parameter becomes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jzero.checkpoint.safetensors_files import TensorFile
from jzero.pretrained.mapping import From

Index = tuple[slice, ...]
ROWS = 64
"""Rows of a source that are copied at once, so that lines of memory are filled while they are in a cache."""


class Piece:
    """A tensor of a file, or a section of it, as a part of one layer of a parameter.

    Attributes:
      source: The rule.
      shape: The shape of that part.
      ordered: The shape before `source.shape` changes it: of the section, in the order of the parameter's dimensions.
    """

    def __init__(self, source: From, file_shape: Sequence[int]) -> None:
        """`source` must fit a tensor of that shape, see `unfit`."""
        self.source = source
        self._section = [slice(0, n) for n in file_shape]
        if source.section is not None:
            dim, start, size = source.section
            self._section[dim] = slice(start, start + size)
        self._permute = source.permute or tuple(range(len(file_shape)))
        sizes = [s.stop - s.start for s in self._section]
        self.ordered = tuple(sizes[d] for d in self._permute)
        self.shape = self.ordered if source.shape is None else source.shape
        self._groups = _groups(self.ordered, self.shape)

    @property
    def slowest(self) -> int | None:
        """The dimension of the part that is cut where the file is cut into consecutive bytes; `None` if none is."""
        first = {dim: new[0] for dims, new in self._groups for dim in dims[:1] if new}
        return next((first[dim] for dim in np.argsort(self._permute).tolist() if dim in first), None)

    def read(self, tensor: TensorFile, index: Index) -> np.ndarray:
        """Returns an index of the part, with bounds; a view of the file where that is possible."""
        box, shape, inside = self._box(index)
        there = [slice(0)] * len(box)
        for s, dim in zip(box, self._permute, strict=True):
            start = self._section[dim].start
            there[dim] = slice(start + s.start, start + s.stop)
        view = tensor.view(tuple(there)).transpose(self._permute)
        return view if self.shape == self.ordered else view.reshape(shape)[inside]

    def _box(self, index: Index) -> tuple[list[slice], list[int], Index]:
        """Returns the smallest box in `ordered` around an index, the shape in which it is cut, and the cut."""
        box = [slice(0, n) for n in self.ordered]
        shape: list[int] = []
        inside: list[slice] = []
        for dims, new in self._groups:
            if dims and new:  # along the first dimension, in units that are whole rows on both sides
                row = math.prod(self.ordered[d] for d in dims[1:])
                new_row = math.prod(self.shape[d] for d in new[1:])
                unit = math.lcm(row, new_row)
                first = index[new[0]]
                low, high = first.start * new_row // unit * unit, -(-first.stop * new_row // unit) * unit
                box[dims[0]] = slice(low // row, high // row)
                shape += [(high - low) // new_row, *(self.shape[d] for d in new[1:])]
                inside.append(slice(first.start - low // new_row, first.stop - low // new_row))
                inside += [index[d] for d in new[1:]]
            elif new:  # a dimension of size 1
                shape += [self.shape[d] for d in new]
                inside += [index[d] for d in new]
        return box, shape, tuple(inside)

    def write(self, part: np.ndarray, out: np.ndarray) -> None:
        """Writes the part of a parameter into a tensor of the file's shape."""
        back = np.argsort(self._permute)
        copy_into(out[tuple(self._section)], part.reshape(self.ordered).transpose(back))


def unfit(source: From, file_shape: Sequence[int]) -> str:
    """Returns why a source does not fit a tensor of a shape; an empty string if it does."""
    sizes = list(file_shape)
    if source.section is not None:
        dim, start, size = source.section
        if dim >= len(sizes) or start + size > sizes[dim]:
            return f"section {source.section} is not inside"
        sizes[dim] = size
    if source.permute is not None and len(source.permute) != len(sizes):
        return f"permute {source.permute} has another number of dimensions"
    if source.shape is not None and math.prod(source.shape) != math.prod(sizes):
        return f"shape {source.shape} has another number of elements"
    return ""


def _groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns runs of dimensions of two shapes with the same number of elements, in order."""
    if 0 in a:
        return []
    left = [d for d, n in enumerate(a) if n > 1]
    groups: list[tuple[list[int], list[int]]] = []
    dims: list[int] = []
    new: list[int] = []
    for d in range(len(b)):
        new.append(d)
        while math.prod(a[x] for x in dims) < math.prod(b[x] for x in new):
            dims.append(left.pop(0))
        if math.prod(a[x] for x in dims) == math.prod(b[x] for x in new):
            groups.append((dims, new))
            dims, new = [], []
    return groups


def copy_into(out: np.ndarray, x: np.ndarray) -> None:
    """Copies an array into another one of its shape; in strips, if the order of their dimensions in memory differs."""
    bits = x.dtype.itemsize
    if x.dtype == out.dtype and bits in (1, 2, 4, 8):  # NumPy knows these, and copies others number by number
        x, out = x.view(f"u{bits}"), out.view(f"u{bits}")
    slowest, other = (max(range(y.ndim), key=lambda d: abs(y.strides[d]), default=0) for y in (x, out))
    if slowest == other:
        out[...] = x
        return
    for start in range(0, x.shape[slowest], ROWS):
        strip: Any = (*[slice(None)] * slowest, slice(start, start + ROWS))
        out[strip] = x[strip]
