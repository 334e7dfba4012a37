"""The primitives of a placed program: how parameters and gradients travel, and what waits, as equations.

    a:f32[512,64] = zero_gather[path=w cut=0/8 dtype=float32 route=data] s     # s: [512/N, 64] on each of N devices
    r:f32[64,64] = zero_reduce[path=w cut=0/8 dtype=float32 route=data ...] g  # this device's part of the sum over all
    p:f32[512,64] = zero_unreduced[path=w] g                                   # g itself, to be reduced later
    s_ x_ = zero_wait[n=1 how=select] s x                                      # s_ does not exist before x does
    s_ = zero_named[path=w] s                                                  # s itself
    s:f32[64,64] = zero_read[shape=(64, 64) dtype=float32] h                   # the row on disk that h:i32[2] names

    x:f32[8,64] = zero_gather[path=t cut=1/8 lookup=8 ...] s i                 # 8 rows of a table, never whole, and
    r:f32[512,8] = zero_reduce[path=t cut=1/8 lookup=8 ...] c i                # their gradients, summed over all

They keep a parameter's name until the program is lowered, so that passes, printed programs and checks find it without
looking for collectives by their shapes. Inside of a function that layers share, a gather is named after the function's
input, "input 3", and a reduction after its result: one function has one program. A `zero_named` before and after each
call says which parameter that is.

[Note: Barriers and selects]
A value waits for others in one of three ways. Behind a "barrier" with them, a gather is not merged with an earlier one
of the same shard. On TPUs a barrier writes its operands to memory, so a "light" one takes one element of each. But XLA
for CPUs (jax 0.10) merges gathers across barriers, and compilers for GPUs drop barriers before they schedule, and start
the gather at any time. "select" makes a value depend on others: it selects the value by a comparison whose result is
always the same, which no compiler finds out. That works everywhere, and costs a pass over the value.

    what waits                          for what                      CPUs      GPUs      TPUs
    a second gather (`order`)           the operands of its use       select    barrier   light; barrier if small
    a gather beyond a bound (`order`)   results of earlier uses       select    select    select
    a loop's first gather (`order`)     the initial carry             select    select    select
    a loop or block (`waits`)           gradients from before it      -         select    -
    a row that stays (`loops`)          the results of its iteration  barrier   barrier   barrier

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
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, mlir

from jzero.core.arrays.collectives import gather_param, reduce_shard
from jzero.core.arrays.host_compute import call_python
from jzero.core.base import compat
from jzero.core.base.compat import Atom, J
from jzero.core.base.types import DType, Params, PyTree
from jzero.core.disk.rows import take_row
from jzero.core.jaxpr.edit import params_of_call
from jzero.core.jaxpr.lookups import Lookup
from jzero.core.jaxpr.primitives import RUNS, called_jaxpr
from jzero.core.layout.casts import round_without_derivative
from jzero.core.layout.cut import Cut
from jzero.core.layout.lookups import add_rows, dtype_sent, look_up, row_collectives
from jzero.core.layout.placement import on_device
from jzero.core.layout.platform import Wait
from jzero.core.layout.route import Collective, Route, Sums


def _gather(
    shard: jax.Array, *ids: jax.Array, cut: Cut, dtype: DType, route: Route, lookup: Lookup | None = None, **_: object
) -> jax.Array:
    """[..., P/N] -> [..., D], or rows of it. Only now a shard in host memory moves to the device."""
    shard = on_device(shard)
    if lookup is not None:
        return look_up(shard, ids[0], lookup, cut, dtype, route)
    if cut.blocks is None:
        return gather_param(round_without_derivative(shard, dtype), cut, route)
    return round_without_derivative(gather_param(shard, cut, route), dtype)


def _read(handle: jax.Array, *, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    """[2] -> [..., P/N]."""
    return call_python(take_row, handle, shape, dtype)


def _reduce(  # noqa: PLR0913  # an equation's parameters
    grad: jax.Array,
    ids: jax.Array | None = None,
    *,
    cut: Cut,
    dtype: DType,
    route: Route,
    sums: Sums,
    lookup: Lookup | None = None,
    **_: object,
) -> jax.Array:
    """[..., D], or gradients of rows -> [..., P/N]. `path` and `is_awaited` are for who reads the program."""
    if lookup is not None and ids is not None:
        return add_rows(grad, ids, lookup, cut, dtype, route, sums)
    return reduce_shard(grad, cut, route, sums).astype(dtype)


def _same(x: jax.Array, **_: object) -> jax.Array:
    return x


def _wait(*values: jax.Array, n: int, how: Wait) -> list[jax.Array]:
    """Returns the values: the first `n` do not exist before the others do; behind a "barrier", no other either."""
    waiting, others = list(values[:n]), list(values[n:])
    if how == "select":
        return [*_select(waiting, others), *others]
    if how == "light":
        return [*lax.optimization_barrier((waiting, first_elements(others)))[0], *others]
    return list(lax.optimization_barrier([*waiting, *others]))


def _select(values: Sequence[jax.Array], happened: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns values that do not exist before others do: see [Note: Barriers and selects]."""
    firsts = [x.astype(jnp.float32).reshape(()) for x in first_elements(happened)]  # scalars
    bits = functools.reduce(lax.bitwise_or, [lax.bitcast_convert_type(x, jnp.uint32) for x in firsts])
    # Always false: two shifts by 16 push out all 32 bits.
    never = lax.shift_right_logical(lax.shift_right_logical(bits, jnp.uint32(16)), jnp.uint32(16)) != 0
    # The barrier keeps compilers from merging the selection into each use.
    return [
        lax.optimization_barrier(lax.select(jnp.broadcast_to(never, x.shape), jnp.zeros_like(x), x)) for x in values
    ]


