"""Computes one slice of a stack: finds that a program treats the slices of its inputs apart, and runs it on one.

    slice_program(jaxpr, dims, size) -> tuple[ClosedJaxpr, list[int | None]]

A dimension of each input numbers the slices (`None`: no slices), and so for each output. In the program of a single
slice they have size 1:

    x:[22, 2048, 5632] -> dot_general(x, x, batch 0) -> [22, 2048, 2048]    is    [1, 2048, 5632] -> [1, 2048, 2048]

A primitive that is not listed, or that mixes slices, raises `NotSlicedError`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.jaxpr.interpret import open_program, propagate
from jzero.core.jaxpr.primitives import RUNS, Trait, called_jaxpr, primitives_with
from jzero.core.jaxpr.sizes import FACTORIZATIONS

Dims: TypeAlias = Sequence[int | None]


class NotSlicedError(Exception):
    """A program mixes the slices of a stack."""


class _Sliced(NamedTuple):
    """A value and the dimension that numbers its slices; the value's size there is that of one slice."""

    x: jax.Array
    dim: int | None


def slice_program(jaxpr: AnyJaxpr, dims: Dims, size: int) -> tuple[ClosedJaxpr, list[int | None]]:
    """Returns the closed jaxpr of one slice, which takes the slice's number last, and the dimensions of its outputs.

    Args:
      jaxpr: An open or closed jaxpr.
      dims: For each input the dimension of the slices.
      size: The number of slices.
    """
    out_dims: list[int | None] = []

    def run(*inputs: jax.Array) -> list[jax.Array]:
        *values, number = inputs
        outs = _Slices(size, number).evaluate(jaxpr, list(map(_Sliced, values, dims)))
        out_dims.extend(out.dim for out in outs)
        return [out.x for out in outs]

    def one(v: Var, dim: int | None) -> jax.ShapeDtypeStruct:
        shape = tuple(compat.type_of(v).shape) if dim is None else _with(compat.type_of(v).shape, dim, 1)
        return jax.ShapeDtypeStruct(shape, compat.type_of(v).dtype)

    opened, _ = compat.open_jaxpr(jaxpr)
    shapes = list(map(one, opened.invars, dims))
    return jax.make_jaxpr(run)(*shapes, jax.ShapeDtypeStruct((), jnp.int32)), out_dims


