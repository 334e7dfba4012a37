"""Decoder-only transformers from 124M to 70B parameters, for the command line and for planning.

    jzero plan decoder_models:llama_70b --devices 64 --precision bf16
    jzero fit decoder_models:llama_7b --topology h100:8 --precision bf16

Each function at the end returns `(make_state, loss_fn, batch)`. Nothing is allocated: the batch is a shape, and
`make_state` makes the state from a key. The layers are one `scan`, whose body is recomputed in the backward pass.

Shapes: B batch, S sequence, D model width, H heads, K heads of keys and values, V vocabulary, L layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

Factory = tuple[Callable[[jax.Array], TrainState], Callable[[Any, jax.Array], jax.Array], jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a pre-norm decoder with rotary positions.

    Attributes:
      d_model: Width of the residual stream.
      num_layers: Number of blocks.
      num_heads: Attention heads per block; divides `d_model`.
      num_kv_heads: Heads of keys and values; divides `num_heads`.
      d_hidden: Width of the MLP.
      gated: Whether the MLP is a SwiGLU, with three matrices instead of two.
      vocab_size: Number of tokens.
      tied: Whether the embedding is the head, too.
    """

    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    d_hidden: int
    gated: bool
    vocab_size: int
    tied: bool


class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and added to the stream."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:  # [B, S, D]
        x = x + self._attention(nn.RMSNorm(name="attention_norm")(x))
        return x + self._mlp(nn.RMSNorm(name="mlp_norm")(x)), None

    def _attention(self, x: jax.Array) -> jax.Array:
        config = self.config
        head_size = config.d_model // config.num_heads

        def heads(name: str, count: int) -> jax.Array:
            return _dense(count * head_size, name)(x).reshape(*x.shape[:2], count, head_size)

        query = _rotate(heads("query", config.num_heads))
        key, value = _rotate(heads("key", config.num_kv_heads)), heads("value", config.num_kv_heads)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return _dense(config.d_model, "attention_out")(attended.reshape(x.shape))

    def _mlp(self, x: jax.Array) -> jax.Array:
        hidden = _dense(self.config.d_hidden, "mlp_in")(x)
        gate = nn.silu(_dense(self.config.d_hidden, "mlp_gate")(x)) if self.config.gated else None
        hidden = nn.gelu(hidden) if gate is None else gate * hidden
        return _dense(self.config.d_model, "mlp_out")(hidden)


class Decoder(nn.Module):
    """Maps tokens [B, S] to the logits of the token after each, [B, S, V]."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        embed = nn.Embed(config.vocab_size, config.d_model, name="embed")
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=config.num_layers,
        )
        x, _ = blocks(config, name="blocks")(embed(tokens), None)
        x = nn.RMSNorm(name="final_norm")(x)
        return embed.attend(x) if config.tied else _dense(config.vocab_size, "head")(x)


def _dense(size: int, name: str) -> nn.Dense:
    return nn.Dense(size, use_bias=False, kernel_init=nn.initializers.normal(0.02), name=name)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [B, S, H, D/H]."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** -(jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies[None])[None, :, None]  # [1, S, 1, D/2H]
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def factory(config: DecoderConfig, *, batch_size: int, seq_len: int) -> Factory:
    """Returns `(make_state, loss_fn, batch)`; `batch` is the shape of tokens [B, S + 1] of all devices."""
    model = Decoder(config)

    def make_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, seq_len), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4, weight_decay=0.1))

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return make_state, loss_fn, jax.ShapeDtypeStruct((batch_size, seq_len + 1), jnp.int32)


def gpt_124m() -> Factory:
    """GPT-2 small: 8 sequences of 1024 tokens on each of 8 devices."""
    return factory(_gpt(768, 12, 12, tied=True), batch_size=64, seq_len=1024)


def gpt_1_4b() -> Factory:
    """A GPT of 1.4B parameters: 4 sequences of 1024 tokens on each of 8 devices."""
    return factory(_gpt(2048, 24, 16, tied=False), batch_size=32, seq_len=1024)


def llama_7b() -> Factory:
    """The sizes of Llama 2 7B: a sequence of 4096 tokens on each of 8 devices."""
    return factory(_llama(4096, 32, 32, 32, 11_008), batch_size=8, seq_len=4096)


def llama_70b() -> Factory:
    """The sizes of Llama 2 70B: a sequence of 4096 tokens on each of 64 devices."""
    return factory(_llama(8192, 80, 64, 8, 28_672), batch_size=64, seq_len=4096)


def _gpt(d_model: int, num_layers: int, num_heads: int, *, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        d_hidden=4 * d_model,
        gated=False,
        vocab_size=50_257,
        tied=tied,
    )


def _llama(d_model: int, num_layers: int, num_heads: int, num_kv_heads: int, d_hidden: int) -> DecoderConfig:
    return DecoderConfig(
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_hidden=d_hidden,
        gated=True,
        vocab_size=32_000,
        tied=False,
    )
