"""How the results of a program grow with the number of rows that it is traced over: a sum over rows does, a mean not.

    growth(jaxpr, doubled, inputs) -> list[float]

Both jaxprs are of one function, `doubled` over twice as many rows. Python computes with the number of rows, so a jaxpr
shows it as a constant like any other: over two rows `0.5 * x.sum()` and `x.sum() / len(x)` are one program, and only
other rows tell them apart. The growth of a value is the power of the number of rows that is a factor of it:

    lambda x: 0.3 * x.sum()          1
    lambda x: 64 / len(x) * x.sum()  0
    lambda x: x.mean() / len(x)     -1
    lambda x: len(x)                 1

Each rule says what one operation makes of the growth of its operands, whose elements count as alike. Zero has the
growth minus infinity, so that what is added to it decides. What no rule knows is not a number.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr, Atom
from jzero.core.jaxpr.primitives import RUNS, Trait, called_jaxpr, primitives_with

Pair: TypeAlias = tuple[JaxprEqn, JaxprEqn]
"""An equation, and that of the trace over twice as many rows."""

ZERO, UNKNOWN = -math.inf, math.nan
LARGEST_CONSTANT = 2**20
"""Of larger constants, elements are not compared."""
MOST_ITERATIONS = 8


def growth(jaxpr: AnyJaxpr, doubled: AnyJaxpr, inputs: Sequence[float] | None = None) -> list[float]:
    """Returns the growth of each result.

    Args:
      jaxpr: An open or closed jaxpr.
      doubled: That of the same function over twice as many rows. Where its equations are others, nothing is known.
      inputs: The growth of each input, by default 0.

    Example:
      >>> from jzero.core.jaxpr.growth import growth
      >>> fn = lambda x: (x.mean(), 0.5 * x.sum(), 64 / len(x) * x.sum())
      >>> growth(*(jax.make_jaxpr(fn)(jnp.ones(rows)) for rows in (2, 4)))
      [0.0, 1.0, 0.0]
    """
    (one, consts), (two, other_consts) = map(compat.open_jaxpr, (jaxpr, doubled))
    forms = [[(x.primitive, len(x.invars), len(x.outvars)) for x in opened.eqns] for opened in (one, two)]
    if forms[0] != forms[1] or len(consts) != len(other_consts):
        return [UNKNOWN] * len(one.outvars)
    known = dict.fromkeys(one.constvars, UNKNOWN)
    known |= dict(zip(one.constvars, map(_of_constant, consts, other_consts), strict=False))
    known |= dict(zip(one.invars, [0.0] * len(one.invars) if inputs is None else inputs, strict=True))

    def read(atoms: Sequence[Atom], others: Sequence[Atom]) -> list[float]:
        return [
            _of_constant(x.val, getattr(y, "val", None)) if compat.is_literal(x) else known[x]
            for x, y in zip(atoms, others, strict=True)
        ]

    for pair in zip(one.eqns, two.eqns, strict=True):
        found = _of_equation(pair, read(pair[0].invars, pair[1].invars))
        outputs = pair[0].outvars
        known |= dict(zip(outputs, found if isinstance(found, list) else [found] * len(outputs), strict=True))
    return read(one.outvars, two.outvars)


def _of_constant(x: Any, y: Any) -> float:
    """Returns the growth of a constant that is `y` in the trace over twice as many rows."""
    can_read = _can_read(x) and _can_read(y)
    if not can_read or (x is y and np.size(x) > 1):
        return 0.0 if x is y else UNKNOWN
    one, two = (np.abs(np.asarray(value).astype(np.complex128)) for value in (x, y))
    if one.size and two.size and one.min() == one.max() and two.min() == two.max():  # two numbers, in any shapes
        one, two = one.flat[0], two.flat[0]
    if np.array_equal(one, two, equal_nan=True):
        return 0.0 if np.any(one) else ZERO
    are_numbers = not np.ndim(one) and not np.ndim(two) and np.isfinite([one, two]).all() and one and two
    return float(np.log2(two / one)) if are_numbers else UNKNOWN


def _can_read(x: Any) -> bool:
    """Whether this is a constant whose elements are here, and few."""
    is_key = jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended)
    is_here = not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
    return x is not None and not is_key and is_here and np.size(x) <= LARGEST_CONSTANT


def _largest(values: Iterable[float]) -> float:
    """Returns the growth of a sum, or of what may be any of several values."""
    values = list(values)
    return UNKNOWN if any(map(math.isnan, values)) else max(values)


def _of_equation(pair: Pair, ins: list[float]) -> float | list[float]:
    name = pair[0].primitive.name
    if name in RUNS or name == "shard_map":
        return growth(called_jaxpr(pair[0]), called_jaxpr(pair[1]), ins)
    return RULES.get(name, _function)(pair, ins)


# Operations.


def _function(pair: Pair, ins: list[float]) -> float:
    """Returns the growth of any function of the operands."""
    return 0.0 if all(x in (0, ZERO) for x in ins) else UNKNOWN


def _more(one: int, two: int) -> float:
    """Returns the growth of a number of elements, given that of the trace over twice as many rows."""
    power = 0.0 if one == two else math.log2(two / one) if one and two else UNKNOWN
    return power if power.is_integer() else UNKNOWN  # rows, beside others that are always as many


def _elements(pair: Pair, number: int, dims: Iterable[int]) -> float:
    """Returns the growth of the number of elements along dimensions of an operand."""
    dims, shapes = list(dims), [compat.type_of(eqn.invars[number]).shape for eqn in pair]
    return _more(*(math.prod(shape[d] for d in dims) for shape in shapes))


def _sum_over_devices(pair: Pair, ins: list[float]) -> list[float]:
    axes = [x for x in pair[0].params["axes"] if isinstance(x, int)]  # that had a name in a `vmap`
    return [x + _elements(pair, i, axes) for i, x in enumerate(ins)]


def _scatter_add(pair: Pair, ins: list[float]) -> float:
    windows, ndim = pair[0].params["dimension_numbers"].update_window_dims, compat.type_of(pair[0].invars[2]).ndim
    return _largest([ins[0], ins[2] + _elements(pair, 2, {*range(ndim)} - {*windows})])


Rule: TypeAlias = Callable[[Pair, list[float]], float | list[float]]
_GROUPS: tuple[tuple[str, Rule], ...] = (
    (
        " ".join(primitives_with(Trait.LAYOUT) - {"iota", "dynamic_slice"})
        + " abs add add_any clamp complex conj convert_element_type copy copy_p cummax cummin device_put imag max min"
        " name neg pcast pvary real reduce_max reduce_min reduce_precision reshard sharding_constraint stop_gradient"
        " sub",
        lambda pair, ins: _largest(ins),
    ),
    (
        "all_gather all_gather_invariant all_to_all optimization_barrier pmax pmin ppermute reduce_scatter sort",
        lambda pair, ins: ins,
    ),
    ("psum psum2 psum_invariant", _sum_over_devices),
    ("iota", lambda pair, ins: 0.0 if len({e.params["shape"][e.params["dimension"]] for e in pair}) == 1 else UNKNOWN),
    ("dynamic_slice gather", lambda pair, ins: ins[0]),
    ("dynamic_update_slice", lambda pair, ins: _largest(ins[:2])),
    ("scatter", lambda pair, ins: _largest([ins[0], ins[2]])),
    ("scatter-add scatter_add", _scatter_add),
    ("select_n", lambda pair, ins: _largest(ins[1:])),
    ("mul conv_general_dilated", lambda pair, ins: sum(ins)),
    ("div", lambda pair, ins: ins[0] - ins[1]),
    ("square", lambda pair, ins: 2 * ins[0]),
    ("integer_pow", lambda pair, ins: pair[0].params["y"] * ins[0]),
    ("sqrt", lambda pair, ins: ins[0] / 2),
    ("rsqrt", lambda pair, ins: -ins[0] / 2),
    ("reduce_sum", lambda pair, ins: ins[0] + _elements(pair, 0, pair[0].params["axes"])),
    ("dot_general", lambda pair, ins: sum(ins) + _elements(pair, 0, pair[0].params["dimension_numbers"][0][0])),
)


# Loops and branches.


def _fixed_point(iterate: Callable[[list[float]], list[float]], carry: list[float]) -> list[float]:
    """Returns the growth of a loop's carry after any number of iterations."""
    for _ in range(MOST_ITERATIONS + len(carry)):  # values may move on by one place in each iteration
        after = [_largest(both) for both in zip(carry, iterate(carry), strict=False)]
        if after == carry:
            return carry
        carry = after
    return [UNKNOWN] * len(carry)


