"""The rules of `row_rules` for operations that move elements: reshapes, slices, gathers, scatters; passes of loops.

If a result's positions no longer say which rows they hold, it keeps the dimensions of rows, with an origin of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

from jax.extend.core import JaxprEqn

from jzero import _compat
from jzero.jaxpr.row_layouts import Factors, Layout, merged, moved, num_rows, reshaped, scattered, sliced
from jzero.jaxpr.row_rules import lost, rule
from jzero.jaxpr.row_values import SAME, Kind, Origin, Scale, Value, applied, collected, unknown_origin


def _shuffled(x: Value, layout: Layout, eqn: JaxprEqn, shape: Sequence[int], number: int = 0) -> Value:
    """Returns the value with rows in some order along the dimensions of a layout."""
    return x.at(scattered(layout, shape), unknown_origin(eqn, number))


@rule("broadcast_in_dim")
def _broadcast(eqn: JaxprEqn, ins: list[Value]) -> Value:
    old, new, dims = _compat.type_of(eqn.invars[0]).shape, eqn.params["shape"], eqn.params["broadcast_dimensions"]
    layout = moved(ins[0].layout, lambda d: dims[d] if old[d] == new[dims[d]] else None)  # else: one row, repeated
    return ins[0].at(layout)._replace(number=ins[0].number)


@rule("reshape")
def _reshape(eqn: JaxprEqn, ins: list[Value]) -> Value:
    old, new = _compat.type_of(eqn.invars[0]).shape, eqn.params["new_sizes"]
    layout = reshaped(ins[0].layout, old, new)
    if layout is None:
        return _shuffled(ins[0], tuple((d, ()) for d, size in enumerate(new) if size != 1), eqn, new)
    return ins[0].at(layout)


@rule("squeeze")
def _squeeze(eqn: JaxprEqn, ins: list[Value]) -> Value:
    dims = eqn.params["dimensions"]
    return ins[0].at(moved(ins[0].layout, lambda d: None if d in dims else d - sum(a < d for a in dims)))


@rule("expand_dims")
def _expand(eqn: JaxprEqn, ins: list[Value]) -> Value:
    dims = set(eqn.params["dimensions"])
    old_dims = [d for d in range(_compat.type_of(eqn.outvars[0]).ndim) if d not in dims]
    return ins[0].at(moved(ins[0].layout, old_dims.__getitem__))


@rule("transpose")
def _transpose(eqn: JaxprEqn, ins: list[Value]) -> Value:
    return ins[0].at(moved(ins[0].layout, tuple(eqn.params["permutation"]).index))


@rule("slice")
def _slice(eqn: JaxprEqn, ins: list[Value]) -> Value:
    params, shape = eqn.params, _compat.type_of(eqn.outvars[0]).shape
    strides = params["strides"] or (1,) * len(shape)
    ranges = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    return _cut(ins[0], dict(enumerate(ranges)), eqn, shape)


def _cut(x: Value, ranges: dict[int, tuple[int, ...]], eqn: JaxprEqn, shape: Sequence[int], number: int = 0) -> Value:
    """Returns the value of a slice."""
    layout, first = [], x.origin.first
    for dim, factors in x.layout:
        cut = sliced(factors, *map(int, ranges[dim])) if dim in ranges else (factors, 0)
        if cut is None:
            return _shuffled(x, x.layout, eqn, shape, number)
        layout.append((dim, cut[0]))
        first += cut[1]
    return x.at(tuple(layout), x.origin._replace(first=first))


@rule("split")
def _split(eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    axis, sizes = eqn.params["axis"], [int(size) for size in eqn.params["sizes"]]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        _cut(ins[0], {axis: (end - size, end)}, eqn, _compat.type_of(v).shape, i)
        for i, (end, size, v) in enumerate(zip(ends, sizes, eqn.outvars, strict=True))
    ]


@rule("unstack")
def _unstack(eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
    axis, shape = eqn.params["axis"], list(_compat.type_of(eqn.invars[0]).shape)
    parts = [
        _cut(ins[0], {axis: (i, i + 1)}, eqn, [*shape[:axis], 1, *shape[axis + 1 :]], i) for i in range(shape[axis])
    ]
    return [x.at(moved(x.layout, lambda d: None if d == axis else d - (d > axis))) for x in parts]


@rule("rev")
def _reverse(eqn: JaxprEqn, ins: list[Value]) -> Value:
    turned = any(dim in eqn.params["dimensions"] for dim, _ in ins[0].layout)
    return _shuffled(ins[0], ins[0].layout, eqn, _compat.type_of(eqn.outvars[0]).shape) if turned else ins[0]


@rule("pad")
def _pad(eqn: JaxprEqn, ins: list[Value]) -> Value:
    x, filling = ins
    padded = any(tuple(eqn.params["padding_config"][dim]) != (0, 0, 0) for dim, _ in x.layout)
    if filling.kind:
        return lost(ins)
    return _shuffled(x, x.layout, eqn, _compat.type_of(eqn.outvars[0]).shape) if padded else x


@rule("tile")
def _tile(eqn: JaxprEqn, ins: list[Value]) -> Value:
    reps = eqn.params["reps"]
    return ins[0].at(tuple((d, ((int(reps[d]), 0), *f) if reps[d] > 1 else f) for d, f in ins[0].layout))


@rule("concatenate")
def _concatenate(eqn: JaxprEqn, ins: list[Value]) -> Value:
    dim, shape, moving = eqn.params["dimension"], _compat.type_of(eqn.outvars[0]).shape, [x for x in ins if x.kind]
    if len(ins) == 1:
        return ins[0]
    layout = merged(x.layout for x in moving)
    if all(d != dim for d, _ in layout):
        return _listed(ins, eqn, layout, dim)
    if len(moving) == len(ins) and all(x.layout == layout and x.origin == ins[0].origin for x in ins):
        copies = ((d, ((len(ins), 0), *f) if d == dim else f) for d, f in layout)
        return collected(ins, eqn, tuple(copies), keeps_order=True)
    return collected(ins, eqn, scattered(layout, shape, (dim,)), keeps_order=False)


@rule("stack")
def _stack(eqn: JaxprEqn, ins: list[Value]) -> Value:
    axis = eqn.params["axis"]
    lifted = [x.at(moved(x.layout, lambda d: d + (d >= axis))) for x in ins]
    return _listed(lifted, eqn, merged(x.layout for x in lifted), axis)


def _listed(values: list[Value], eqn: JaxprEqn, layout: Layout, dim: int) -> Value:
    """Returns the value of arrays joined along a dimension without rows, which gets rows in `[x[0], x[1]]`."""
    value = collected(values, eqn, layout, keeps_order=True)
    is_list = value.kind is Kind.ROW and not value.origin.is_exact and all(x.origin.is_exact for x in values if x.kind)
    return value.at(scattered(layout, _compat.type_of(eqn.outvars[0]).shape, (dim,))) if is_list else value


@rule("dynamic_slice")
def _dynamic_slice(eqn: JaxprEqn, ins: list[Value]) -> Value:
    (x, *starts), old, new = ins, _compat.type_of(eqn.invars[0]).shape, _compat.type_of(eqn.outvars[0]).shape
    if x.kind and any(old[dim] != new[dim] for dim, _ in x.layout):
        x = _shuffled(x, x.layout, eqn, new)
    return applied([x, *starts], eqn) if any(s.kind for s in starts) else x


@rule("dynamic_update_slice")
def _dynamic_update(eqn: JaxprEqn, ins: list[Value]) -> Value:
    x, update, *starts = ins
    old, new = _compat.type_of(eqn.invars[0]).shape, _compat.type_of(eqn.invars[1]).shape
    layout = merged((x.layout, update.layout))
    keeps_order = all(old[dim] == new[dim] for dim, _ in layout)
    value = collected([x, update], eqn, layout if keeps_order else scattered(layout, old), keeps_order=keeps_order)
    if not any(s.kind for s in starts):
        return value
    return applied([value, *starts], eqn) if value.kind in (Kind.SAME, Kind.COUPLED) else Value(Kind.UNKNOWN, layout)


@rule("gather")
def _gather(eqn: JaxprEqn, ins: list[Value]) -> Value:
    (x, indices), numbers, shape = ins, eqn.params["dimension_numbers"], _compat.type_of(eqn.outvars[0]).shape
    sizes, taken = _compat.type_of(eqn.invars[0]).shape, {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    free = [d for d in range(len(shape)) if d not in numbers.offset_dims]  # of the result, as in the indices
    windows = dict(zip([d for d in range(len(sizes)) if d not in taken], sorted(numbers.offset_dims), strict=True))
    windows |= {
        d: free[i] for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    }
    ids = indices.at(moved(indices.layout, lambda d: free[d] if d < len(free) else None))
    cut = {d for d, size in enumerate(eqn.params["slice_sizes"]) if size != sizes[d]} | {*numbers.collapsed_slice_dims}
    cut -= {*numbers.operand_batching_dims}
    windowed = x.at(moved(x.layout, lambda d: None if d in cut else windows[d]))
    if all(dim not in cut for dim, _ in x.layout):
        return applied([windowed, ids], eqn) if ids.kind else windowed
    # Rows are chosen by the indices, as in `x[permutation]` and `logits[jnp.arange(8), labels]`.
    if ids.kind is Kind.ROW and x.kind is Kind.ROW:
        return ids
    if ids.kind:
        return lost([x, ids])
    return _shuffled(x, tuple((d, ()) for d in {*free, *(d for d, _ in windowed.layout)}), eqn, shape)


@rule("scatter scatter-add scatter_add scatter_mul scatter-mul scatter_min scatter_max scatter-min scatter-max")
def _scatter(eqn: JaxprEqn, ins: list[Value]) -> Value:
    (x, indices, updates), numbers = ins, eqn.params["dimension_numbers"]
    sizes, windows = _compat.type_of(eqn.invars[0]).shape, numbers.update_window_dims
    outer = [
        d for d in range(_compat.type_of(eqn.invars[2]).ndim) if d not in windows
    ]  # of the updates, as in the indices
    taken = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    place = dict(zip(windows, [d for d in range(len(sizes)) if d not in taken], strict=True))
    at = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    place |= {outer[i]: d for i, d in at.items()}
    own = updates.at(moved(updates.layout, place.get))
    ids = indices.at(moved(indices.layout, at.get))
    adds = eqn.primitive.name in ("scatter-add", "scatter_add")
    spread = any(d not in place for d, _ in updates.layout) or any(d not in at for d, _ in indices.layout)
    if not spread:
        layout = merged(v.layout for v in (x, own, ids))
        return applied([x, own, ids], eqn) if ids.kind else collected([x, own], eqn, layout, keeps_order=True)
    if adds and not updates.kind and not x.kind and indices.kind is Kind.ROW:  # a histogram counts rows
        return Value(Kind.LINEAR, scale=Scale(num_rows(indices.layout, range(len(outer)))))
    if lost([x, own, ids]).kind is Kind.COUPLED:
        return lost([x, own, ids])
    dims = () if adds and indices.kind else numbers.scatter_dims_to_operand_dims
    layout = scattered(merged((x.layout, own.layout)), sizes, dims)
    if indices.kind or max(x.kind, updates.kind) > Kind.ROW:
        return Value(Kind.UNKNOWN, layout)
    return Value(Kind.ROW, layout, unknown_origin(eqn))


# Loops.


def element(x: Value, eqn: JaxprEqn) -> Value:
    """Returns the value of a scanned input in one pass."""
    factors = dict(x.layout).get(0)
    layout = moved(x.layout, lambda d: d - 1 if d else None)
    if factors is None or x.kind is not Kind.ROW:
        return x.at(layout) if x.kind else x
    return x.at(layout, Origin(("pass", id(eqn), factors, x.origin.token), x.origin.first, x.origin.is_exact))


def _is_of_pass(token: Hashable, eqn: JaxprEqn) -> bool:
    return isinstance(token, tuple) and token[:2] == ("pass", id(eqn))


def of_last_pass(x: Value, eqn: JaxprEqn) -> Value:
    """Returns the value of a carry that one pass of a loop passes on to the next."""
    if not x.kind:
        return SAME if x.number is None else Value(Kind.SAME, number="unknown")
    x = x.with_scale(x.scale._replace(reduced=0))
    return x.at(x.layout, Origin(("last", id(eqn)))) if _is_of_pass(x.origin.token, eqn) else x


def stacked(x: Value, eqn: JaxprEqn, shape: Sequence[int]) -> Value:
    """Returns the value of a scan's stacked result."""
    layout = moved(x.layout, lambda d: d + 1)
    if x.kind is not Kind.ROW:
        return x.at(layout) if x.kind else x
    if _is_of_pass(x.origin.token, eqn):
        _, _, factors, token = cast("tuple[str, int, Factors, Hashable]", x.origin.token)
        return x.at(((0, factors), *layout), x.origin._replace(token=token))
    if x.origin.token == ("last", id(eqn)):
        return x.at(scattered(layout, shape, (0,)), unknown_origin(eqn))
    return x.at(layout)
