"""Mixtures of experts: which experts a token goes to, and two ways to multiply with their kernels.

Both sort the tokens, once for each of their experts. `Blocks` cuts them into blocks of equal size, each of one expert,
and multiplies a batch of matrices, as any backend can: one block for each expert, a quarter larger than if all experts
had as many tokens, and further ones only for those that have more. `Ragged` gives each group its own kernel
(`jax.lax.ragged_dot`), with no more operations than needed on TPUs. Elsewhere jax 0.10 to 0.12 multiply all that is
sorted with every expert.

With expert parallelism, E of them are on this device; those elsewhere add zeros to a sum.

Shapes: N tokens, E experts, X experts that a token goes to, I input and O output features,
K blocks of M rows.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jzero.hf import Experts


def route(logits: jax.Array, config: Experts) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token, [N, X], and their shares in the result, fp32 [N, X], by logits [N, E]."""
    best, chosen = jax.lax.top_k(logits.astype(jnp.float32), config.per_token)
    if config.normalized:  # the softmax over all, divided by its sum over the best, is the softmax over the best
        return chosen, jax.nn.softmax(best, axis=-1)
    return chosen, jnp.exp(best - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True))


FILLED: Any = {"unique_indices": True, "mode": "fill", "fill_value": 0}


class Ragged(NamedTuple):
    """Tokens, once for each of their experts, sorted by expert; last come those whose expert is elsewhere."""

    shares: jax.Array  # [N, X]
    order: jax.Array  # [N X], into tokens repeated X times
    experts: jax.Array  # [N X], sorted; E for those elsewhere
    sizes: jax.Array  # [E], tokens per expert

    @classmethod
    def of(cls, logits: jax.Array, config: Experts, first: Any = 0, count: int | None = None) -> "Ragged":
        """Returns the order of tokens by their experts, of which `count` from the `first` are here; all by default."""
        count = config.count if count is None else count
        chosen, shares = route(logits, config)
        flat = _numbers(chosen, first, count)
        order = jnp.argsort(flat)
        return cls(shares, order, flat[order], jnp.bincount(flat, length=count))

    @property
    def count(self) -> int:
        """E."""
        return len(self.sizes)

    def spread(self, x: jax.Array) -> jax.Array:
        """[N, I] -> [N X, I]."""
        order = self._or_outside(self.order, self.experts < self.count)
        return jnp.repeat(x, self.shares.shape[1], axis=0).at[order].get(**FILLED)

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[N X, I], [E, I, O] -> [N X, O]."""
        return jax.lax.ragged_dot(x, kernel, self.sizes)

    def rows(self, bias: jax.Array) -> jax.Array:
        """[E, O] -> [N X, O]."""
        return bias.at[self.experts].get(mode="clip")

    def collect(self, y: jax.Array) -> jax.Array:
        """[N X, O] -> [N, O], the sum over a token's experts."""
        places = jnp.argsort(self.order)  # in the order of tokens
        back = y.at[self._or_outside(places, places < self.sizes.sum())].get(**FILLED)
        return jnp.einsum("nxo,nx->no", back.reshape(*self.shares.shape, -1), self.shares.astype(y.dtype))

    def _or_outside(self, indices: jax.Array, here: jax.Array) -> jax.Array:
        return jnp.where(here, indices, indices + len(indices))


ROOM = 1.25
"""The rows of a block, of those that an expert gets if all get as many."""


@flax.struct.dataclass
class Blocks:
    """Tokens, once for each of their experts, in blocks of one expert each; zeros fill the last block of an expert.

    The first E blocks are the first of each expert. The others are there for experts with more tokens.
    """

    shares: jax.Array  # [N, X]
    places: jax.Array  # [N X], of tokens repeated X times, among the rows of all blocks; K M and more: elsewhere
    experts: jax.Array  # [K]; E for blocks without tokens
    size: int = flax.struct.field(pytree_node=False)  # M
    count: int = flax.struct.field(pytree_node=False)  # E

    @classmethod
    def of(cls, logits: jax.Array, config: Experts, first: Any = 0, count: int | None = None) -> "Blocks":
        """Returns the blocks of tokens, of whose experts `count` from the `first` are here; all by default."""
        count = config.count if count is None else count
        chosen, shares = route(logits, config)
        flat = _numbers(chosen, first, count)
        size = math.ceil(ROOM * len(flat) / config.count)
        num_more = (len(flat) - 1) // size  # enough, however tokens are distributed
        order = jnp.argsort(flat)
        own = flat[order]  # the expert of each row
        sizes = jnp.bincount(own, length=count)
        more = jnp.maximum(sizes - 1, 0) // size  # [E]
        ends = jnp.cumsum(more)
        rank = jnp.arange(len(flat)) - (jnp.cumsum(sizes) - sizes)[own]  # among the rows of its expert
        block = jnp.where(rank < size, own, count + (ends - more)[own] + rank // size - 1)
        outside = (count + num_more) * size + jnp.arange(len(flat))
        here = jnp.where(own < count, block * size + rank % size, outside)
        places = jnp.zeros_like(flat).at[order].set(here)
        experts = jnp.append(jnp.arange(count), (jnp.arange(num_more)[:, None] >= ends[None]).sum(-1))
        return cls(shares, places, experts, size, count)

    def spread(self, x: jax.Array) -> jax.Array:
        """[N, I] -> [K, M, I]."""
        rows = jnp.zeros((len(self.experts) * self.size, x.shape[1]), x.dtype)
        rows = rows.at[self.places].set(jnp.repeat(x, self.shares.shape[1], axis=0), unique_indices=True, mode="drop")
        return rows.reshape(len(self.experts), self.size, -1)

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[K, M, I], [E, I, O] -> [K, M, O]; a step in which each expert has one block leaves the others out."""

        def zeros(x: jax.Array) -> jax.Array:
            return jnp.zeros((*x.shape[:-1], kernel.shape[-1]), x.dtype)

        def of_block(x: jax.Array, expert: jax.Array) -> jax.Array:
            return jax.lax.cond(expert < self.count, lambda: x @ kernel.at[expert].get(mode="clip"), lambda: zeros(x))

        def of_more(x: jax.Array, experts: jax.Array) -> jax.Array:
            each = functools.partial(jax.lax.map, lambda block: jax.checkpoint(of_block)(*block))
            return jax.lax.cond(experts[0] < self.count, lambda: each((x, experts)), lambda: zeros(x))

        y = x[: self.count] @ kernel
        more = x[self.count :], self.experts[self.count :]
        return jnp.concatenate([y, of_more(*more)]) if len(more[1]) else y

    def rows(self, bias: jax.Array) -> jax.Array:
        """[E, O] -> [K, 1, O]."""
        return bias.at[self.experts].get(mode="clip")[:, None]

    def collect(self, y: jax.Array) -> jax.Array:
        """[K, M, O] -> [N, O], the sum over a token's experts."""
        back = y.reshape(-1, y.shape[-1]).at[self.places].get(**FILLED)
        return jnp.einsum("nxo,nx->no", back.reshape(*self.shares.shape, -1), self.shares.astype(y.dtype))


WAYS: dict[str, Any] = {"blocks": Blocks, "ragged": Ragged}


def _numbers(chosen: jax.Array, first: Any, count: int) -> jax.Array:
    """Returns the experts of tokens by their numbers here, and `count` for those elsewhere. [N, X] -> [N X]."""
    flat = chosen.reshape(-1) - first
    return jnp.where((flat >= 0) & (flat < count), flat, count)
