"""Finds the blocks of an unrolled model in its jaxpr.

[Note: Blocks of unrolled models]
A model that calls its layers one after the other is one long sequence of equations, in which each layer repeats the
same operations on the same shapes, `period` equations later. jzero takes the period that covers the most equations for
the layers, and cuts the sequence where the fewest bytes cross: between layers, that is the residual stream. Each block
then gets its own `jax.checkpoint`. A single checkpoint around the whole loss would recompute everything before freeing
anything (124M GPT on 8 H200, saving every product: 5998 MiB without checkpoints, 5028 with one, 4342 with one per
block).

[Note: Saved results]
The policy saves the results of products with weights, convolutions, loops and unknown operations. The backward pass
recomputes whatever follows from them elementwise or by reductions, mostly inside the operation that reads it. It also
recomputes attention scores: they are the largest activations and cost 64 or 128 multiplications an element. Their
result is saved (the same 124M: 4342 MiB with the scores, 1752 without). To write scores and their softmax again takes
time, so where there is memory, blocks keep both, see [Note: Kept blocks].
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var

from jzero.core.base import compat
from jzero.core.base.types import Params
from jzero.core.jaxpr.equations import equations_in
from jzero.core.jaxpr.primitives import LIGHT, REMAT
from jzero.core.jaxpr.sizes import array_bytes

OPERAND = "operand_of_product"
"""Name of a saved operand."""
LANES = 128
"""Numbers in a row of a TPU's vector registers."""
THIN = 256
"""Floating-point operations per byte of a result. Accelerators do 150 to 300 in the time that they move a byte."""


class EquationRun(NamedTuple):
    """A run of a jaxpr's equations, with the attributes of a jaxpr that `interpret` needs.

    Attributes:
      invars: Earlier variables that it reads.
      outvars: Its results that later equations, or the jaxpr's outputs, read.
      is_block: Whether it is one of the repeated blocks.
      is_free: Whether it is a block that may be recomputed, and has no checkpoints of its own.
    """

    invars: list[Var]
    outvars: list[Var]
    eqns: Sequence[JaxprEqn]
    is_block: bool
    is_free: bool

    @property
    def constvars(self) -> tuple[()]:
        """None: constants are among `invars`."""
        return ()


def keeps_heavy(primitive: Primitive, *avals: jax.core.ShapedArray, **params: object) -> bool:
    """Policy for `jax.checkpoint` that saves results of heavy operations but scores, and operands named `OPERAND`."""
    is_thin = primitive.name == "dot_general" and _is_thin(*avals, params=params)
    return not is_thin and keeps_products(primitive, *avals, **params)


def keeps_products(primitive: Primitive, *avals: jax.core.ShapedArray, **params: object) -> bool:
    """Policy for `jax.checkpoint` that saves results of all heavy operations, and operands named `OPERAND`.

    Heavy are products, kernels, loops and random numbers. In place of some it saves less: their comparison with a
    probability, `lt`, whose result takes one byte and not four; and one lane of what kernels for TPUs write 128 times,
    the statistics of attention.
    """
    is_kept = params.get("name") == OPERAND or primitive.name == "lt" or primitive.name not in LIGHT
    is_kept |= primitive.name == "slice" and takes_one_lane(avals[0].shape, params)
    return is_kept and can_be_saved(compat.result_types(primitive, avals, params))


def takes_one_lane(shape: Sequence[int], params: Params) -> bool:
    """Whether a `slice` of an array takes one of the lanes of a TPU's vector registers."""
    return shape[-1:] == (LANES,) and params["limit_indices"][-1] - params["start_indices"][-1] == 1


def can_be_saved(results: Sequence[jax.core.AbstractValue]) -> bool:
    """Whether `jax.checkpoint` can save results of such types: it rounds them, and cannot round complex numbers."""
    return not any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in results if hasattr(x, "dtype"))


def is_batched_product(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies matrices pairwise, as attention does."""
    return eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0])


def dims_are_adjacent(eqn: JaxprEqn) -> list[bool]:
    """Returns for each operand of a matrix product whether it can be read in the order of its dimensions.

    A product reads an operand as batch, rows and columns. If one of these is made of dimensions that are no neighbours,
    such as the queries of grouped heads, compilers need a copy in another layout. Empty for any other equation.
    """
    if eqn.primitive.name != "dot_general":
        return []
    contracted, batch = eqn.params["dimension_numbers"]
    return [_are_adjacent(compat.type_of(v).shape, x, y) for v, x, y in zip(eqn.invars, contracted, batch, strict=True)]


def _are_adjacent(shape: tuple[int, ...], *groups: tuple[int, ...]) -> bool:
    place = {d: i for i, d in enumerate(d for d, size in enumerate(shape) if size > 1)}
    grouped = {d for group in groups for d in group}
    merged = [sorted(place[d] for d in group if d in place) for group in (*groups, set(range(len(shape))) - grouped)]
    return all(x == list(range(x[0], x[-1] + 1)) for x in merged if x)


def _is_thin(a: jax.core.ShapedArray, b: jax.core.ShapedArray, *, params: Params) -> bool:
    """Whether a batched product has a result larger than its operands that takes few operations per byte.

    Attention scores do: `[batch, heads, queries, keys]` from `[batch, queries or keys, heads, 64]`.
    """
    (contracted, _), (batched, _) = params["dimension_numbers"]
    depth, batch = (math.prod(a.shape[d] for d in dims) for dims in (contracted, batched))
    if not batched or not depth or not batch:
        return False
    preferred = params.get("preferred_element_type")
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize) if preferred is None else jnp.dtype(preferred).itemsize
    num_bytes = (a.size // depth) * (b.size // (depth * batch)) * itemsize
    return num_bytes > aval_bytes(a) + aval_bytes(b) and 2 * depth < THIN * itemsize


def aval_bytes(aval: jax.core.ShapedArray) -> int:
    """Returns the bytes of a value of a type."""
    return array_bytes(math.prod(aval.shape), aval.dtype)


def is_free(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether equations may be recomputed, and have no checkpoints of their own."""
    if any(map(compat.has_side_effects, eqns)):
        return False
    inner = (x for eqn in eqns for x in equations_in(eqn))
    return all(x.primitive.name not in REMAT and compat.can_be_recomputed(x) for x in inner)


_PARTS: weakref.WeakKeyDictionary[Jaxpr, list[EquationRun]] = weakref.WeakKeyDictionary()
"""The parts of a jaxpr, while it lives. Only `split_into_parts` reads and writes it, at any time: jaxprs do not change,
so entries are never stale. Callers share the lists, and must not change them."""


def split_into_parts(jaxpr: Jaxpr) -> list[EquationRun]:
    """Splits the equations of a jaxpr into parts: the repeated blocks, and the equations before, between and after."""
    if jaxpr not in _PARTS:  # whether there are blocks is asked before they are rewritten
        _PARTS[jaxpr] = _split(jaxpr)
    return _PARTS[jaxpr]


def _split(jaxpr: Jaxpr) -> list[EquationRun]:
    last_read = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in _read(eqn)}
    last_read |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not compat.is_literal(v)}
    blocks = _blocks(jaxpr, last_read)
    ends = sorted({0, len(jaxpr.eqns), *itertools.chain(*blocks)})
    return [_part(jaxpr, a, b, last_read, is_block=(a, b) in blocks) for a, b in itertools.pairwise(ends)]


