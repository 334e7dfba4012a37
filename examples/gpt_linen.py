"""A byte-level GPT in Flax Linen.

Nothing in this file is about ZeRO, and that is the point: jzero takes the train state and the loss as they are.

Shapes: B batch, S sequence, D model width, H heads, V vocabulary, L layers.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from gpt import VOCAB_SIZE, GPTConfig, next_byte_loss

KERNEL_INIT = nn.initializers.normal(0.02)


class Block(nn.Module):
    """Attention, then an MLP, each behind a layer norm and added to the stream."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, D]
        x = x + self._attention(nn.LayerNorm(name="attention_norm")(x))
        return x + self._mlp(nn.LayerNorm(name="mlp_norm")(x))

    def _attention(self, x: jax.Array) -> jax.Array:
        batch_size, seq_len, d_model = x.shape
        heads = (batch_size, seq_len, self.config.num_heads, d_model // self.config.num_heads)
        qkv = nn.Dense(3 * d_model, kernel_init=KERNEL_INIT, name="qkv")(x)
        query, key, value = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))  # [B, S, H, D/H]
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return nn.Dense(d_model, kernel_init=KERNEL_INIT, name="attention_out")(attended.reshape(x.shape))

    def _mlp(self, x: jax.Array) -> jax.Array:
        d_model = x.shape[-1]
        hidden = nn.gelu(nn.Dense(4 * d_model, kernel_init=KERNEL_INIT, name="mlp_in")(x))
        return nn.Dense(d_model, kernel_init=KERNEL_INIT, name="mlp_out")(hidden)


class GPT(nn.Module):
    """Maps bytes [B, S] to the logits of the byte after each, [B, S, V]."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        positions = jnp.arange(tokens.shape[1])[None]  # [1, S]
        x = nn.Embed(VOCAB_SIZE, config.d_model, embedding_init=KERNEL_INIT, name="embed")(tokens)
        x = x + nn.Embed(config.seq_len, config.d_model, embedding_init=KERNEL_INIT, name="positions")(positions)
        x = self._scanned(x) if config.scan else self._unrolled(x)
        x = nn.LayerNorm(name="final_norm")(x)
        return nn.Dense(VOCAB_SIZE, kernel_init=KERNEL_INIT, name="head")(x)

    def _unrolled(self, x: jax.Array) -> jax.Array:
        block = nn.remat(Block) if self.config.remat else Block
        for index in range(self.config.num_layers):
            x = block(self.config, name=f"block_{index}")(x)
        return x

    def _scanned(self, x: jax.Array) -> jax.Array:
        # Every parameter of the blocks gets a leading dimension L.
        # jzero gathers one layer at a time, inside the loop.
        block = nn.remat(Block, prevent_cse=False) if self.config.remat else Block
        scan = nn.scan(
            lambda layer, carry: (layer(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.config.num_layers,
        )
        x, _ = scan(block(self.config, name="blocks"), x)
        return x


def make_state_fn(config: GPTConfig, tx: optax.GradientTransformation) -> Callable[[jax.Array], TrainState]:
    """Returns a function from a PRNG key to a Flax train state: the usual one, of whole parameters."""
    model = GPT(config)

    def make_state(key: jax.Array) -> TrainState:
        tokens = jnp.zeros((1, config.seq_len), jnp.int32)
        return TrainState.create(apply_fn=model.apply, params=model.init(key, tokens)["params"], tx=tx)

    return make_state


def make_loss_fn(config: GPTConfig) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns `loss_fn(params, batch)` over whole parameters and bytes [B, S + 1]."""
    model = GPT(config)

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return next_byte_loss(model.apply({"params": params}, batch[:, :-1]), batch[:, 1:])

    return loss_fn


def params_and_opt_state(state: TrainState) -> tuple[Any, Any]:
    """Returns the two trees of arrays that training keeps on the devices."""
    return state.params, state.opt_state
