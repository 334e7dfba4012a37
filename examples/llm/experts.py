"""Mixtures of experts: which experts a token goes to, and two ways to multiply with their kernels.

Both sort the tokens, once for each of their experts. `Blocks` cuts them into blocks of equal size, each of one expert,
and multiplies a batch of matrices, as any backend can: at most twice the operations that are needed. `Ragged` gives
each group its own kernel (`jax.lax.ragged_dot`), with no more operations than needed on TPUs. Elsewhere jax 0.10 to
0.12 multiply all that is sorted with every expert.

Shapes: N tokens, E experts, X experts that a token goes to, I input and O output features,
K blocks of M rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero.hf import Experts


def route(logits: jax.Array, config: Experts) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token, [N, X], and their shares in the result, fp32 [N, X], by logits [N, E]."""
    best, chosen = jax.lax.top_k(logits.astype(jnp.float32), config.per_token)
    if config.normalized:  # the softmax over all, divided by its sum over the best, is the softmax over the best
        return chosen, jax.nn.softmax(best, axis=-1)
    return chosen, jnp.exp(best - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True))


class Ragged(NamedTuple):
    """Tokens, once for each of their experts, sorted by expert."""

    shares: jax.Array  # [N, X]
    order: jax.Array  # [N X], into tokens repeated X times
    experts: jax.Array  # [N X], sorted
    sizes: jax.Array  # [E], tokens per expert

    @classmethod
    def of(cls, logits: jax.Array, config: Experts) -> "Ragged":
        """Returns the order of tokens by their experts."""
        chosen, shares = route(logits, config)
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat)
        return cls(shares, order, flat[order], jnp.bincount(flat, length=config.count))

    @property
    def count(self) -> int:
        """E."""
        return len(self.sizes)

    def spread(self, x: jax.Array) -> jax.Array:
        """[N, I] -> [N X, I]."""
        return jnp.repeat(x, self.shares.shape[1], axis=0).at[self.order].get(unique_indices=True)

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[N X, I], [E, I, O] -> [N X, O]."""
        return jax.lax.ragged_dot(x, kernel, self.sizes)

    def rows(self, bias: jax.Array) -> jax.Array:
        """[E, O] -> [N X, O]."""
        return bias[self.experts]

    def collect(self, y: jax.Array) -> jax.Array:
        """[N X, O] -> [N, O], the sum over a token's experts."""
        back = y.at[jnp.argsort(self.order)].get(unique_indices=True)  # in the order of tokens
        return jnp.einsum("nxo,nx->no", back.reshape(*self.shares.shape, -1), self.shares.astype(y.dtype))


class Blocks(NamedTuple):
    """Tokens, once for each of their experts, in blocks of one expert each; zeros fill the last block of an expert."""

    shares: jax.Array  # [N, X]
    places: jax.Array  # [N X], of tokens repeated X times, among the rows of all blocks
    experts: jax.Array  # [K]
    size: int  # M
    count: int  # E

    @classmethod
    def of(cls, logits: jax.Array, config: Experts) -> "Blocks":
        """Returns the blocks of tokens."""
        chosen, shares = route(logits, config)
        flat = chosen.reshape(-1)
        size = -(-len(flat) // config.count)
        num_blocks = min(len(flat), len(flat) // size + config.count)  # enough, however tokens are distributed
        order = jnp.argsort(flat)
        own = flat[order]  # the expert of each row
        sizes = jnp.bincount(own, length=config.count)
        blocks = -(-sizes // size)  # [E]
        ends, starts = jnp.cumsum(blocks), jnp.cumsum(blocks) - blocks
        rank = jnp.arange(len(flat)) - (jnp.cumsum(sizes) - sizes)[own]  # among the rows of its expert
        places = jnp.zeros_like(flat).at[order].set(starts[own] * size + rank)
        experts = (jnp.arange(num_blocks)[:, None] >= ends[None]).sum(-1)
        return cls(shares, places, jnp.minimum(experts, config.count - 1), size, config.count)

    def spread(self, x: jax.Array) -> jax.Array:
        """[N, I] -> [K, M, I]."""
        rows = jnp.zeros((len(self.experts) * self.size, x.shape[1]), x.dtype)
        rows = rows.at[self.places].set(jnp.repeat(x, self.shares.shape[1], axis=0), unique_indices=True)
        return rows.reshape(len(self.experts), self.size, -1)

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[K, M, I], [E, I, O] -> [K, M, O]."""
        return x @ kernel[self.experts]

    def rows(self, bias: jax.Array) -> jax.Array:
        """[E, O] -> [K, 1, O]."""
        return bias[self.experts][:, None]

    def collect(self, y: jax.Array) -> jax.Array:
        """[K, M, O] -> [N, O], the sum over a token's experts."""
        back = y.reshape(-1, y.shape[-1]).at[self.places].get(unique_indices=True)
        return jnp.einsum("nxo,nx->no", back.reshape(*self.shares.shape, -1), self.shares.astype(y.dtype))


WAYS: dict[str, Any] = {"blocks": Blocks, "ragged": Ragged}