def _scan(pair: Pair, ins: list[float]) -> list[float]:
    first, num_carry = compat.scan_groups(pair[0])
    last, more = first + num_carry, _more(*(eqn.params["length"] for eqn in pair))
    jaxpr, doubled = (eqn.params["jaxpr"] for eqn in pair)
    body, _ = compat.open_jaxpr(jaxpr)
    before, after = body.invars[first:last], body.outvars[:num_carry]
    sums = [_is_running_sum(body, v, out) for v, out in zip(before, after, strict=True)]

    def iterate(carry: list[float]) -> list[float]:
        # What a running sum that begins with zero is after one iteration, each adds.
        carry = [ZERO if is_sum else x for x, is_sum in zip(carry, sums, strict=True)]
        return growth(jaxpr, doubled, [*ins[:first], *carry, *ins[last:]])

    carry = _fixed_point(iterate, ins[first:last])
    outs = iterate(carry)
    for i, is_sum in enumerate(sums):
        if is_sum:
            carry[i] = _largest([ins[first + i], outs[i] + more])
        elif more != 0 and after[i] is not before[i]:
            carry[i] = UNKNOWN
    return [*carry, *outs[num_carry:]]


def _is_running_sum(body: Jaxpr, before: Var, after: Atom) -> bool:
    """Whether the body of a loop only adds something to a carried value."""
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    uses = collections.Counter(v for eqn in body.eqns for v in eqn.invars if not compat.is_literal(v))
    uses.update(v for v in body.outvars if not compat.is_literal(v))

    def origin(atom: Atom) -> JaxprEqn | Atom:
        eqn = None if compat.is_literal(atom) else made.get(atom)
        return origin(eqn.invars[0]) if eqn and eqn.primitive.name == "convert_element_type" else eqn or atom

    adds = origin(after)
    if not isinstance(adds, JaxprEqn) or adds.primitive.name not in ("add", "add_any") or uses[before] != 1:
        return False
    return any(origin(x) is before for x in adds.invars)


