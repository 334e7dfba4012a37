"""Keys and values of the tokens so far, for generation.

Shapes: L layers, B batch, T places, S new tokens, K heads of keys and values, C size of a head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero.hf import ModelConfig


class Cache(NamedTuple):
    """Keys and values of the tokens so far. Rows end at the same place; short ones begin with padding."""

    keys: jax.Array  # [L, B, T, K, C]
    values: jax.Array  # [L, B, T, K, C]
    used: jax.Array  # how many places hold tokens or padding

    def write(self, layer: jax.Array, k: jax.Array, v: jax.Array) -> tuple["Cache", jax.Array, jax.Array]:
        """Adds new keys and values of a layer, [B, S, K, C]; returns all of that layer beside the cache."""
        start = (layer, 0, self.used, 0, 0)
        keys = jax.lax.dynamic_update_slice(self.keys, k[None], start)
        values = jax.lax.dynamic_update_slice(self.values, v[None], start)
        return Cache(keys, values, self.used), keys[layer], values[layer]


def make_cache(config: ModelConfig, batch_size: int, num_places: int, dtype: Any) -> Cache:
    """Returns a cache without tokens."""
    shape = (config.num_layers, batch_size, num_places, config.num_kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))
