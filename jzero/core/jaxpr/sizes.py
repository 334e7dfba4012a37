"""Bytes of arrays by size and dtype, and what equations take; compilers keep numbers of 4 bits in pairs.

An equation does matrix work if its operands must be whole: `dot_general`, `qr`, a `scan` over such, but not a norm.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.base.types import DType
from jzero.core.jaxpr.equations import equations_in, equations_of
from jzero.core.jaxpr.primitives import CHEAP, Trait, primitives_with


def array_bytes(size: int, dtype: DType) -> int:
    """Returns the bytes of `size` elements of a dtype, extended dtypes (PRNG keys) included."""
    return -(-size * _bits(dtype) // 8)


def itemsize(dtype: DType) -> int:
    """Bytes of one element by itself, extended dtypes (PRNG keys) included."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(key.shape) * int(key.dtype.itemsize)
    return int(dtype.itemsize)


@functools.cache  # asked for every variable of a program
def _bits(dtype: DType) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return 8 * itemsize(dtype)
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    return int(jnp.finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.floating) else 8 * int(dtype.itemsize)


FACTORIZATIONS = frozenset(
    "cholesky eigh eig qr geqrf householder_product lu svd schur triangular_solve tridiagonal_solve".split()
)


def mixes(eqn: JaxprEqn) -> bool:
    """Whether an equation needs whole operands."""
    if eqn.primitive.name in CHEAP:  # asked of each equation of an update
        return False
    # An inner product communicates one scalar, and empty operands nothing.
    return any(
        x.primitive.name in primitives_with(Trait.MIXING)
        and compat.type_of(x.outvars[0]).shape != ()
        and all(math.prod(compat.type_of(v).shape) for v in x.invars)
        for x in equations_in(eqn)
    )


def factorizes(jaxpr: AnyJaxpr, *, stacks: bool = False) -> bool:
    """Whether a program has factorizations; with `stacks`, whether one takes several matrices at once."""
    eqns = [eqn for eqn in equations_of(jaxpr) if eqn.primitive.name in FACTORIZATIONS]
    return any(not stacks or any(math.prod(compat.type_of(v).shape[:-2]) > 1 for v in x.invars) for x in eqns)


def product_flops(eqn: JaxprEqn) -> float:
    """Returns the operations of a product; 0 for any other equation."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(compat.type_of(eqn.invars[0]).shape[d] for d in contracted)
        return 2.0 * math.prod(compat.type_of(eqn.outvars[0]).shape) * depth
    if eqn.primitive.name == "ragged_dot_general":  # each row of `x` meets the matrix of one group
        x, y = (compat.type_of(v).shape for v in eqn.invars[:2])
        dims = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = dims.dot_dimension_numbers
        others = {*contracted, *batch, *dims.rhs_group_dimensions}
        return 2.0 * math.prod(x) * math.prod(n for d, n in enumerate(y) if d not in others)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = compat.type_of(eqn.invars[1]).shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(compat.type_of(eqn.outvars[0]).shape) * math.prod(kernel) / features
    return 0.0


def cost_of(jaxpr: AnyJaxpr) -> float:
    """Returns the floating-point operations of a program, roughly: exact for products, 10 n³ for factorizations."""
    return sum(map(_cost, compat.open_jaxpr(jaxpr)[0].eqns))


def _cost(eqn: JaxprEqn) -> float:
    name = eqn.primitive.name
    if flops := product_flops(eqn):
        return flops
    if inner := [cost_of(x) for x in compat.contained_jaxprs(eqn)]:
        return max(inner) if name == "cond" else sum(inner) * eqn.params.get("length", 1)
    if name in primitives_with(Trait.MIXING):
        return 10.0 * sum(
            math.prod(compat.type_of(v).shape) * compat.type_of(v).shape[-1]
            for v in eqn.invars
            if compat.type_of(v).shape
        )
    return float(sum(math.prod(compat.type_of(v).shape) for v in eqn.outvars if hasattr(v.aval, "shape")))
