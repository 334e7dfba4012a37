"""Blocks of an unrolled model, found in its jaxpr.

[Note: Blocks of unrolled models]
A model that calls its layers one after the other is one long sequence of equations, in which what belongs to a layer
comes again and again: the same operations on the same shapes, `period` equations later. The period that covers most
equations is taken for the layers, and the sequence is cut where least is handed on, which between layers is the
residual stream. Each block then gets a `jax.checkpoint` of its own. One for the whole loss recomputes everything before
anything is freed (GPT of 124M on 8 H200, peak: 5998 MiB without, 5028 with one checkpoint, 4342 with one per block).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero import _compat

__all__ = ["RECOMPUTED", "Part", "keeps_heavy", "parts_of"]

RECOMPUTED = frozenset(
    "abs add and argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp concatenate convert_element_type copy "
    "cos custom_jvp_call div dynamic_slice eq erf erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota "
    "is_finite le log log1p logistic lt max min mul ne neg not or pad pow real reduce_and reduce_max reduce_min "
    "reduce_or reduce_precision reduce_prod reduce_sum rem reshape rev round rsqrt select_n sign sin slice split sqrt "
    "square squeeze stop_gradient sub tan tanh transpose xor".split()
)
"""Operations that take little more time than reading their operands. All others are heavy, unknown ones included."""


class Part(NamedTuple):
    """A piece of a jaxpr's equations, as far as `_compat.evaluate` wants a jaxpr.

    Attributes:
      invars: What it reads of what was there before.
      outvars: What it makes of what is read afterwards.
      eqns: Its equations.
      is_block: Whether it is one of the blocks that repeat.
    """

    invars: list[Any]
    outvars: list[Any]
    eqns: Sequence[Any]
    is_block: bool

    @property
    def constvars(self) -> tuple[()]:
        """Constants are among `invars`."""
        return ()


def keeps_heavy(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy for `jax.checkpoint` that keeps the results of heavy operations: products, random numbers, loops."""
    return primitive.name not in RECOMPUTED


def parts_of(jaxpr: Any) -> list[Part]:
    """Returns the equations of a jaxpr in parts: its repeated blocks, each a part, and what lies around them."""
    last_read = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in _read(eqn)}
    last_read |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not _compat.is_literal(v)}
    bounds = _block_bounds(jaxpr, last_read)
    ends = sorted({0, *bounds, len(jaxpr.eqns)})
    return [_part(jaxpr, a, b, last_read, is_block=a in bounds[:-1]) for a, b in itertools.pairwise(ends)]


def _block_bounds(jaxpr: Any, last_read: Mapping[Any, int]) -> list[int]:
    """Returns where each block begins, and where the last one ends; none if nothing heavy comes again."""
    eqns = jaxpr.eqns
    heavy = np.array([_is_heavy(eqn) for eqn in eqns], bool)
    start, period, length = _longest_repetition([_signature(eqn) for eqn in eqns])
    if not period or not heavy[start : start + period].any():
        return []
    crossing = _bytes_across(jaxpr, last_read)
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


def _signature(eqn: Any) -> Any:
    shapes = [(tuple(x.aval.shape), str(x.aval.dtype)) for x in (*eqn.invars, *eqn.outvars) if hasattr(x.aval, "dtype")]
    return eqn.primitive.name, tuple(shapes)


def _is_heavy(eqn: Any) -> bool:
    inner = [x for jaxpr in _compat.contained_jaxprs(eqn) for x in jaxpr.eqns]
    return any(map(_is_heavy, inner)) if inner else eqn.primitive.name not in RECOMPUTED


def _longest_repetition(signatures: Sequence[Any]) -> tuple[int, int, int]:
    """Returns start, period and length of the sequence that repeats with one period and is longest; zeros if none."""
    numbers: dict[Any, int] = {}
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
        whole = length // period * period  # whole periods count, two at least; of equals the shortest
        if end - begin >= period and whole > covered:
            covered, best = whole, (int(begin), period, length)
    return best


def _bytes_across(jaxpr: Any, last_read: Mapping[Any, int]) -> np.ndarray:
    """Returns for each equation how many bytes made before it are read from there on."""
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    change = np.zeros(len(jaxpr.eqns) + 2, np.int64)
    for v, i in made.items():
        if v in last_read and hasattr(v.aval, "dtype"):
            size = math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 4)
            change[i + 1] += size
            change[last_read[v] + 1] -= size
    return np.cumsum(change)[: len(jaxpr.eqns) + 1]


def _read(eqn: Any) -> Iterator[Any]:
    return (v for v in eqn.invars if not _compat.is_literal(v))


def _part(jaxpr: Any, begin: int, end: int, last_read: Mapping[Any, int], *, is_block: bool) -> Part:
    eqns = jaxpr.eqns[begin:end]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = dict.fromkeys(v for eqn in eqns for v in _read(eqn) if v not in made)
    outvars = [v for eqn in eqns for v in eqn.outvars if last_read.get(v, -1) >= end]
    return Part(list(reads), outvars, eqns, is_block)
