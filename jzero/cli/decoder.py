"""A decoder in plain JAX by the sizes of a `ModelConfig`, to estimate and compile steps of published models.

Scanned layers, each recomputed in the backward pass; grouped queries, rotary positions, gated feed-forward blocks.
Windows and soft caps of attention change no shape, so they are left out: this decoder is for memory and time, not for
weights.

Shapes: B batch, S sequence, D model width, H heads, K heads of keys and values, C head size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.core.state.train_state import TrainState
from jzero.weights.config import ModelConfig
from jzero.weights.families import param_shapes

PyTree = Any
ADAPTERS = r".*/lora_[ab]"
"""The paths of adapters."""
ALPHA_OVER_RANK = 2.0


def make_state(config: ModelConfig, *, rank: int, base_dtype: Any) -> Callable[[jax.Array], TrainState]:
    """Returns a function from a key to a train state with AdamW.

    Args:
      config: The sizes.
      rank: Rank of the adapters beside each kernel of a layer; 0 for none.
      base_dtype: The dtype of what is not an adapter.
    """
    shapes = _shapes(config, rank)

    def make(key: jax.Array) -> TrainState:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(leaves))
        initialised = [
            _leaf(path[-1].key, shape, base_dtype, key) for (path, shape), key in zip(leaves, keys, strict=True)
        ]
        return TrainState.create(
            params=jax.tree.unflatten(treedef, initialised), tx=optax.adamw(3e-4, weight_decay=0.1)
        )

    return make


def _shapes(config: ModelConfig, rank: int) -> PyTree:
    nested: PyTree = {}
    for path, shape in param_shapes(config, rank=rank).items():
        *outer, last = path.split("/")
        functools.reduce(lambda tree, key: tree.setdefault(key, {}), outer, nested)[last] = shape
    return nested


def _leaf(name: str, shape: tuple[int, ...], base_dtype: Any, key: jax.Array) -> jax.Array:
    dtype = jnp.float32 if name.startswith("lora") else base_dtype
    if name == "scale":
        return jnp.ones(shape, dtype)
    if name in ("bias", "lora_b", "sinks"):
        return jnp.zeros(shape, dtype)
    return 0.02 * jax.random.normal(key, shape, dtype)


def make_loss(config: ModelConfig) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Returns the loss of tokens [B, S + 1]: the mean cross-entropy of each after those before it."""

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        embedding = params["embed"]["embedding"]
        with jax.named_scope("embed"):
            x = config.embed_scale * embedding[tokens[:, :-1]]  # [B, S, D]
        with jax.named_scope("layers"):
            layer = jax.checkpoint(lambda x, w: (_layer(config, x, w), None), prevent_cse=False)
            x, _ = jax.lax.scan(layer, x, params["layers"])
        with jax.named_scope("head"):
            x = _norm(config, x, params["norm"])
            logits = x @ (embedding.T if config.tied else params["head"]["kernel"])  # [B, S, V]
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    return loss_fn


def _layer(config: ModelConfig, x: jax.Array, w: PyTree) -> jax.Array:
    """Attention, then a feed-forward block, each behind a norm and added to the stream [B, S, D]."""

    def added(x: jax.Array, y: jax.Array, name: str) -> jax.Array:
        return x + (_norm(config, y, w[name]) if config.post_norms else y)

    x = added(x, _attention(config, _norm(config, x, w["attention_norm"]), w), "attention_post_norm")
    y = _norm(config, x, w["mlp_norm"])
    return added(x, (_gated if config.experts is None else _experts)(config, y, w), "mlp_post_norm")


def _gated(config: ModelConfig, x: jax.Array, w: PyTree) -> jax.Array:
    packed = "gate_up" in w
    gate, up = jnp.split(_dense(x, w["gate_up"]), 2, axis=-1) if packed else (_dense(x, w["gate"]), _dense(x, w["up"]))
    return _dense((jax.nn.gelu if config.gelu else jax.nn.silu)(gate) * up, w["down"])


def _experts(config: ModelConfig, x: jax.Array, w: PyTree) -> jax.Array:
    """A mixture of experts, in blocks of rows as in `examples/llm/experts.py`; which rows makes no difference here."""
    assert config.experts is not None
    flat, count, per_token = x.reshape(-1, x.shape[-1]), config.experts.count, config.experts.per_token
    best, _ = jax.lax.top_k(_dense(flat, w["router"]), per_token)  # [N, experts of a token]
    size = -(-best.size // count)
    num_blocks = min(best.size, best.size // size + count)
    rows = jnp.repeat(flat, per_token, axis=0)
    rows = jnp.pad(rows, ((0, num_blocks * size - best.size), (0, 0))).reshape(num_blocks, size, -1)
    experts = jnp.arange(num_blocks) % count
    names = [name for name in ("gate", "up", "gate_up", "down") if name in w]
    y = _gated(config, rows, jax.tree.map(lambda x: x[experts], {name: w[name] for name in names}))
    y = y.reshape(num_blocks * size, -1)[: best.size].reshape(*best.shape, -1)
    return jnp.einsum("nxd,nx->nd", y, jax.nn.softmax(best, axis=-1)).reshape(x.shape)


def _attention(config: ModelConfig, x: jax.Array, w: PyTree) -> jax.Array:
    def heads(name: str, number: int) -> jax.Array:  # [B, S, H or K, C]
        y, shape = _dense(x, w[name]), (*x.shape[:2], number, config.head_dim)
        y = y if config.joint_qk_norm else y.reshape(shape)
        y = _norm(config, y, w[f"{name}_norm"]) if config.qk_norm and name != "v" else y
        return y.reshape(shape)

    frequencies = jnp.asarray(config.inverse_frequencies[0], jnp.float32)  # [C / 2]
    query, key = (_rotate(heads(*x), frequencies) for x in (("q", config.num_heads), ("k", config.num_kv_heads)))
    value = heads("v", config.num_kv_heads)
    attended = jax.nn.dot_product_attention(query, key, value, scale=config.attn_scale, is_causal=True)
    return _dense(attended.reshape(*x.shape[:2], -1), w["o"])


def _dense(x: jax.Array, w: PyTree) -> jax.Array:
    y = x @ w["kernel"]
    if "bias" in w:
        y = y + _row(w["bias"], y)
    if "lora_a" in w:
        y = y + ALPHA_OVER_RANK * ((x @ w["lora_a"].astype(x.dtype)) @ w["lora_b"].astype(x.dtype))
    return y


def _norm(config: ModelConfig, x: jax.Array, w: PyTree) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.eps)
    return (wide * _row(w["scale"].astype(jnp.float32), x)).astype(x.dtype)


def _row(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a vector, or one per expert, with the dimensions of `like` before its last one."""
    return jnp.expand_dims(x, tuple(range(x.ndim - 1, like.ndim - 1)))


def _rotate(x: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotary positions of [B, S, H, C]."""
    angles = jnp.outer(jnp.arange(x.shape[1]), frequencies)[None, :, None]  # [1, S, 1, C / 2]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
