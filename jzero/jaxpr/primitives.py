"""What jax's primitives do: one row of traits each, from which every part of jzero derives the sets that it needs.

In: the name of a primitive. Out: its `Trait`s; none for a name that is not in the table, so that an unknown operation
is taken for one that needs whole arrays, is expensive, and mixes elements. A set of names is a question to the table:

    >>> from jzero.jaxpr.primitives import Trait, named
    >>> "tanh" in named(Trait.ELEMENTWISE), "tanh" in named(Trait.MIXING)
    (True, False)
"""

from __future__ import annotations

import enum
import functools
from typing import Any

__all__ = ["CALLS", "CHEAP", "LIGHT", "REMAT", "RUNS", "Trait", "called", "named"]


class Trait(enum.Flag):
    """What an operation does.

    Attributes:
      ELEMENTWISE: Each element of the result is computed from those at the same place.
      LAYOUT: The result holds elements of the operands, or numbers that need none, at other places.
      ALIAS: The result can share the operand's memory.
      REDUCTION: Few elements are computed from many, at the cost of reading them.
      MIXING: Each element of the result depends on whole rows, columns or arrays: shards do not suffice.
      KEEPS_ZERO: The result is zero where all operands are, the predicate of a `select_n` aside.
      IN_PLACE: The result can overwrite the first operand.
      RANDOM: Random bits and indices of devices: computed where they are read, but not repeated.
      BOOKKEEPING: Takes no time, but says something: a name, an order, a place.
      CALL: Runs one jaxpr on just its operands.
      CUSTOM: As `CALL`, of a function with a derivative of its own.
      REMAT: As `CALL`, of a function that the backward pass computes again.
    """

    ELEMENTWISE = enum.auto()
    LAYOUT = enum.auto()
    ALIAS = enum.auto()
    REDUCTION = enum.auto()
    MIXING = enum.auto()
    KEEPS_ZERO = enum.auto()
    IN_PLACE = enum.auto()
    RANDOM = enum.auto()
    BOOKKEEPING = enum.auto()
    CALL = enum.auto()
    CUSTOM = enum.auto()
    REMAT = enum.auto()


_ROWS: tuple[tuple[Trait, str], ...] = (
    (
        Trait.ELEMENTWISE,
        "acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp complex conj cos cosh div eq erf erf_inv "
        "erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt max min mul "
        "ne nextafter not one_minus_square or population_count pow real rem round rsqrt shift_left "
        "shift_right_arithmetic shift_right_logical sin sinh sqrt square tan tanh xor",
    ),
    (Trait.ELEMENTWISE | Trait.KEEPS_ZERO, "abs add add_any convert_element_type neg select_n sign sub"),
    (
        Trait.ELEMENTWISE | Trait.KEEPS_ZERO | Trait.ALIAS,
        "copy copy_p reduce_precision sharding_constraint stop_gradient",
    ),
    (Trait.LAYOUT, "concatenate dynamic_slice iota pad rev split stack tile unstack"),
    (Trait.LAYOUT | Trait.ALIAS, "bitcast_convert_type"),
    (Trait.LAYOUT | Trait.KEEPS_ZERO, "broadcast_in_dim slice"),
    (Trait.LAYOUT | Trait.KEEPS_ZERO | Trait.ALIAS, "expand_dims reshape squeeze transpose"),
    (
        Trait.REDUCTION,
        "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor",
    ),
    (
        Trait.MIXING,
        "cholesky conv_general_dilated cummax cummin cumprod cumsum dot_general eig eigh fft geqrf householder_product "
        "lu qr schur sort svd triangular_solve tridiagonal_solve",
    ),
    (Trait.IN_PLACE, "dynamic_update_slice scatter scatter-add scatter_add while"),
    (
        Trait.RANDOM,
        "axis_index random_bits random_fold_in random_seed random_unwrap random_wrap threefry2x32",
    ),
    (Trait.BOOKKEEPING, "device_put empty empty2 optimization_barrier tie"),
    (Trait.BOOKKEEPING | Trait.ALIAS, "name pcast pvary reshard"),
    (Trait.CALL, "closed_call core_call eval_jaxpr jit pjit"),
    (Trait.CUSTOM, "custom_jvp_call custom_vjp_call"),
    (Trait.REMAT, "checkpoint remat remat2"),
)

TRAITS = {name: traits for traits, names in _ROWS for name in names.split()}


@functools.cache
def named(traits: Trait) -> frozenset[str]:
    """Returns the names of the primitives that have any of some traits."""
    return frozenset(name for name, found in TRAITS.items() if found & traits)


def called(eqn: Any) -> Any:
    """Returns the jaxpr, closed or open, that an equation with the trait `CALL`, `CUSTOM` or `REMAT` runs."""
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params)


CALLS = named(Trait.CALL)
REMAT = named(Trait.REMAT)
RUNS = named(Trait.CALL | Trait.CUSTOM | Trait.REMAT)

CHEAP = named(Trait.ELEMENTWISE | Trait.LAYOUT)
"""Operations that cost little compared with the gather of their operands. Applied to parameters alone, they are
repeated at each use; keeping the result would keep an array of whole size."""

LIGHT = CHEAP | named(Trait.REDUCTION | Trait.BOOKKEEPING) | {"custom_jvp_call"}
"""Takes little more time than reading the operands: recomputed in the backward pass. All others are heavy, unknown
ones included. What is fetched from the host's memory is fetched again, as it is gathered again."""
