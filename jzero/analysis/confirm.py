"""Compiles the best candidates of `fit`, until the compiler's figures decide."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from jzero.analysis.candidates import SURE_SHARE, Candidate, describe_candidate
from jzero.analysis.compiled_step import CompiledStep, compile_step
from jzero.analysis.search import Search, by_cost
from jzero.estimate.step_memory import StepMemory

BEYOND_DOUBT = 2
"""Estimates are not off by this factor: what takes so much more than the limit is not compiled."""

RIVALS = 3
"""The fitting candidates to compile, since estimated times are inexact."""


def confirm(search: Search, tried: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates, by cost, with the best compiled.

    Compiles those that may fit, the cheapest first, until `RIVALS` fit; until one does if the machine's rates are
    unknown.
    """
    tried = sorted(tried, key=by_cost)
    while True:
        i = _next(tried, search.limit)
        if i is None:
            if more := search.more(tried):
                tried = sorted([*tried, *more], key=by_cost)
                continue
            if any(x.is_compiled and x.fits(search.limit) for x in tried):
                return tried
            # Nothing fits by the estimates: compile the smallest, to be sure.
            i = min(range(len(tried)), key=lambda i: (tried[i].refused, bool(tried[i].lacks), tried[i].peak))
            if tried[i].is_compiled or tried[i].peak > BEYOND_DOUBT * search.limit:
                return tried
        x = compiled(search, tried[i])
        tried = [_if_equal(y, x) for y in tried]
        if not x.lacks and x.memory.peak <= search.limit and not x.fits(search.limit):
            tried = sorted([*tried, *search.next_steps(x)], key=by_cost)


def _next(tried: Sequence[Candidate], limit: int) -> int | None:
    """Returns the index of the next candidate to compile; `None` if enough are."""
    confirmed = set[StepMemory]()
    for i, x in enumerate(tried):
        if x.is_compiled and x.fits(limit):
            confirmed.add(x.memory)
        elif not x.is_compiled and not x.lacks and SURE_SHARE * x.memory.peak <= limit:
            return i
        if len(confirmed) == (1 if x.memory.seconds is None else RIVALS):
            return None
    return None


def _if_equal(x: Candidate, of: Candidate) -> Candidate:
    """Returns a candidate with the compiler's figures of another, if it is the same program.

    With one micro-batch, stages 1 and 2 are the same program.
    """
    if (x.memory, x.remat) != (of.memory, of.remat):
        return x
    return dataclasses.replace(
        x,
        compiled_peak=of.compiled_peak,
        compiled_seconds=of.compiled_seconds,
        most_seconds=of.most_seconds,
        refused=of.refused,
    )


def with_figures(x: Candidate, figures: CompiledStep | None) -> Candidate:
    """Returns a candidate with the compiler's figures of its step; `None`: it was not compiled."""
    peak, seconds, most = figures or (None, None, None)
    return dataclasses.replace(x, compiled_peak=peak, compiled_seconds=seconds, most_seconds=most)


def compiled(search: Search, x: Candidate) -> Candidate:
    """Returns a candidate with the compiler's figures."""
    num_replicas = x.mesh_shape.get(str(x.config.replica_axis), 1)
    placed, step = search.placed(x.config, num_replicas), search.step(x.accumulate_steps, x.remat)
    logging.getLogger("jzero").info("Compiling %s.", describe_candidate(x))
    figures = compile_step(step, (placed, search.batch, search.rng), search.topology, search.hardware)
    if figures is None:
        return dataclasses.replace(x, refused=True)
    return with_figures(x, figures)
