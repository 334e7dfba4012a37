"""Sizes of an equation in a traced program: the bytes of its arrays, the operations of its product."""

from __future__ import annotations

import math
from typing import Any

import jax

from jzero.plan.leaves import itemsize

__all__ = ["bytes_of", "product_flops", "size_of"]


def bytes_of(aval: Any) -> int:
    """Returns the bytes on the device of an array of this type; 0 if it is on the host, or not an array."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return 0
    return math.prod(aval.shape) * itemsize(aval.dtype)


def size_of(aval: Any) -> int:
    """Returns the number of elements of an array of this type; 0 if it is none."""
    return math.prod(getattr(aval, "shape", (0,)))


def product_flops(eqn: Any) -> float:
    """Returns the operations of a product; 0 for any other equation."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / features
    return 0.0