def _blocks(jaxpr: Jaxpr, last_read: Mapping[Var, int]) -> set[tuple[int, int]]:
    """Returns where each block begins and ends, from the longest repetition, then from those before and after it."""
    signatures = [_signature(eqn) for eqn in jaxpr.eqns]
    heavy = np.array([_is_heavy(eqn) for eqn in jaxpr.eqns], bool)
    crossing = _bytes_across(jaxpr, last_read)
    blocks: set[tuple[int, int]] = set()
    pending = [(0, len(jaxpr.eqns))]
    while pending:
        begin, end = pending.pop()
        bounds = [begin + i for i in _bounds(signatures[begin:end], heavy[begin:end], crossing[begin:end])]
        if bounds:
            blocks |= set(itertools.pairwise(bounds))
            pending += [(begin, bounds[0]), (bounds[-1], end)]
    return blocks


def _bounds(signatures: Sequence[Hashable], heavy: np.ndarray, crossing: np.ndarray) -> list[int]:
    """Returns where each block of the longest repetition begins, and where the last one ends; none if all are light."""
    start, period, length = _longest_repetition(signatures)
    if not period or not heavy[start : start + period].any():
        return []
    choices = []
    for offset in range(period):
        num_blocks = (length - offset) // period
        at = start + offset
        if num_blocks >= 2:
            choices.append((max(crossing[at + period * i] for i in range(1, num_blocks)), -num_blocks, at))
    if not choices:
        return []
    _, num_blocks, at = min(choices)
    return [at + period * i for i in range(-num_blocks + 1)]


def _signature(eqn: JaxprEqn) -> Hashable:
    types = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name, tuple([(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in types])


def _is_heavy(eqn: JaxprEqn) -> bool:
    inner = [x for jaxpr in compat.contained_jaxprs(eqn) for x in jaxpr.eqns]
    return any(map(_is_heavy, inner)) if inner else eqn.primitive.name not in LIGHT


def _longest_repetition(signatures: Sequence[Hashable]) -> tuple[int, int, int]:
    """Returns start, period and length of the longest sequence that repeats with one period; zeros if there is none."""
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(x, len(numbers)) for x in signatures], np.int64)
    covered, best = 0, (0, 0, 0)
    for period in range(1, len(ids) // 2 + 1):
        if covered == len(ids):
            break
        same = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not len(edges):
            continue
        runs = edges.reshape(-1, 2)
        begin, end = runs[np.argmax(runs[:, 1] - runs[:, 0])]
        length = int(end - begin) + period
        periods = length // period * period  # counts whole periods, at least two; ties go to the shortest
        if end - begin >= period and periods > covered:
            covered, best = periods, (int(begin), period, length)
    return best


def _bytes_across(jaxpr: Jaxpr, last_read: Mapping[Var, int]) -> np.ndarray:
    """Returns for each equation the bytes that earlier equations made and that it, or a later one, reads."""
    producers = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    change = np.zeros(len(jaxpr.eqns) + 2, np.int64)
    for v, i in producers.items():
        if v in last_read and hasattr(v.aval, "dtype"):
            change[i + 1] += aval_bytes(compat.type_of(v))
            change[last_read[v] + 1] -= aval_bytes(compat.type_of(v))
    return np.cumsum(change)[: len(jaxpr.eqns) + 1]


def _read(eqn: JaxprEqn) -> Iterator[Var]:
    return (v for v in eqn.invars if not compat.is_literal(v))


def _part(jaxpr: Jaxpr, begin: int, end: int, last_read: Mapping[Var, int], *, is_block: bool) -> EquationRun:
    eqns = jaxpr.eqns[begin:end]
    results = {v for eqn in eqns for v in eqn.outvars}
    reads = dict.fromkeys(v for eqn in eqns for v in _read(eqn) if v not in results)
    outvars = [v for eqn in eqns for v in eqn.outvars if last_read.get(v, -1) >= end]
    return EquationRun(list(reads), outvars, eqns, is_block, is_block and is_free(eqns))
