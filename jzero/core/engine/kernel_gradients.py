"""Writes the gradients of kernels as products in the order of the kernel, instead of products and transposes.

    without_transposes(jaxpr, cache) -> jaxpr

A product whose result is only transposed gets its operands exchanged. For `y = x @ w`, jax's gradient of `w: [D, F]` is

    b:bf16[F,D] = dot_general[dimension_numbers=(([0], [0]), ([], []))] g x
    c:bf16[D,F] = transpose[permutation=(1, 0)] b

and becomes

    c:bf16[D,F] = dot_general[dimension_numbers=(([0], [0]), ([], []))] x g

The numbers are the same. The compiler for GPUs compiles both to one program. That for CPUs (jax 0.12) merges product
and transpose into a product of a form that its fast kernels for bf16 do not take; Eigen's kernel, which does, takes ten
times as long. GSPMD's programs are not affected: a collective separates the two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, J
from jzero.core.jaxpr.edit import params_of_call
from jzero.core.jaxpr.identity import IdDict
from jzero.core.jaxpr.primitives import CALLS, REMAT, called_jaxpr

Cache: TypeAlias = IdDict[AnyJaxpr, AnyJaxpr]


def without_transposes(jaxpr: J, cache: Cache | None = None) -> J:
    """Returns a program without transposes of products that nothing else reads, in loops and calls, too.

    Args:
      jaxpr: The program.
      cache: The new program of each function: layers that share one share its new program, too.

    Example:
      >>> from jzero.core.engine.kernel_gradients import without_transposes
      >>> loss = lambda w, x: (x @ w).sum()
      >>> joint = jax.make_jaxpr(jax.grad(loss))(jnp.ones((64, 8)), jnp.ones((2, 64)))
      >>> [str(eqn.primitive) for eqn in joint.jaxpr.eqns[-2:]]
      ['dot_general', 'transpose']
      >>> [str(eqn.primitive) for eqn in without_transposes(joint).jaxpr.eqns[-2:]]
      ['broadcast_in_dim', 'dot_general']
    """
    cache = IdDict() if cache is None else cache
    opened, _ = compat.open_jaxpr(jaxpr)
    eqns = [_with_bodies(eqn, cache) for eqn in opened.eqns]
    atoms = itertools.chain(opened.outvars, *(eqn.invars for eqn in eqns))
    reads = Counter(v for v in atoms if not isinstance(v, Literal))
    places = {eqn.outvars[0]: i for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general"}
    dropped = set()
    for i, eqn in enumerate(eqns):
        source = eqn.invars[0] if eqn.primitive.name == "transpose" else None
        if isinstance(source, Var) and source in places and reads[source] == 1:
            swapped = _swapped(eqns[places[source]], eqn)
            if swapped is not None:
                place = places[eqn.outvars[0]] = places[source]  # a second transpose exchanges them again
                eqns[place] = swapped
                dropped.add(i)
    is_same = not dropped and all(a is b for a, b in zip(eqns, opened.eqns, strict=True))
    remaining = [eqn for i, eqn in enumerate(eqns) if i not in dropped]
    return jaxpr if is_same else compat.with_equations(jaxpr, opened.invars, opened.outvars, remaining)


def _with_bodies(eqn: JaxprEqn, cache: Cache) -> JaxprEqn:
    """Returns a loop, call or recomputed block whose body has no such transposes."""
    if eqn.primitive.name not in CALLS | REMAT | {"scan"}:
        return eqn
    body = called_jaxpr(eqn)
    if body not in cache:
        cache[body] = without_transposes(body, cache)
    return eqn if cache[body] is body else eqn.replace(params=params_of_call(eqn, cache[body]))


def _swapped(product: JaxprEqn, transpose: JaxprEqn) -> JaxprEqn | None:
    """Returns the product of exchanged operands that is a transposed product; `None` if it is not one."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = product.params["dimension_numbers"]
    lhs, rhs = product.invars
    num_batch, precision = len(lhs_batch), product.params["precision"]
    num_lhs, num_rhs = (compat.type_of(x).ndim - num_batch - len(lhs_sum) for x in (lhs, rhs))
    dims = list(range(num_batch + num_lhs + num_rhs))
    swaps_operands = [*dims[:num_batch], *dims[num_batch + num_lhs :], *dims[num_batch : num_batch + num_lhs]]
    is_plain = product.params["out_sharding"] is None and (precision is None or isinstance(precision, tuple))
    if not is_plain or list(transpose.params["permutation"]) != swaps_operands:
        return None
    params = {
        **product.params,
        "dimension_numbers": ((rhs_sum, lhs_sum), (rhs_batch, lhs_batch)),
        "precision": precision if precision is None else precision[::-1],
    }
    return product.replace(invars=[rhs, lhs], outvars=transpose.outvars, params=params)
