"""How the result of each primitive depends on rows, given its operands: `rule(eqn, values) -> value`, or a list.

A rule runs only if some operand depends on rows. The result of an operation without a rule is `Kind.UNKNOWN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jzero import _compat
from jzero._compat import Atom
from jzero.jaxpr.primitives import Trait, primitives_with
from jzero.jaxpr.row_layouts import Layout, merged, moved, num_rows
from jzero.jaxpr.row_values import (
    SAME,
    Cause,
    Kind,
    Number,
    Scale,
    Value,
    added,
    applied,
    collected,
    scaled,
)

Rule: TypeAlias = Callable[[JaxprEqn, list[Value]], Value | list[Value]]

RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for primitives."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def _apply(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return applied(ins, eqn)


RULES.update(dict.fromkeys(primitives_with(Trait.ELEMENTWISE) | primitives_with(Trait.RANDOM), _apply))


@rule("copy copy_p reduce_precision sharding_constraint neg real imag conj device_put name pcast pvary reshard")
def _keep(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return ins[0]


@rule("convert_element_type")
def _convert(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return applied(ins, eqn) if eqn.params["new_dtype"] == jnp.bool_ else ins[0]  # integers are counts


@rule("optimization_barrier")
def _keep_all(eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    return ins


@rule("stop_gradient")
def _stop(eqn: JaxprEqn, ins: list[Value]) -> Value:
    # The largest element, subtracted before `exp`, cancels.
    cause = ins[0].cause
    is_shift = ins[0].kind is Kind.COUPLED and cause and cause.eqn.primitive.name in ("reduce_max", "reduce_min")
    return SAME if is_shift else ins[0]


@rule("is_finite")
def _assume_finite(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return SAME


@rule("ne")
def _differ(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return SAME if eqn.invars[0] is eqn.invars[1] else applied(ins, eqn)  # x != x is isnan(x)


@rule("add sub add_any complex")
def _add(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return added(ins, eqn)


@rule("mul")
def _multiply(eqn: JaxprEqn, ins: list[Value]) -> Value:
    for x, y, atom in ((ins[0], ins[1], eqn.invars[1]), (ins[1], ins[0], eqn.invars[0])):
        if not y.kind:
            return scaled(x, number_of(y, atom))
    return applied(ins, eqn)


@rule("div")
def _divide(eqn: JaxprEqn, ins: list[Value]) -> Value:
    x, y = ins
    is_sum = y.kind is Kind.LINEAR or (y.cause is not None and y.cause.how == "sum")  # maximum(mask.sum(), 1), say
    if x.kind is Kind.LINEAR and is_sum:
        return Value(Kind.COUPLED, merged((x.layout, y.layout)), cause=Cause(eqn, "ratio"))
    if y.kind:
        return applied(ins, eqn, how="ratio" if x.kind else "sum")
    number = number_of(y, eqn.invars[1])
    return scaled(x, 1 / number if isinstance(number, float) and number else number)


@rule("select_n")
def _select(eqn: JaxprEqn, ins: list[Value]) -> Value:
    predicate, *cases = ins
    if predicate.kind:
        return applied(ins, eqn)
    layout = merged(x.layout for x in cases if x.kind)
    return collected(cases, eqn, layout, keeps_order=True)


def number_of(x: Value, atom: Atom) -> Number:
    """Returns the number that all elements of a value without rows equal; "unknown" if they equal an unknown one."""
    return "unknown" if x.number is None and not _compat.type_of(atom).ndim else x.number


# Reductions.


@rule("reduce_sum")
def _sum(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return _summed(ins[0], eqn.params["axes"], _compat.type_of(eqn.invars[0]).shape)


def _summed(x: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
    layout, rows = _without(x.layout, axes), num_rows(x.layout, axes)
    others = math.prod(int(shape[d]) for d in axes) // max(rows, 1)
    if not any(dim in axes for dim, _ in x.layout):
        scale = x.scale._replace(reduced=others)
        return Value(x.kind, layout, x.origin, scale, None, x.cause)
    if x.kind > Kind.LINEAR:
        return x.at(layout)
    scale = x.scale if x.scale.is_mean else Scale(x.scale.rows * rows, x.scale.divisor)
    return Value(Kind.LINEAR, layout, scale=scale.checked(), cause=x.cause if layout else None)


def _without(layout: Layout, axes: Sequence[int]) -> Layout:
    return moved(layout, lambda d: None if d in axes else d - sum(a < d for a in axes))


@rule("reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin")
def _reduce(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return _mixed(ins[0], eqn.params["axes"], eqn, _without(ins[0].layout, eqn.params["axes"]))


def _mixed(x: Value, dims: Sequence[int], eqn: JaxprEqn, layout: Layout) -> Value:
    """Returns the value of a function of all elements along some dimensions."""
    if x.kind is Kind.ROW and any(dim in dims for dim, _ in x.layout):
        return Value(Kind.COUPLED, layout, cause=Cause(eqn, "rows"))
    return applied([x], eqn).at(layout)


@rule("cumsum cumprod cummax cummin cumlogsumexp")
def _cumulate(eqn: JaxprEqn, ins: list[Value]) -> Value:
    x, axis = ins[0], eqn.params["axis"]
    if eqn.primitive.name != "cumsum":
        return _mixed(x, (axis,), eqn, x.layout)
    if x.kind is not Kind.ROW or all(dim != axis for dim, _ in x.layout):
        return x
    return Value(Kind.LINEAR, x.layout, scale=Scale(is_mean=True), cause=Cause(eqn, "rows"))


@rule("sort")
def _sort(eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    dim, layout = eqn.params["dimension"], merged(x.layout for x in ins)
    if all(d != dim for d, _ in layout):
        return [applied(ins, eqn)] * len(ins)
    if len(ins) == 1:
        return [_mixed(ins[0], (dim,), eqn, layout)]
    # Rows that only change places: some undo it later.
    worst = max(ins, key=lambda x: x.kind)
    return [worst if worst.kind is Kind.COUPLED else Value(Kind.UNKNOWN, layout)] * len(ins)


@rule("top_k")
def _top_k(eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    dim = eqn.params.get("axis", _compat.type_of(eqn.invars[0]).ndim - 1)
    return [_mixed(ins[0], (dim,), eqn, ins[0].layout)] * 2


@rule("reduce_window_sum reduce_window_max reduce_window_min")
def _pool(eqn: JaxprEqn, ins: list[Value]) -> Value:
    dims = [d for d, size in enumerate(eqn.params["window_dimensions"]) if size > 1]
    if eqn.primitive.name != "reduce_window_sum" or any(d in dims for d, _ in ins[0].layout):
        return _mixed(ins[0], dims, eqn, ins[0].layout)
    return ins[0]


@rule("cholesky eigh eig svd qr lu schur geqrf householder_product triangular_solve tridiagonal_solve fft")
def _factorize(eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    last = len(eqn.params["fft_lengths"]) if eqn.primitive.name == "fft" else 2
    dims = [range(_compat.type_of(v).ndim - last, _compat.type_of(v).ndim) for v in eqn.invars]
    if any(dim in own for x, own in zip(ins, dims, strict=True) for dim, _ in x.layout):
        return [lost(ins)] * len(eqn.outvars)
    value = applied(ins, eqn)
    return [value.at(tuple(x for x in value.layout if x[0] < _compat.type_of(v).ndim)) for v in eqn.outvars]


# Products.


@rule("dot_general")
def _dot(eqn: JaxprEqn, ins: list[Value]) -> Value:
    (contracted, batched) = eqn.params["dimension_numbers"]
    names: list[dict[int, int]] = []  # of each operand's dimensions: those of the result; negative ones are summed
    num_free = len(batched[0])
    for atom, sums, batches in zip(eqn.invars, contracted, batched, strict=True):
        name = {d: -1 - i for i, d in enumerate(sums)} | {d: i for i, d in enumerate(batches)}
        for d in range(_compat.type_of(atom).ndim):
            if d not in name:
                name[d], num_free = num_free, num_free + 1
        names.append(name)
    x, y = (v.at(moved(v.layout, name.__getitem__)) for v, name in zip(ins, names, strict=True))
    shape = [_compat.type_of(eqn.invars[0]).shape[d] for d in contracted[0]]
    if not x.kind or not y.kind:
        product, other, atom = (y, x, eqn.invars[0]) if y.kind else (x, y, eqn.invars[1])
        if any(dim < 0 for dim, _ in product.layout):  # e.g. jnp.ones(8) @ losses
            product = scaled(product, number_of(other, atom) or "unknown")
    else:
        product = applied([x, y], eqn)
    return _contracted(product, shape)


def _contracted(x: Value, sizes: Sequence[int]) -> Value:
    """Sums over the negative dimensions."""
    count = len(sizes)
    shifted = x.at(moved(x.layout, lambda d: -1 - d if d < 0 else d + count))
    return _summed(shifted, range(count), sizes) if count else shifted


@rule("conv_general_dilated")
def _convolve(eqn: JaxprEqn, ins: list[Value]) -> Value:
    spec, (x, kernel) = eqn.params["dimension_numbers"], ins
    batch_dim, out_dim = spec.lhs_spec[0], spec.out_spec[0]
    if kernel.kind or eqn.params["batch_group_count"] != 1:
        return lost(ins)
    layout = moved(x.layout, lambda d: out_dim if d == batch_dim else None)
    if any(dim != batch_dim for dim, _ in x.layout):
        return _mixed(x, range(_compat.type_of(eqn.invars[0]).ndim), eqn, layout)
    return x.at(layout)


def lost(ins: Sequence[Value]) -> Value:
    """Returns the value of an operation without a rule."""
    worst = max(ins, key=lambda x: x.kind)
    return Value(Kind.COUPLED, cause=worst.cause) if worst.kind is Kind.COUPLED else Value(Kind.UNKNOWN)
