"""What an equation of a traced program takes: bytes of its arrays, operations of its product."""

from __future__ import annotations

import math
from typing import Any

import jax

from jzero.plan.leaves import itemsize

__all__ = ["bytes_of", "product_flops"]


def bytes_of(aval: Any) -> int:
    """Returns the bytes on the device of an array of this type; 0 of one on the host, or of what is no array."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return 0
    return math.prod(aval.shape) * itemsize(aval.dtype)


def product_flops(eqn: Any) -> float:
    """Operations of a product; 0 for anything else."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / features
    return 0.0
