"""How the result of each primitive depends on rows, given its operands: `rule(eqn, operands) -> facts`, or a list.

A rule runs only if some operand depends on rows. An operation without a rule is `RowKind.UNKNOWN`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import Atom
from jzero.core.jaxpr.kernels import KERNELS, row_places
from jzero.core.jaxpr.primitives import Trait, primitives_with
from jzero.core.jaxpr.row_facts import (
    LEAST_TERMS,
    SAME,
    RowFacts,
    RowKind,
    added,
    applied,
    collected,
    joined,
    lost,
    mixed,
    summed,
    without,
)

RowRule: TypeAlias = Callable[[JaxprEqn, list[RowFacts]], RowFacts | Sequence[RowFacts]]
RULES: dict[str, RowRule] = {}
"""By the name of a primitive."""


def _rule(names: str) -> Callable[[RowRule], RowRule]:
    def register(rule: RowRule) -> RowRule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Returns the shape of an operand or a result."""
    return compat.type_of(atom).shape


# Values at the same position.


_rule(" ".join(primitives_with(Trait.ELEMENTWISE | Trait.RANDOM)))(lambda eqn, ins: applied(ins, eqn))
_rule("copy copy_p reduce_precision sharding_constraint neg real imag conj device_put name")(lambda eqn, ins: ins[0])
_rule("pcast pvary reshard rev tile")(lambda eqn, ins: ins[0])
_rule("optimization_barrier")(lambda eqn, ins: ins)
_rule("add sub add_any complex")(lambda eqn, ins: added(ins, eqn))
_rule("select_n")(lambda eqn, ins: applied(ins, eqn) if ins[0].kind else collected(ins))


