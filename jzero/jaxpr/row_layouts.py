"""The positions of the batch's rows in an array.

A `Layout` names the dimensions of an array that hold rows, each with its factors `(size, step)`, the slowest-varying
first: the row of an element is the sum of index times step over all factors. A factor of step 0 repeats or belongs to
something else than rows:

    x                       [8, 5]     ((0, ((8, 1),)),)
    x.reshape(40)           [40]       ((0, ((8, 1), (5, 0))),)
    x.reshape(4, 2, 5)      [4, 2, 5]  ((0, ((4, 2),)), (1, ((2, 1),)))
    concatenate([x, x])     [16, 5]    ((0, ((2, 0), (8, 1))),)

Functions return `None`, or take `scattered`, where positions and rows have no such relation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

Factors: TypeAlias = tuple[tuple[int, int], ...]
Layout: TypeAlias = tuple[tuple[int, Factors], ...]


def num_rows(layout: Layout, dims: Iterable[int]) -> int:
    """Returns over how many rows an array varies along some dimensions."""
    return math.prod(size for dim, factors in layout if dim in dims for size, step in factors if step)


def moved(layout: Layout, place: Callable[[int], int | None]) -> Layout:
    """Returns the layout after dimension `d` moved to `place(d)`; `None` drops it."""
    return tuple(sorted((to, factors) for dim, factors in layout if (to := place(dim)) is not None))


def scattered(layout: Layout, shape: Sequence[int], dims: Iterable[int] = ()) -> Layout:
    """Returns a layout of the same dimensions and `dims`, in an array of this shape, with rows in no known order."""
    row_dims = {dim for dim, _ in layout} | set(dims)
    return tuple((dim, ((int(shape[dim]), 1),)) for dim in sorted(row_dims) if dim < len(shape))


def merged(layouts: Iterable[Layout]) -> Layout:
    """Returns a layout with the dimensions of all; the first one's factors count."""
    factors_of: dict[int, Factors] = {}
    for layout in layouts:
        for dim, factors in layout:
            factors_of.setdefault(dim, factors)
    return tuple(sorted(factors_of.items()))


def without_units(layout: Layout) -> Layout:
    """Returns the layout without dimensions of one row, which fit any position."""
    return tuple((dim, factors) for dim, factors in layout if any(size > 1 and step for size, step in factors))


def sliced(factors: Factors, start: int, limit: int, stride: int = 1) -> tuple[Factors, int] | None:
    """Returns the factors of `[start:limit:stride]` of a dimension, and the first row; `None` if it cuts them."""
    (size, step), inner = factors[0], math.prod(size for size, _ in factors[1:])
    if start == 0 and limit == size * inner and stride == 1:
        return factors, 0
    if inner == 1:
        return ((-(-(limit - start) // stride), step * stride), *factors[1:]), start * step
    if stride != 1:
        return None
    if start % inner == 0 and limit % inner == 0:
        return _normal([((limit - start) // inner, step), *factors[1:]]), start // inner * step
    outer = start // inner
    if (limit - 1) // inner != outer:
        return None
    cut = sliced(factors[1:], start - outer * inner, limit - outer * inner)
    return cut and (cut[0], cut[1] + outer * step)


def reshaped(layout: Layout, old: Sequence[int], new: Sequence[int]) -> Layout | None:
    """Returns the layout after a reshape; `None` if a new dimension cuts a factor."""
    if 0 in new:
        return None
    own = dict(layout)
    pending = [factor for dim, size in enumerate(old) for factor in own.get(dim, ((size, 0),))][::-1]  # a stack
    result = []
    for dim, size in enumerate(new):
        factors, left = [], size
        if size == 1 and pending and pending[-1][0] == 1:
            factors.append(pending.pop())
        while left > 1:
            count, step = pending.pop()
            if left % count:  # split: the inner part waits for the next dimension
                if count % left:
                    return None
                inner = count // left
                pending.append((inner, step))
                count, step = left, step * inner
            factors.append((count, step))
            left //= count
        if any(step for _, step in factors):
            result.append((dim, _normal(factors)))
    return tuple(result)


def _normal(factors: Sequence[tuple[int, int]]) -> Factors:
    """Joins neighbours that are one factor."""
    joined: list[tuple[int, int]] = []
    for size, step in factors:
        if joined and joined[-1][1] == step * size:
            joined[-1] = (joined[-1][0] * size, step)
        else:
            joined.append((size, step))
    return tuple(joined)
