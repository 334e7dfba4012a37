"""Regions of a loss: uses of lazy parameters with a gradient of their own, which gathers again at its time.

[Note: Light fences]
What holds a gather back is an operand of a barrier, and XLA writes that to memory as a whole. On TPUs, where products
are merged with what makes their operands, this costs more than it has to: the gradient of logits, as large as they
are, would otherwise never be written. There one element of a gradient is the operand if the gradient is larger than
the parameters that wait (else these, gathered a little earlier, would take more than is saved): of a GPT of 124M on
8 v5p that takes the peak from 1096 to 851 MiB. On GPUs products read their operands from memory anyway, and early
gathers cost (1.4B on 8 H200: 5205 MiB with whole fences, 5461 with light ones).

[Note: Holding gathers back]
Compilers drop barriers before they schedule. Where the order itself matters, for bounds of what is gathered ahead and
for recomputed blocks, the shard is made to depend on what it waits for: it is selected by a comparison whose result is
always the same, which no compiler finds out. A recomputed block gathers when the block after the next has reduced its
gradients, but on TPUs: compilers for GPUs put off the products that make these, and keep what they are made of (124M
unrolled and recomputed on 8 H200: 1920 MiB without, 1122 with; on 8 v5p 852 without, 946 with). On GPUs the backward
pass of a loop likewise begins when what comes after the loop has reduced its gradients, so that those of logits are not
kept beside it (7B on 8 H200: 15402 MiB without, 15154 with; on CPUs it would take 5 % more). At stage 3 it does not
wait for parameters that stay whole, which are small: the scanned 124M would expose 47 % of its communication, not 29.

At stages 1 and 2, where nothing is gathered, it waits for all that is reduced as it is made (124M scanned and
recomputed, stage 2: 1727 MiB without, 1412 with), and so does a recomputed block for the block after the next, whose
gradients its own is selected by (124M unrolled and recomputed: 2856 MiB without, 1722 with). Nothing waits for
gradients that go to the host.

Every use waiting for its own gradient in this way would hide nothing (124M unrolled, not recomputed: the modelled step
is 16 % longer).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jzero._lazy import Lazy, after, fenced, first_elements, is_lazy
from jzero._own_derivatives import Beside, instantiated
from jzero._placement import is_on_host
from jzero._uses import Block, Blocks, Uses, arrived_tokens

__all__ = ["Fence", "regathered", "settled"]

Tokens: TypeAlias = list[jax.Array]
Fence: TypeAlias = Literal["whole", "light"]


def settled(
    fn: Callable[[list[Any]], list[Any]],
    inputs: list[Any],
    *,
    held: bool = False,
    uses: Uses | None = None,
    blocks: Blocks | None = None,
) -> list[Any]:
    """Calls `fn`, which says by itself what it keeps for the backward pass, so that nothing around it asks again.

    jax asks the policy of an enclosing `jax.checkpoint` inside of inner ones, too, so that one that keeps everything
    but gathers would undo them. If `held`, it gathers again when the gradient of a later one of `uses` is there, and
    when a later one of `blocks` has reduced its gradients.
    """
    use, tokens = (None, []) if uses is None else uses.last_with_tokens()
    block = Block(sum(map(_whole_bytes, _parameters(inputs))))
    earlier = [] if blocks is None else blocks.taken()
    later_use, later_block = None if use is None else use.taken, block.taken
    num_tokens, num_earlier = len(tokens), len(earlier)
    shards: list[int] = []
    fixed: list[bool] = []
    beside = Beside()

    @jax.custom_vjp
    def region(inputs: list[Any], tokens: Tokens, earlier: Tokens) -> tuple[list[Any], jax.Array, jax.Array]:
        return fn(inputs), jnp.zeros(()), jnp.zeros(())

    def forward(inputs: list[Any], tokens: Tokens, earlier: Tokens) -> tuple[Any, Any]:
        inputs, fixed[:] = _values_and_fixed(inputs)
        # What depends on the batch alone is closed over: it may be used by what has no derivative.
        results, vjp = jax.vjp(lambda moving: beside.noting(fn(_merged(fixed, inputs, moving))), _moving(fixed, inputs))
        of_params = {id(x.shard) for x in _parameters(inputs)}
        shards[:] = [i for i, x in enumerate(jax.tree.leaves(vjp)) if id(x) in of_params]
        return (beside.put(results), jnp.zeros(()), jnp.zeros(())), vjp

    def backward(vjp: Any, cotangents: tuple[list[Any], jax.Array, jax.Array]) -> tuple[Any, Tokens, Tokens]:
        of_results, of_token, of_block = jax.tree.map(instantiated, cotangents, is_leaf=_is_zero)
        leaves, treedef = jax.tree.flatten(vjp)
        waiting = {i: leaves[i] for i in shards}
        if later_use is not None and later_use.is_set:
            waiting = after(waiting, [of_token])
        elif held:
            waiting, _ = fenced(waiting, first_elements(of_results))
        if later_block.is_set:
            waiting = after(waiting, [of_block])
        for i, x in waiting.items():
            leaves[i] = x
        (of_moving,) = treedef.unflatten(leaves)(of_results)
        of_tokens = arrived_tokens(num_tokens, _arrays_beside_params(of_moving) or of_results)
        of_inputs = _merged(fixed, [None] * len(fixed), _without_shards(of_moving))
        return of_inputs, of_tokens, _reduced_tokens(num_earlier, of_moving)

    region.defvjp(forward, backward, symbolic_zeros=True)
    results, token, block.token = region(inputs, tokens, earlier)
    if blocks is not None:
        blocks.add(block)
    if use is not None:
        use.token = token
    return beside.instead(results)


def _is_input(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _values_and_fixed(inputs: list[Any]) -> tuple[list[Any], list[bool]]:
    """Returns inputs as the forward pass of a `custom_vjp` gets them, and which arrays are not differentiated."""
    values = jax.tree.map(lambda x: x.value, inputs, is_leaf=_is_input)
    return values, [_is_input(x) and not x.perturbed for x in inputs]


def _moving(fixed: list[bool], values: list[Any]) -> list[Any]:
    return [x for x, is_fixed in zip(values, fixed, strict=True) if not is_fixed]


def _merged(fixed: list[bool], values: list[Any], moving: list[Any]) -> list[Any]:
    """Returns `values` with those that are not fixed replaced."""
    others = iter(moving)
    return [x if is_fixed else next(others) for x, is_fixed in zip(values, fixed, strict=True)]


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _reduced_tokens(num_tokens: int, cotangents: Any) -> Tokens:
    """Returns the gradients of tokens, which are there when those of parameters are reduced.

    Nothing waits for gradients that leave for the host: XLA would move what waits there, too.
    """
    slots = [x.slot for x in _parameters(cotangents) if x.slot is not None and not is_on_host(x.slot)]
    return arrived_tokens(num_tokens, slots)


def _parameters(values: Any) -> list[Lazy]:
    return [x for x in jax.tree.leaves(values, is_leaf=_is_parameter) if _is_parameter(x)]


def _arrays_beside_params(values: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(values, is_leaf=_is_parameter) if not _is_parameter(x)]


def _without_shards(cotangents: Any) -> Any:
    """Gradients leave through slots. At a shard none arrives; one on the host could not even have zeros from here."""

    def without(x: Any) -> Any:
        return dataclasses.replace(x, shard=None) if _is_parameter(x) else x

    return jax.tree.map(without, cotangents, is_leaf=_is_parameter)


def _is_parameter(x: Any) -> bool:
    return isinstance(x, Lazy)


def regathered(
    fn: Callable[[list[Any]], list[Any]],
    inputs: list[Any],
    *,
    fence: Fence | None,
    uses: Uses | None,
    blocks: Blocks | None,
) -> list[Any]:
    """Calls `fn`, which makes its inputs whole; its gradient gathers again instead of keeping them.

    With a `fence` that stands behind its own gradient; or it waits for that of a later one of `uses`.
    """
    use, tokens = (None, []) if uses is None else uses.last_with_tokens()
    earlier = [] if blocks is None else blocks.taken()
    later_use = None if use is None else use.taken
    count, num_tokens, num_earlier = len(inputs), len(tokens), len(earlier)
    lazy = {i: x for i, x in enumerate(inputs) if is_lazy(x)}
    dense = {i: x for i, x in enumerate(inputs) if i not in lazy}

    def plain(lazy: dict[int, Any], dense: dict[int, Any]) -> list[Any]:
        merged = {**lazy, **dense}
        return fn([merged[i] for i in range(count)])

    @jax.custom_vjp
    def region(
        lazy: dict[int, Any], dense: dict[int, Any], tokens: Tokens, earlier: Tokens
    ) -> tuple[list[Any], jax.Array]:
        return plain(lazy, dense), jnp.zeros(())

    def forward(lazy: dict[int, Any], dense: dict[int, Any], tokens: Tokens, earlier: Tokens) -> tuple[Any, Any]:
        # All inputs are residuals in name; those that the gradient does not read are dropped as dead code.
        return region(lazy, dense, tokens, earlier), (lazy, dense)

    def backward(residuals: Any, cotangents: tuple[list[Any], jax.Array]) -> tuple[Any, Any, Tokens, Tokens]:
        (lazy, dense), (of_results, of_token) = residuals, cotangents
        if later_use is not None and later_use.is_set:
            lazy = after(lazy, [of_token])
        elif fence == "light" and _num_bytes(of_results) > sum(map(_whole_bytes, lazy.values())):
            lazy, _ = fenced(lazy, first_elements(of_results))
        elif fence is not None:
            lazy, of_results = fenced(lazy, of_results)
        of_lazy, of_dense = jax.vjp(plain, lazy, dense)[1](of_results)
        # Then the parameters of this use are not needed any more; what they themselves get takes a reduction longer.
        of_tokens = arrived_tokens(num_tokens, jax.tree.leaves(of_dense) or of_results)
        return _without_shards(of_lazy), of_dense, of_tokens, _reduced_tokens(num_earlier, of_lazy)

    region.defvjp(forward, backward)
    results, token = region(lazy, dense, tokens, earlier)
    if use is not None:
        use.token = token
    return results


def _num_bytes(values: Sequence[jax.Array]) -> int:
    return sum(x.size * x.dtype.itemsize for x in values if x.dtype != jax.dtypes.float0)


def _whole_bytes(x: Any) -> int:
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