def can_be_awaited(aval: jax.core.ShapedArray) -> bool:
    """Whether values can wait for such an array: it has elements, inexact numbers on the device."""
    is_number = bool(jnp.issubdtype(aval.dtype, jnp.inexact))
    return is_number and aval.size > 0 and aval.memory_space != jax.memory.Space.Host


def first_elements(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns one element of each array that can be awaited, the real part if it is complex.

    A value that waits for the element waits for the array.
    """
    awaited = [x for x in values if can_be_awaited(jax.typeof(x))]
    firsts = [lax.slice(x, (0,) * x.ndim, (1,) * x.ndim) for x in awaited]  # [1, ..., 1]
    return [lax.real(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x for x in firsts]


def wait(
    values: Sequence[jax.Array], others: Sequence[jax.Array], how: Wait
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns values that do not exist before others do, and those others, behind the same barrier if there is one."""
    if not values or not others:
        return list(values), list(others)
    done = wait_p.bind(*map(on_device, values), *others, n=len(values), how=how)
    return done[: len(values)], done[len(values) :] if how == "barrier" else list(others)


def _differentiate(
    rule: Callable[..., PyTree], primals: Sequence[jax.Array], tangents: Sequence[jax.Array], **params: object
) -> PyTree:
    """Differentiates an equation of a placed program, e.g. by the batch: by the operations that it stands for."""
    return jax.jvp(functools.partial(rule, **params), primals, tuple(map(ad.instantiate_zeros, tangents)))


def _primitive(
    name: str, rule: Callable[..., PyTree], abstract: Callable[..., PyTree], *, several: bool = False
) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = several
    primitive.def_impl(rule)
    primitive.def_abstract_eval(abstract)
    # Names are many: jax neither traces each nor makes a function of it, as it does of what it lowers once.
    lowered = (lambda ctx, x, **_: [x]) if rule is _same else mlir.lower_fun(_by_kind(rule), multiple_results=several)
    mlir.register_lowering(primitive, lowered, cacheable=rule is not _same)
    ad.primitive_jvps[primitive] = functools.partial(_differentiate, rule)
    return primitive


def _gathered(
    shard: object, *ids: object, cut: Cut, dtype: DType, lookup: Lookup | None = None, **_: object
) -> jax.core.ShapedArray:
    return compat.array_type(cut.shape if lookup is None else (*lookup.shape, *cut.shape[1:]), dtype)


def _by_kind(rule: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a rule that is traced and lowered once for all parameters of a kind, whatever they are called."""
    once = jax.jit(lambda params, *xs: rule(*xs, **dict(params)), static_argnums=0)
    return lambda *xs, path="", **params: once(tuple(sorted(params.items())), *xs)


gather_p = _primitive("zero_gather", _gather, _gathered)
read_p = _primitive("zero_read", _read, lambda x, *, shape, dtype: compat.array_type(shape, dtype))
reduce_p = _primitive("zero_reduce", _reduce, lambda *_, cut, dtype, **__: compat.array_type(cut.shard_shape, dtype))
unreduced_p = _primitive("zero_unreduced", _same, lambda x, **_: x)
named_p = _primitive("zero_named", _same, lambda x, **_: x)
wait_p = _primitive("zero_wait", _wait, lambda *xs, **_: list(xs), several=True)

PLACED = frozenset([gather_p, read_p, reduce_p, unreduced_p, named_p, wait_p])
"""The primitives of a placed program."""


def collectives_of(eqn: JaxprEqn) -> tuple[Collective, ...]:
    """Returns the collectives of an equation of a placed program; of arrays that other mesh axes cut, one part's."""
    if eqn.primitive not in (gather_p, reduce_p):
        return ()
    with compat.where_traced(eqn):
        cut, route = eqn.params["cut"].of_part(jax.sharding.get_abstract_mesh().shape), eqn.params["route"]
    reduces, lookup = eqn.primitive is reduce_p, eqn.params.get("lookup")
    if lookup is not None:
        return row_collectives(cut, route, lookup.num_rows, dtype_moved(eqn), reduces=reduces)
    return route.reductions(cut, dtype_moved(eqn)) if reduces else route.gathers(cut, dtype_moved(eqn))


def dtype_moved(eqn: JaxprEqn) -> DType:
    """Returns the dtype in which a gather or a reduction sends its values."""
    if eqn.primitive is gather_p:
        return eqn.params["dtype"]
    dtype, sums = compat.type_of(eqn.invars[0]).dtype, eqn.params["sums"]
    return jnp.dtype(sums.dtype_of(dtype)) if eqn.params.get("lookup") is None else dtype_sent(dtype, sums)


def operations_of(eqn: JaxprEqn) -> Jaxpr:
    """Returns the operations that an equation of a placed program stands for."""
    fn = functools.partial(eqn.primitive.impl, **eqn.params)
    with compat.where_traced(eqn):
        mesh = jax.sharding.get_abstract_mesh()
        axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        jaxpr, consts = compat.traced(fn, [v.aval for v in eqn.invars], axes)
    assert not consts
    return jaxpr


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