@_rule("convert_element_type")
def _convert(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    return applied(ins, eqn) if eqn.params["new_dtype"] == jnp.bool_ else ins[0]  # integers are counts


@_rule("stop_gradient")
def _stop(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    # The largest element, subtracted before `exp`, cancels.
    is_shift = ins[0].coupled and ins[0].coupled.primitive in ("reduce_max", "reduce_min")
    return SAME if is_shift else ins[0]


@_rule("is_finite ne")
def _compare(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    is_test = len(ins) == 1 or eqn.invars[0] is eqn.invars[1]  # x != x is isnan(x)
    return SAME if is_test and ins[0].kind is not RowKind.ROW else applied(ins, eqn)  # results are assumed to be finite


def _product(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    return applied(ins, eqn) if all(x.kind for x in ins) else collected(ins)


_rule("mul")(_product)


@_rule("div")
def _divide(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts | Sequence[RowFacts]:
    x, y = ins
    is_sum = y.kind is RowKind.LINEAR or (y.coupled and y.coupled.how == "sum")  # maximum(mask.sum(), 1), say
    if is_sum and x.kind <= RowKind.LINEAR:
        return joined([x._replace(cause=None), y._replace(cause=None)], RowKind.COUPLED, eqn, "ratio")
    return applied(ins, eqn) if y.kind else x._replace(terms=int(_divides_by(eqn, x.terms)))


def _divides_by(eqn: JaxprEqn, terms: int) -> bool:
    """Whether an equation divides by the number of terms, as `jnp.mean` does."""
    divisor = eqn.invars[-1]
    return terms >= LEAST_TERMS and compat.is_literal(divisor) and bool(divisor.val == terms)


@_rule("integer_pow")
def _power(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts | Sequence[RowFacts]:
    return _divide(eqn, [SAME, *ins]) if eqn.params["y"] < 0 else applied(ins, eqn)


# Reductions and products.


@_rule("reduce_sum")
def _sum(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    x, axes = ins[0], eqn.params["axes"]
    is_plain = x.kind is RowKind.ROW and x.rows > 1 and x.row_dims and x.row_dims <= {*axes}
    terms = math.prod(shape_of(eqn.invars[0])[d] for d in axes) if is_plain else 0
    return summed(x, axes)._replace(terms=terms)


@_rule("reduce_and reduce_or")
def _any(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    return applied([summed(ins[0], eqn.params["axes"])], eqn)  # whether a count is 0, say


@_rule("reduce_max reduce_min reduce_prod reduce_xor argmax argmin")
def _reduce(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    return mixed(ins[0], eqn.params["axes"], eqn).at(without(eqn.params["axes"]))


@_rule("cumprod cummax cummin cumlogsumexp cumsum sort top_k fft cholesky eigh eig svd qr lu schur")
def _mix(eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
    ndim, params, name, x = len(shape_of(eqn.invars[0])), eqn.params, eqn.primitive.name, collected(ins)
    last = {"top_k": 1, "fft": len(params.get("fft_lengths", ()))}.get(name, 2)
    dims = [params[key] for key in ("axis", "dimension") if key in params] or range(ndim - last, ndim)
    if name == "sort" and len(ins) > 1 and not x.row_dims.isdisjoint(dims):
        return [lost(ins, x.row_dims)] * len(ins)  # rows that only change places: some undo it later
    y = mixed(x, dims, eqn)
    if name == "cumsum":  # sums, so of indices they may do no harm
        return [joined([x], RowKind.LINEAR, eqn, "rows") if x.kind is RowKind.ROW and y.coupled else x]
    return [y.at({d: d for d in range(len(shape_of(v)))}.get) for v in eqn.outvars]


@_rule("reduce_window_sum reduce_window_max reduce_window_min")
def _pool(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    dims = [d for d, size in enumerate(eqn.params["window_dimensions"]) if size > 1]
    is_sum = eqn.primitive.name == "reduce_window_sum" and ins[0].row_dims.isdisjoint(dims)
    return ins[0] if is_sum else mixed(ins[0], dims, eqn)


@_rule("dot_general")
def _dot(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    contracted, batched = eqn.params["dimension_numbers"]
    ndim, own = len(shape_of(eqn.outvars[0])), []
    free = iter(range(len(batched[0]), ndim))
    for x, v, sums, batches in zip(ins, eqn.invars, contracted, batched, strict=True):
        place = {d: ndim + i for i, d in enumerate(sums)} | {d: i for i, d in enumerate(batches)}
        place |= {d: next(free) for d in range(len(shape_of(v))) if d not in place}
        own.append(x.at(place.get))
    return summed(_product(eqn, own), range(ndim, ndim + len(contracted[0])))


@_rule("conv_general_dilated")
def _convolve(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    numbers, (x, kernel) = eqn.params["dimension_numbers"], ins
    is_over_batch = not kernel.kind and eqn.params["batch_group_count"] == 1 and x.row_dims <= {numbers.lhs_spec[0]}
    return x.at(lambda d: numbers.out_spec[0]) if is_over_batch else lost(ins)


@_rule(" ".join(KERNELS))
def _kernel(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts | Sequence[RowFacts]:
    places, total = row_places(eqn, [x.row_dims for x in ins]), collected(ins)
    if total.kind is not RowKind.ROW or places is None:
        return lost(ins)
    return [total._replace(row_dims=dims) for dims in places]


# Operations that move elements.


@_rule("broadcast_in_dim")
def _broadcast(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    old, new, dims = shape_of(eqn.invars[0]), eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return ins[0].at(lambda d: dims[d] if old[d] == new[dims[d]] else None)  # else: one row, repeated


@_rule("squeeze")
def _squeeze(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    return ins[0].at(without(eqn.params["dimensions"]))


@_rule("expand_dims")
def _expand(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    return ins[0].at([d for d in range(len(shape_of(eqn.outvars[0]))) if d not in eqn.params["dimensions"]].__getitem__)


@_rule("transpose")
def _transpose(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    return ins[0].at(tuple(eqn.params["permutation"]).index)


@_rule("reshape")
def _reshape(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    x, new, found = ins[0], eqn.params["new_sizes"], {d for d in ins[0].row_dims if d < 0}
    before, after = (list(accumulate(shape, operator.mul)) for shape in (shape_of(eqn.invars[0]), new))
    ends = {*before} & {*after}  # where a group of old dimensions has the size of one of new dimensions

    def group(end: int) -> int:
        return sum(other < end for other in ends)

    for number in {group(before[d]) for d in x.row_dims - found}:
        own = [d for d, end in enumerate(after) if group(end) == number and (new[d] > 1 or x.rows == 1)]
        inner, exact = math.prod(new[d] for d in own) // x.rows, [d for d in own if new[d] == x.rows]
        while not exact and len(own) > 1 and inner > 1 and inner % new[own[-1]] == 0:
            inner //= new[own.pop()]  # [16 * T] -> [16, T]: rows are outermost
        found |= {*(exact[: 1 if x.rows == 1 else None] or own)}
        x = lost([x]) if len(exact) > 1 and x.rows > 1 else x  # [8 * 8] -> [8, 8]
    return x._replace(row_dims=frozenset(found))


@_rule("slice split dynamic_slice pad unstack")
def _cut(eqn: JaxprEqn, ins: list[RowFacts]) -> list[RowFacts]:
    x = applied(ins, eqn) if any(y.kind for y in ins[1:]) else ins[0]  # where to cut, or what to pad with
    if eqn.primitive.name == "unstack":
        x = x.at(without([eqn.params["axis"]]))
    kept = [{d: d for d, size in enumerate(shape_of(v)) if size > 1 or x.rows == 1} for v in eqn.outvars]
    return [x.at(place.get) for place in kept]


@_rule("concatenate dynamic_update_slice stack")
def _collect(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    if eqn.primitive.name == "dynamic_update_slice" and any(x.kind for x in ins[2:]):
        return lost(ins, collected(ins[:2]).row_dims)
    if eqn.primitive.name == "stack":
        ins = [x.at(lambda d: d + (d >= eqn.params["axis"])) for x in ins]
    return collected(ins)


@_rule("gather")
def _gather(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    (x, indices), numbers, old = ins, eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    free = [d for d in range(len(shape_of(eqn.outvars[0]))) if d not in numbers.offset_dims]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = zip([d for d in range(len(old)) if d not in gone], sorted(numbers.offset_dims), strict=True)
    place = {d: to for d, to in windows if eqn.params["slice_sizes"][d] == old[d]}
    batches = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    kept, ids = x.at((place | {d: free[i] for d, i in batches}).get), indices.at(dict(enumerate(free)).get)
    if len(kept.row_dims) == len(x.row_dims):
        return applied([kept, ids], eqn) if ids.kind else kept
    # Rows are chosen by the indices, as in `x[permutation]` and `logits[jnp.arange(8), labels]`.
    if ids.kind:
        return ids if ids.kind is x.kind is RowKind.ROW else lost(ins)
    return kept._replace(row_dims=kept.row_dims | {*free})


@_rule("scatter scatter-add scatter_add scatter_mul scatter-mul scatter_min scatter_max scatter-min scatter-max")
def _scatter(eqn: JaxprEqn, ins: list[RowFacts]) -> RowFacts:
    (x, indices, updates), numbers = ins, eqn.params["dimension_numbers"]
    windows, adds = numbers.update_window_dims, eqn.primitive.name in ("scatter-add", "scatter_add")
    outer = [d for d in range(len(shape_of(eqn.invars[2]))) if d not in windows]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    at = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    place = dict(zip(windows, [d for d in range(len(shape_of(eqn.invars[0]))) if d not in gone], strict=True))
    ids, own = indices.at(at.get), updates.at((place | {outer[i]: d for i, d in at.items()}).get)
    total = collected([x, own])
    if len(ids.row_dims) == len(indices.row_dims) and len(own.row_dims) == len(updates.row_dims):
        return applied([x, own, ids], eqn) if ids.kind else total
    if adds and indices.kind is RowKind.ROW and not total.kind:  # a histogram counts rows
        return summed(indices, range(len(outer)))
    dims = total.row_dims | {*(() if adds and indices.kind else numbers.scatter_dims_to_operand_dims)}
    return lost(ins, dims) if indices.kind or total.kind > RowKind.ROW else total._replace(row_dims=dims)
