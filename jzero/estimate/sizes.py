"""Facts about an equation of a traced program: the bytes of its arrays, the operations and operands of its product."""

from __future__ import annotations

import math

import jax
from jax.extend.core import JaxprEqn

from jzero.core.base.compat import type_of
from jzero.core.jaxpr.sizes import array_bytes


def bytes_of(aval: jax.core.AbstractValue) -> int:
    """Returns the bytes on the device of an array of this type; 0 if it is on the host, or not an array."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return 0
    return array_bytes(math.prod(aval.shape), aval.dtype)


def size_of(aval: jax.core.AbstractValue) -> int:
    """Returns the number of elements of an array of this type; 0 if it is none."""
    return math.prod(getattr(aval, "shape", (0,)))


def product_flops(eqn: JaxprEqn) -> float:
    """Returns the operations of a product; 0 for any other equation."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(type_of(eqn.invars[0]).shape[d] for d in contracted)
        return 2.0 * math.prod(type_of(eqn.outvars[0]).shape) * depth
    if eqn.primitive.name == "ragged_dot_general":  # each row of `x` meets the matrix of one group
        x, y = (type_of(v).shape for v in eqn.invars[:2])
        dims = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = dims.dot_dimension_numbers
        others = {*contracted, *batch, *dims.rhs_group_dimensions}
        return 2.0 * math.prod(x) * math.prod(n for d, n in enumerate(y) if d not in others)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = type_of(eqn.invars[1]).shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(type_of(eqn.outvars[0]).shape) * math.prod(kernel) / features
    return 0.0


def dims_are_adjacent(eqn: JaxprEqn) -> list[bool]:
    """Returns for each operand of a matrix product whether it can be read in the order of its dimensions.

    A product reads an operand as batch, rows and columns. If one of these is made of dimensions that are no neighbours,
    such as the queries of grouped heads, compilers need a copy in another layout. Empty for any other equation.
    """
    if eqn.primitive.name != "dot_general":
        return []
    contracted, batch = eqn.params["dimension_numbers"]
    return [_are_adjacent(type_of(v).shape, x, y) for v, x, y in zip(eqn.invars, contracted, batch, strict=True)]


def _are_adjacent(shape: tuple[int, ...], *groups: tuple[int, ...]) -> bool:
    place = {d: i for i, d in enumerate(d for d, size in enumerate(shape) if size > 1)}
    grouped = {d for group in groups for d in group}
    merged = [sorted(place[d] for d in group if d in place) for group in (*groups, set(range(len(shape))) - grouped)]
    return all(x == list(range(x[0], x[-1] + 1)) for x in merged if x)
