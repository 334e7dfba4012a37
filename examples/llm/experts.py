"""Mixtures of experts: which experts a token goes to, and two ways to multiply with their kernels.

`Ragged` sorts the tokens by expert and multiplies each group with its own kernel (`jax.lax.ragged_dot`). `Dense`
multiplies every token with every expert, which any backend does well, and takes E / X times as many operations.

Shapes: N tokens, E experts, X experts that a token goes to, I input and O output features.
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


class Dense(NamedTuple):
    """All tokens for each expert."""

    shares: jax.Array  # [N, E], zero for experts that the token does not go to

    @classmethod
    def of(cls, logits: jax.Array, config: Experts) -> "Dense":
        """Returns the shares of all experts."""
        chosen, shares = route(logits, config)
        return cls(jnp.einsum("nxe,nx->ne", jax.nn.one_hot(chosen, config.count, dtype=shares.dtype), shares))

    @property
    def count(self) -> int:
        """E."""
        return self.shares.shape[1]

    def spread(self, x: jax.Array) -> jax.Array:
        """[N, I] -> [E, N, I]."""
        return jnp.broadcast_to(x[None], (self.count, *x.shape))

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[E, N, I], [E, I, O] -> [E, N, O]."""
        return x @ kernel

    def rows(self, bias: jax.Array) -> jax.Array:
        """[E, O] -> [E, 1, O]."""
        return bias[:, None]

    def collect(self, y: jax.Array) -> jax.Array:
        """[E, N, O] -> [N, O], the sum over experts by shares."""
        return jnp.einsum("eno,ne->no", y, self.shares.astype(y.dtype))


WAYS: dict[str, Any] = {"ragged": Ragged, "dense": Dense}
