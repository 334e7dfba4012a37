"""Traits of jax's primitives, in one table from which every part of jzero derives the sets that it needs.

    primitives_with(traits) -> frozenset[str]

A name that is not in the table has no traits, so jzero assumes that the operation needs whole arrays, is expensive, and
mixes elements:

    >>> from jzero.core.jaxpr.primitives import Trait, primitives_with
    >>> "tanh" in primitives_with(Trait.ELEMENTWISE), "tanh" in primitives_with(Trait.MIXING)
    (True, False)
"""

from __future__ import annotations

import enum
import functools

from jax.extend.core import JaxprEqn

from jzero.core.base.compat import AnyJaxpr


class Trait(enum.Flag):
    """Traits of an operation.

    Attributes:
      ELEMENTWISE: Each element of the result depends on the operands' elements at the same position.
      LAYOUT: Moves elements of the operands to other positions, or makes numbers without operands.
      ALIAS: The result can share the operand's memory.
      REDUCTION: Computes few elements from many, at the cost of reading them.
      MIXING: Each element of the result depends on whole rows, columns or arrays: shards do not suffice.
      KEEPS_ZERO: The result is zero where all operands are, except the predicate of a `select_n`.
      IN_PLACE: The result can overwrite the first operand.
      RANDOM: Makes random bits or device indices: computed where they are read, but not repeated.
      BOOKKEEPING: Takes no time; records a name, an order or a placement.
      CALL: Runs one jaxpr on just its operands.
      CUSTOM: Like `CALL`, for a function with a custom derivative.
      REMAT: Like `CALL`, for a function that the backward pass recomputes.
      KERNEL: One program of its own, whatever it computes: attention, mostly. Never worth computing twice.
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
    KERNEL = enum.auto()


_ROWS: tuple[tuple[Trait, str], ...] = (
    (
        Trait.ELEMENTWISE,
        "acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp complex conj cos cosh div eq erf erf_inv "
        "erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p log2 logistic lt max min mul "
        "ne nextafter not one_minus_square or polynomial population_count pow real rem round rsqrt shift_left "
        "shift_right_arithmetic shift_right_logical sin sinh sqrt square tan tanh xor",
    ),
    (Trait.ELEMENTWISE | Trait.KEEPS_ZERO, "abs add add_any convert_element_type neg select_n sign sub"),
    (
        Trait.ELEMENTWISE | Trait.KEEPS_ZERO | Trait.ALIAS,
        "copy copy_p layout_constraint reduce_precision sharding_constraint stop_gradient",
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
        "lu qr ragged_dot_general schur sort svd triangular_solve tridiagonal_solve",
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
    (
        Trait.KERNEL | Trait.MIXING,
        "pallas_call ffi_call custom_partitioning triton_kernel_call cudnn_fusion scaled_matmul_wrapper "
        "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper "
        "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper",
    ),
)

TRAITS = {name: traits for traits, names in _ROWS for name in names.split()}


@functools.cache
def primitives_with(traits: Trait) -> frozenset[str]:
    """Returns the names of the primitives that have any of the given traits."""
    return frozenset(name for name, own in TRAITS.items() if own & traits)


def called_jaxpr(eqn: JaxprEqn) -> AnyJaxpr:
    """Returns the jaxpr, closed or open, that a call, a recomputed block or a scan runs."""
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params)


CALLS = primitives_with(Trait.CALL)
REMAT = primitives_with(Trait.REMAT)
RUNS = primitives_with(Trait.CALL | Trait.CUSTOM | Trait.REMAT)

CHEAP = primitives_with(Trait.ELEMENTWISE | Trait.LAYOUT)
"""Operations that cost little compared with gathering their operands. If their operands are all parameters, jzero
repeats them at each use, since saving the result would save an array of whole size."""

LIGHT = CHEAP | primitives_with(Trait.REDUCTION | Trait.BOOKKEEPING) | {"custom_jvp_call"}
"""Operations that take little more time than reading their operands, so the backward pass recomputes them. All others
are heavy, unknown ones included. Fetches from host memory are light: the backward pass fetches again, as it gathers
again."""
