"""The blocks of a loss that `Keep` keeps: which they are, what they save, and its bytes.

    num_blocks(jaxpr, *, fuses_products) -> int
    naming_operands(made) -> Apply

[Note: Kept blocks]
With `Keep(blocks=k)` the last k blocks save the results of all heavy operations, and of their batched products and
kernels the operands that come from products: queries, keys, values and probabilities of attention. So no product is
computed twice, nor a softmax, while the backward pass redoes what is elementwise inside the operations that read it.
Saving all that differentiation would save takes as much memory and a longer step: it is written in the forward pass,
for the backward pass alone. Blocks with loops save it all the same, since jax would run such a loop again, and so do
all on TPUs, whose compiler writes it in the products that make it (a Llama of 125M on v5p: 14.1 ms, 17.4 with products
alone).

A loop whose turns are such blocks counts as one. If it is kept, it saves those operands, too, but no scores: to write
and read stacks of them takes longer. On TPUs that is true of operands, too, and no loop counts. Nor does a loop whose
shares are read in another layout, as those of grouped queries are: compilers copy the stack whole (a Llama of 12
layers, rows of 2,048: 57.6 ms, 47.3 without).

Blocks count in the order in which they run, through calls but not in loops and branches. A kept block is a call with a
name of its own, and a kept loop has named operands; so `kept_bytes` finds them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Var
from jax.sharding import NamedSharding

from jzero.core.base import compat
from jzero.core.base.compat import AnyJaxpr
from jzero.core.jaxpr.equations import equations_in
from jzero.core.jaxpr.interpret import evaluate
from jzero.core.jaxpr.primitives import CALLS, REMAT, Trait, called_jaxpr, primitives_with
from jzero.core.jaxpr.repeats import (
    OPERAND,
    EquationRun,
    aval_bytes,
    dims_are_adjacent,
    is_batched_product,
    is_free,
    keeps_products,
    split_into_parts,
)

Apply: TypeAlias = Callable[[JaxprEqn, list[jax.Array]], list[jax.Array]]
Wrap: TypeAlias = Callable[[Callable[..., list[jax.Array]]], Callable[..., list[jax.Array]]]
KEPT_BLOCK = "kept_block"


def num_blocks(jaxpr: AnyJaxpr, *, fuses_products: bool) -> int:
    """Returns how many blocks there are to keep, see [Note: Kept blocks] and `recompute`."""
    return sum(1 for _ in blocks_of(jaxpr, fuses_products=fuses_products))


def blocks_of(jaxpr: AnyJaxpr, *, fuses_products: bool) -> Iterator[EquationRun | JaxprEqn]:
    """Yields the blocks in their order: repeated ones, and loops that count as one."""
    for part in split_into_parts(compat.open_jaxpr(jaxpr)[0]):
        if part.is_free:
            yield part
            continue
        for eqn in part.eqns:
            if eqn.primitive.name in CALLS:
                yield from blocks_of(called_jaxpr(eqn), fuses_products=fuses_products)
            elif not fuses_products and is_loop_of_blocks(eqn):
                yield eqn


def keeping(eqns: Sequence[JaxprEqn], *, fuses_products: bool) -> tuple[Apply, Wrap]:
    """Returns how a repeated block that is kept is evaluated, and what its function is wrapped in."""
    has_loop = any(x.primitive.name == "scan" for eqn in eqns for x in equations_in(eqn))
    if has_loop or fuses_products:
        return compat.bind, lambda layer: layer
    return naming_operands(()), functools.partial(jax.checkpoint, policy=keeps_products)


def is_loop_of_blocks(eqn: JaxprEqn) -> bool:
    """Whether a loop counts as a block: whether it has attention, and does not say what to recompute.

    None does whose shares are read in another layout.
    """
    attention = list(filter(_is_attention, equations_in(eqn))) if eqn.primitive.name == "scan" else []
    return bool(attention) and not any(map(_copies_shares, attention)) and is_free([eqn])


def _is_attention(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product of pairs of matrices, or a kernel, which computes some as a rule."""
    return is_batched_product(eqn) or eqn.primitive.name in primitives_with(Trait.KERNEL)


def _copies_shares(eqn: JaxprEqn) -> bool:
    """Whether a product reads an operand that is larger than its result in another layout."""
    if not is_batched_product(eqn):
        return False
    sizes = [aval_bytes(compat.type_of(v)) for v in (*eqn.invars, *eqn.outvars)]
    pairs = zip(sizes, dims_are_adjacent(eqn), strict=False)
    return any(size > sizes[-1] and not is_read for size, is_read in pairs)


def kept_bytes(jaxpr: AnyJaxpr) -> int:
    """Returns the bytes that kept blocks save for the backward pass, given a differentiated program."""
    opened, total = compat.open_jaxpr(jaxpr)[0], 0
    read = {v for eqn in opened.eqns if compat.is_transposed(eqn) for v in eqn.invars if not compat.is_literal(v)}
    for eqn in opened.eqns:
        if compat.is_transposed(eqn) or eqn.primitive.name not in (*CALLS, "scan"):
            continue
        names = {x.params.get("name") for x in equations_in(eqn)}
        if eqn.params.get("name") == KEPT_BLOCK or (eqn.primitive.name == "scan" and OPERAND in names):
            total += sum(aval_bytes(compat.type_of(v)) for v in eqn.outvars if v in read)
        elif eqn.primitive.name in CALLS:
            total += kept_bytes(called_jaxpr(eqn))
    return total


def recomputes(eqn: JaxprEqn) -> bool:
    """Whether an equation, or anything in it, is recomputed in the backward pass."""
    return any(x.primitive.name in REMAT for x in equations_in(eqn))


def shardings_of(call: JaxprEqn) -> list[tuple[NamedSharding | None, ...]]:
    """Returns the shardings of a call's operands and results; only calls of `jit` have any."""
    return [
        tuple(s if isinstance(s, NamedSharding) else None for s in call.params.get(name, variables))
        for name, variables in (("in_shardings", call.invars), ("out_shardings", call.outvars))
    ]


def naming_operands(made: Iterable[Var]) -> Apply:
    """Returns how a kept block is evaluated, see [Note: Kept blocks]; `made` are inputs that come from products."""
    from_products = set(made)

    def apply(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
        comes = [not compat.is_literal(v) and v in from_products for v in eqn.invars]
        inner = list(equations_in(eqn))
        if any(comes) or any(x.primitive.name == "dot_general" for x in inner):
            from_products.update(eqn.outvars)
        if (
            any(map(_is_attention, inner))
            and eqn.primitive.name in CALLS
            and not any(itertools.chain(*shardings_of(eqn)))
        ):
            jaxpr = called_jaxpr(eqn)
            invars = compat.open_jaxpr(jaxpr)[0].invars
            return evaluate(jaxpr, inputs, naming_operands(itertools.compress(invars, comes)))
        if is_batched_product(eqn) or any(x.primitive.name in primitives_with(Trait.KERNEL) for x in inner):
            inputs = [checkpoint_name(x, OPERAND) if named else x for x, named in zip(inputs, comes, strict=True)]
        return compat.bind(eqn, inputs)

    return apply
