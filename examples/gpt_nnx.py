"""The same byte-level GPT in Flax NNX.

Nothing in this file is about ZeRO, and that is the point: jzero takes the model, the optimizer and the loss as they
are.

Shapes: B batch, S sequence, D model width, H heads, V vocabulary, L layers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gpt import VOCAB_SIZE, GPTConfig, next_byte_loss

KERNEL_INIT = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """Attention, then an MLP, each behind a layer norm and added to the stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        d_model = config.d_model
        self.num_heads = config.num_heads
        self.attention_norm = nnx.LayerNorm(d_model, rngs=rngs)
        self.qkv = nnx.Linear(d_model, 3 * d_model, kernel_init=KERNEL_INIT, rngs=rngs)
        self.attention_out = nnx.Linear(d_model, d_model, kernel_init=KERNEL_INIT, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(d_model, rngs=rngs)
        self.mlp_in = nnx.Linear(d_model, 4 * d_model, kernel_init=KERNEL_INIT, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * d_model, d_model, kernel_init=KERNEL_INIT, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, S, D]
        x = x + self._attention(self.attention_norm(x))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attention(self, x: jax.Array) -> jax.Array:
        batch_size, seq_len, d_model = x.shape
        heads = (batch_size, seq_len, self.num_heads, d_model // self.num_heads)
        query, key, value = (part.reshape(heads) for part in jnp.split(self.qkv(x), 3, axis=-1))  # [B, S, H, D/H]
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(attended.reshape(x.shape))


class GPT(nnx.Module):
    """Maps bytes [B, S] to the logits of the byte after each, [B, S, V]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(VOCAB_SIZE, config.d_model, embedding_init=KERNEL_INIT, rngs=rngs)
        self.positions = nnx.Embed(config.seq_len, config.d_model, embedding_init=KERNEL_INIT, rngs=rngs)
        self.blocks = _stacked_blocks(config, rngs) if config.scan else _listed_blocks(config, rngs)
        self.final_norm = nnx.LayerNorm(config.d_model, rngs=rngs)
        self.head = nnx.Linear(config.d_model, VOCAB_SIZE, kernel_init=KERNEL_INIT, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        apply = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        if self.config.scan:
            # The parameters of the blocks are stacked. jzero gathers one layer at a time, inside the loop.
            x = nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = apply(block, x)
        return self.head(self.final_norm(x))


def _stacked_blocks(config: GPTConfig, rngs: nnx.Rngs) -> Block:
    """Returns one block, all of whose parameters have a leading dimension L."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make_block(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return make_block(rngs)


def _listed_blocks(config: GPTConfig, rngs: nnx.Rngs) -> nnx.List[Block]:
    return nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])


def make_state_fn(
    config: GPTConfig, tx: optax.GradientTransformation
) -> Callable[[jax.Array], tuple[GPT, nnx.Optimizer]]:
    """Returns a function from a PRNG key to the usual pair of a model and its optimizer."""

    def make_state(key: jax.Array) -> tuple[GPT, nnx.Optimizer]:
        model = GPT(config, rngs=nnx.Rngs(key))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    return make_state


def make_loss_fn(config: GPTConfig) -> Callable[[GPT, jax.Array], jax.Array]:
    """Returns `loss_fn(model, batch)` over a whole model and bytes [B, S + 1]."""
    del config  # the model carries it

    def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
        return next_byte_loss(model(batch[:, :-1]), batch[:, 1:])

    return loss_fn


def params_and_opt_state(state: tuple[GPT, nnx.Optimizer]) -> tuple[nnx.State, nnx.State]:
    """Returns the two trees of arrays that training keeps on the devices."""
    model, optimizer = state
    return nnx.state(model, nnx.Param), nnx.state(optimizer)["opt_state"]