def _while(pair: Pair, ins: list[float]) -> list[float]:
    params = pair[0].params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body, carry = ins[:first], ins[first : first + second], ins[first + second :]
    jaxpr, doubled = (eqn.params["body_jaxpr"] for eqn in pair)
    carry = _fixed_point(lambda carry: growth(jaxpr, doubled, [*of_body, *carry]), carry)
    (goes_on,) = growth(params["cond_jaxpr"], pair[1].params["cond_jaxpr"], [*of_cond, *carry])
    body, _ = compat.open_jaxpr(jaxpr)
    changed = [v is not old for v, old in zip(body.outvars, body.invars[second:], strict=True)]
    return [UNKNOWN if is_changed and goes_on != 0 else x for x, is_changed in zip(carry, changed, strict=True)]


def _cond(pair: Pair, ins: list[float]) -> list[float]:
    branches = zip(*(eqn.params["branches"] for eqn in pair), strict=True)
    return [_largest(each) for each in zip(*(growth(one, two, ins[1:]) for one, two in branches), strict=True)]


RULES: dict[str, Rule] = {name: rule for names, rule in _GROUPS for name in names.split()}
RULES |= {"scan": _scan, "while": _while, "cond": _cond}
"""By the name of a primitive, of operations whose growth is more than that of any function."""