def _with(values: Sequence[int], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


class _Slices:
    """Evaluates equations on one slice."""

    def __init__(self, size: int, number: jax.Array) -> None:
        self.size = size
        self.number = number

    def evaluate(self, jaxpr: AnyJaxpr, inputs: Sequence[_Sliced]) -> list[_Sliced]:
        """Returns the outputs of a jaxpr."""
        program, consts = open_program(jaxpr)
        values = [*(_Sliced(x, None) for x in consts), *inputs]
        return propagate(program, values, self._in_context, lambda literal: _Sliced(compat.value_of(literal), None))

    def _in_context(self, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
        with compat.equation_context(eqn):
            return self._equation(eqn, inputs)

    def _equation(self, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
        name = eqn.primitive.name
        if all(x.dim is None for x in inputs):
            return [_Sliced(x, None) for x in compat.bind(eqn, [x.x for x in inputs])]
        if name in RUNS:
            return self.evaluate(called_jaxpr(eqn), inputs)
        _require(name in _RULES, f"`{name}` has no rule")
        return _RULES[name](self, eqn, inputs)

    def bind(self, eqn: JaxprEqn, inputs: Sequence[_Sliced], dim: int, **params: object) -> list[_Sliced]:
        """Applies an equation's primitive; the slices of its results are on `dim`."""
        return [_Sliced(x, dim) for x in compat.bind(eqn, [x.x for x in inputs], **params)]

    def cut(self, value: _Sliced, dim: int | None, shape: Sequence[int]) -> _Sliced:
        """Returns the slice on `dim` of a value, given the shape of all slices; a value that is sliced so stays."""
        if value.dim == dim or dim is None:
            return value
        _require(value.dim is None and shape[dim] % self.size == 0, "slices are on different dimensions")
        few = shape[dim] // self.size
        return _Sliced(lax.dynamic_slice_in_dim(value.x, self.number * few, few, dim), dim)

    def cut_all(self, eqn: JaxprEqn, inputs: Sequence[_Sliced], dim: int) -> list[_Sliced]:
        """Returns the slices on `dim` of all operands."""
        return [self.cut(x, dim, _shape(eqn, k)) for k, x in enumerate(inputs)]

    def dims_of(self, jaxpr: AnyJaxpr, inputs: Sequence[_Sliced]) -> list[int | None]:
        """Returns the dimensions of the outputs of a jaxpr; its inputs may be abstract."""
        out_dims: list[int | None] = []

        def run(xs: Sequence[jax.Array]) -> list[jax.Array]:
            outs = self.evaluate(jaxpr, _like(inputs, xs))
            out_dims.extend(out.dim for out in outs)
            return [out.x for out in outs]

        jax.eval_shape(run, [jax.ShapeDtypeStruct(jnp.shape(x.x), jnp.result_type(x.x)) for x in inputs])
        return out_dims

    def run_with(self, jaxpr: AnyJaxpr, inputs: Sequence[_Sliced], dims: Dims) -> list[jax.Array]:
        """Returns the outputs of a jaxpr as arrays, sliced on `dims`."""
        outvars = compat.open_jaxpr(jaxpr)[0].outvars
        outs = zip(self.evaluate(jaxpr, inputs), dims, outvars, strict=True)
        return [self.cut(out, dim, compat.type_of(v).shape).x for out, dim, v in outs]


def _require(condition: object, why: str) -> None:
    if not condition:
        raise NotSlicedError(why)


def _like(inputs: Sequence[_Sliced], arrays: Sequence[jax.Array]) -> list[_Sliced]:
    return [_Sliced(y, x.dim) for x, y in zip(inputs, arrays, strict=True)]


def _dim_of(inputs: Sequence[_Sliced]) -> int:
    dims = {x.dim for x in inputs if x.dim is not None}
    _require(len(dims) == 1, "slices are on different dimensions")
    return dims.pop()


def _joined(dims: Dims, others: Dims) -> list[int | None]:
    pairs = list(zip(dims, others, strict=True))
    _require(all(a is None or b is None or a == b for a, b in pairs), "slices are on different dimensions")
    return [a if b is None else b for a, b in pairs]


def _shape(eqn: JaxprEqn, k: int = 0) -> tuple[int, ...]:
    return tuple(compat.type_of(eqn.invars[k]).shape)


def _elementwise(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    dim = _dim_of(inputs)
    # Operations under `vmap` may have operands of size 1 in the new dimension.
    same = [not jnp.ndim(x.x) or (x.dim is None and _shape(eqn, k)[dim] == 1) for k, x in enumerate(inputs)]
    cut = [x if s else walk.cut(x, dim, _shape(eqn, k)) for k, (x, s) in enumerate(zip(inputs, same, strict=True))]
    return cut if eqn.primitive.name in ("sharding_constraint", "reshard") else walk.bind(eqn, cut, dim)


def _broadcast_in_dim(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    dim = _dim_of(inputs)
    to = eqn.params["broadcast_dimensions"][dim]
    return walk.bind(eqn, inputs, to, shape=_with(eqn.params["shape"], to, inputs[0].x.shape[dim]))


def _reshape(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    dim, old, new = _dim_of(inputs), _shape(eqn), compat.type_of(eqn.outvars[0]).shape
    _require(eqn.params.get("dimensions") is None, "a reshape that transposes")
    for to in (d for d in range(len(new)) if math.prod(new[:d]) == math.prod(old[:dim])):
        # The slices are the slower part of the new dimension, so each stays one block of it.
        few, rest = divmod(new[to], walk.size)
        if rest == 0 and new[to] > 1 and few * math.prod(new[to + 1 :]) == math.prod(inputs[0].x.shape[dim:]):
            return walk.bind(eqn, inputs, to, new_sizes=_with(new, to, few))
    why = f"a reshape from {old} to {new} mixes slices"
    raise NotSlicedError(why)


def _transpose(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    return walk.bind(eqn, inputs, list(eqn.params["permutation"]).index(_dim_of(inputs)))


def _without(name: str) -> BatchRule:
    """Returns the rule of an operation that drops some other dimensions, such as a reduction."""

    def rule(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
        dim, gone = _dim_of(inputs), eqn.params[name]
        _require(dim not in gone, f"`{eqn.primitive.name}` over slices")
        return walk.bind(eqn, inputs, dim - sum(d < dim for d in gone))

    return rule


def _expand_dims(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    dim = _dim_of(inputs)
    for d in sorted(eqn.params["dimensions"]):
        dim += d <= dim
    return walk.bind(eqn, inputs, dim)


def _along(name: str) -> BatchRule:
    """Returns the rule of an operation along other dimensions, such as a sort, a cumulative sum, a concatenation."""

    def rule(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
        dim, axis = _dim_of(inputs), eqn.params[name]
        _require(dim not in (axis if isinstance(axis, tuple) else (axis,)), f"`{eqn.primitive.name}` along slices")
        return walk.bind(eqn, walk.cut_all(eqn, inputs, dim), dim)

    return rule


def _slice(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    dim, p = _dim_of(inputs), eqn.params
    stride = 1 if p["strides"] is None else p["strides"][dim]
    taken = (p["start_indices"][dim], p["limit_indices"][dim], stride)
    _require(taken == (0, _shape(eqn)[dim], 1), "some of the slices")
    return walk.bind(eqn, inputs, dim, limit_indices=_with(p["limit_indices"], dim, inputs[0].x.shape[dim]))


def _pad(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    dim = inputs[0].dim
    _require(dim is not None and inputs[1].dim is None, "padding with slices")
    assert dim is not None
    _require(tuple(eqn.params["padding_config"][dim]) == (0, 0, 0), "padding along slices")
    return walk.bind(eqn, inputs, dim)


def _factorization(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    dim = _dim_of(inputs)
    _require(dim < len(_shape(eqn)) - 2, "a factorization of slices")
    return walk.bind(eqn, walk.cut_all(eqn, inputs, dim), dim)


def _dot_general(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    contracted, batched = eqn.params["dimension_numbers"]
    k = 0 if inputs[0].dim is not None else 1
    dim, other = _dim_of(inputs[k : k + 1]), 1 - k
    _require(dim not in contracted[k], "a product over slices")
    if dim in batched[k]:
        place = list(batched[k]).index(dim)
        both = list(inputs)
        both[other] = walk.cut(inputs[other], batched[other][place], _shape(eqn, other))
        return walk.bind(eqn, both, place)
    _require(inputs[other].dim is None, "a product of slices with slices")
    free = [[d for d in range(len(_shape(eqn, s))) if d not in (*contracted[s], *batched[s])] for s in (0, 1)]
    return walk.bind(eqn, inputs, len(batched[0]) + k * len(free[0]) + free[k].index(dim))


def _cond(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    index, *operands = inputs
    _require(index.dim is None, "a condition on slices")
    branches = eqn.params["branches"]
    dims = functools.reduce(_joined, [walk.dims_of(branch, operands) for branch in branches])

    def function(branch: AnyJaxpr) -> Callable[..., list[jax.Array]]:
        return lambda *xs: walk.run_with(branch, _like(operands, xs), dims)

    outs = lax.switch(index.x, list(map(function, branches)), *(x.x for x in operands))
    return list(map(_Sliced, outs, dims))


def _scan(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    num_consts, num_carry = compat.scan_groups(eqn)
    consts, carry, xs = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )
    if any(x.dim == 0 for x in xs):  # a loop over the slices themselves, such as `lax.map`
        _require(not num_carry and all(x.dim is None for x in consts), "a loop from slice to slice")
        cut = [walk.cut(x, 0, _shape(eqn, num_consts + k)) for k, x in enumerate(xs)]
        return walk.bind(eqn, [*consts, *cut], 0, length=eqn.params["length"] // walk.size)
    firsts = [
        _Sliced(cast("jax.Array", jax.ShapeDtypeStruct(x.x.shape[1:], x.x.dtype)), None if x.dim is None else x.dim - 1)
        for x in xs
    ]
    body = eqn.params["jaxpr"]
    before: list[int | None] = []
    dims: list[int | None] = [x.dim for x in carry]
    while dims != before:  # what becomes sliced in one pass is so in the next one
        before = dims
        shapes = [_shape(eqn, num_consts + k) for k in range(num_carry)]
        carry = [walk.cut(x, d, shape) for x, d, shape in zip(carry, dims, shapes, strict=True)]
        after = walk.dims_of(body, [*consts, *carry, *firsts])
        dims = _joined(dims, after[:num_carry])
    y_dims = after[num_carry:]

    def step(carried: list[jax.Array], here: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = walk.run_with(body, [*consts, *_like(carry, carried), *_like(firsts, here)], [*dims, *y_dims])
        return outs[:num_carry], outs[num_carry:]

    options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
    last, ys = lax.scan(step, [x.x for x in carry], [x.x for x in xs], **options)
    return [
        *map(_Sliced, last, dims),
        *(_Sliced(y, None if d is None else d + 1) for y, d in zip(ys, y_dims, strict=True)),
    ]


def _barrier(walk: _Slices, eqn: JaxprEqn, inputs: list[_Sliced]) -> list[_Sliced]:
    return _like(inputs, compat.bind(eqn, [x.x for x in inputs]))


BatchRule: TypeAlias = Callable[[_Slices, JaxprEqn, list[_Sliced]], list[_Sliced]]

_RULES: dict[str, BatchRule] = {
    **dict.fromkeys(primitives_with(Trait.ELEMENTWISE), _elementwise),
    **dict.fromkeys(primitives_with(Trait.REDUCTION) - {"reduce"}, _without("axes")),
    "squeeze": _without("dimensions"),
    **dict.fromkeys("cummax cummin cumprod cumsum split".split(), _along("axis")),
    **dict.fromkeys("concatenate sort".split(), _along("dimension")),
    "rev": _along("dimensions"),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "expand_dims": _expand_dims,
    "slice": _slice,
    "pad": _pad,
    "dot_general": _dot_general,
    **dict.fromkeys(FACTORIZATIONS - {"tridiagonal_solve"}, _factorization),
    "cond": _cond,
    "scan": _scan,
    "optimization_barrier": _barrier,
}  # fmt: skip
