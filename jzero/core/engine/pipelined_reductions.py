"""Reductions in loops whose hop between nodes runs one iteration later, beside the products of that iteration.

    without_last_hops(jaxpr, first) -> tuple[Jaxpr, dict[int, LastHop]]

The body of a backward loop that returns rows of gradients, reduced over two levels, returns the sums of one node
instead. The loop carries them to the next iteration, which runs the last hop of each row:

    r:f32[64,512/N] = zero_reduce[route=data+node ...] g

becomes, with D devices per node,

    s:f32[64,512/D] = zero_reduce[route=data ...] g           # this iteration
    r:f32[64,512/N] = zero_reduce[route=node ...] s_before    # of the iteration before

It costs memory for one such part of a row, and a reduction of zeros in the first iteration. The numbers are the same.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from jax.extend.core import JaxprEqn, Var

from jzero.core.base import compat
from jzero.core.base.compat import Atom, J
from jzero.core.base.types import Params
from jzero.core.engine.placed import named_p, reduce_p
from jzero.core.jaxpr.edit import params_of_call
from jzero.core.jaxpr.primitives import RUNS, called_jaxpr

LastHop: TypeAlias = Params
"""The parameters of the reduction between nodes."""


def without_last_hops(jaxpr: J, first: int) -> tuple[J, dict[int, LastHop]]:
    """Returns a loop's body without the last hops of its results from index `first`, and these hops.

    The hops are by index among these results.
    """
    last_hops = {}
    opened, _ = compat.open_jaxpr(jaxpr)
    for i in range(first, len(opened.outvars)):
        split = _without_last_hop(jaxpr, i)
        if split is not None:
            jaxpr, last_hops[i - first] = split
    return jaxpr, last_hops


def _without_last_hop(jaxpr: J, index: int) -> tuple[J, LastHop] | None:
    """Returns a program whose output at `index` lacks its last hop; `None` if it is not the result of a reduction."""
    opened, _ = compat.open_jaxpr(jaxpr)
    outs, eqns = list(opened.outvars), list(opened.eqns)
    split = None if any(outs[index] is x for i, x in enumerate(outs) if i != index) else _trim(eqns, outs[index], 0)
    if split is None:
        return None
    outs[index], last_hop = split
    return compat.with_equations(jaxpr, opened.invars, outs, eqns), last_hop


def _trim(eqns: list[JaxprEqn], v: Atom, readers: int) -> tuple[Var, LastHop] | None:
    """Takes the last hop from the equations that make `v`, which `readers` equations read; returns what replaces it."""
    place = next((i for i, eqn in enumerate(eqns) if any(v is x for x in eqn.outvars)), None)
    if place is None or sum(v is x for eqn in eqns for x in eqn.invars) != readers:
        return None
    eqn = eqns[place]
    if eqn.primitive is reduce_p:
        result, params, last_hop = _split(eqn)
    elif eqn.primitive is named_p:
        inner = _trim(eqns, eqn.invars[0], 1)
        if inner is None:
            return None
        source, last_hop = inner
        result = compat.variable(source.aval)
        eqns[place] = eqn.replace(invars=[source], outvars=[result])
        return result, last_hop
    elif eqn.primitive.name in RUNS:
        at = next(i for i, x in enumerate(eqn.outvars) if x is v)
        trimmed = _without_last_hop(called_jaxpr(eqn), at)
        if trimmed is None:
            return None
        inside, last_hop = trimmed
        result = compat.variable(compat.open_jaxpr(inside)[0].outvars[at].aval)
        params = params_of_call(eqn, inside, [x is v for x in eqn.outvars])
    else:
        return None
    if last_hop is None:
        return None
    eqns[place] = eqn.replace(outvars=[result if x is v else x for x in eqn.outvars], params=params)
    return result, last_hop


def _split(eqn: JaxprEqn) -> tuple[Var, LastHop, LastHop | None]:
    """Returns the result and the parameters of a reduction's first hop, and those of its last, if it has two."""
    params, ((cut, route), *after) = eqn.params, eqn.params["route"].legs(eqn.params["cut"])
    if not after:
        return eqn.outvars[0], params, None
    # The first hop has already cast and divided.
    dtype = params["sums"].dtype_of(compat.type_of(eqn.invars[0]).dtype)
    last = dataclasses.replace(params["sums"], dtype=None, predivide=1)
    first_hop = {**params, "cut": cut, "route": route, "dtype": dtype}
    last_hop = {**params, "cut": after[0][0], "route": after[0][1], "sums": last}
    return compat.variable(compat.array_type(cut.shard_shape, dtype)), first_hop, last_hop
