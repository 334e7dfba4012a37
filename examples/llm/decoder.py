"""One decoder for Llama 2 and 3, Mistral, Mixtral, Qwen 2 and 3, OLMoE, gpt-oss, and the text models of Gemma 1 to 3.

`jzero.hf.read_config` reads what differs between them. The layers are one scan, whose body is recomputed in the
backward pass; what kernels of attention compute is kept unless devices share rows. Products have the dtype of the
embedding; norms, angles, softmax and logits are computed in fp32.

Shapes: B batch, S tokens, T places that are attended to, D width, H heads, K heads of keys and values, C size of a
head, F hidden width, V vocabulary, L layers; of mixtures of experts also N = B S tokens, E experts.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from expert_parallel import Apart, own_rows
from experts import WAYS
from jzero.attention import save_attention, whole_rows
from jzero.attention.causal import attend_in_parts
from jzero.attention.plain import Places, Scores, attend_plainly, cap, divide, join
from jzero.hf import ModelConfig
from kv_cache import Cache

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "gate_up", "down")
NO_WINDOW = np.iinfo(np.int32).max
KERNEL_INIT = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters `lora_a`, `lora_b` beside the projections whose whole name a regular expression matches."""

    rank: int
    alpha: float
    modules: str = ".*"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"`rank` must be at least 1: got {self.rank}.")
        if not self.names:
            raise ValueError(f"`modules` {self.modules!r} matches none of the projections {', '.join(PROJECTIONS)}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The projections with adapters."""
        return tuple(name for name in PROJECTIONS if re.fullmatch(self.modules, name))


class Norm(nn.Module):
    """Root-mean-square norm of the last dimension."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.config.unit_norm else nn.initializers.ones
        scale = self.param("scale", init, x.shape[-1:]).astype(jnp.float32)
        scale = 1 + scale if self.config.unit_norm else scale
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.config.eps)
        return (wide * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class Projection(nn.Module):
    """A product with a kernel, perhaps with a bias, perhaps with adapters: `x W + b + alpha / rank x A B`.

    With experts there are E of each, and tokens are in the order in which those multiply them.
    """

    features: int
    bias: bool
    lora: Lora | None

    @nn.compact
    def __call__(self, x: jax.Array, experts: Any = None) -> jax.Array:  # [..., I] -> [..., O]
        stack = () if experts is None else (experts.count,)
        multiply = jnp.matmul if experts is None else experts.multiply

        def param(name: str, init: Any, *shape: int) -> jax.Array:
            # Cast, since adapters may be wider than the stream, which is the carry of the scan.
            return self.param(name, init, (*stack, *shape)).astype(x.dtype)

        y = multiply(x, param("kernel", KERNEL_INIT, x.shape[-1], self.features))
        if self.bias:
            bias = param("bias", nn.initializers.zeros, self.features)
            y += bias[None, None] if experts is None else experts.rows(bias)
        if self.lora is not None:
            # As PEFT draws A.
            uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=range(len(stack)))
            a = param("lora_a", uniform, x.shape[-1], self.lora.rank)
            b = param("lora_b", nn.initializers.zeros, self.lora.rank, self.features)
            y += multiply(multiply(x, a), b) * (self.lora.alpha / self.lora.rank)
        return y


class PerLayer(NamedTuple):
    """What differs between layers besides parameters. The scan cuts the L off."""

    index: jax.Array  # [L]
    window: jax.Array  # [L]
    kind: jax.Array  # [L], the place of its window in `windows_of`
    frequencies: jax.Array  # [L, C/2]


def windows_of(config: ModelConfig) -> Sequence[int | None]:
    """Returns the different windows of a model's layers, in the order of `PerLayer.kind`."""
    return list(dict.fromkeys(config.windows))


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns pairs of numbers by angles, fp32 [B, S, C/2]. [B, S, H, C]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Layer(nn.Module):
    """Attention, then a gated MLP or experts, each behind a norm and added to the stream."""

    config: ModelConfig
    lora: Lora | None
    product: str
    context: str | None
    mesh: Mesh | None
    attention: str

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, Cache | None], layer: PerLayer, places: Places, seen: Places
    ) -> tuple[tuple[jax.Array, Cache | None], None]:  # [B, S, D] and the cache, of one layer, [B, S], [B, T]
        x, cache = carry
        x = own_rows(x, self.mesh)
        y, cache = self._attention(self._norm("attention_norm", x), cache, layer, places, seen)
        x = x + (self._norm("attention_post_norm", y) if self.config.post_norms else y)
        y = self._mlp(self._norm("mlp_norm", x))
        x = x + (self._norm("mlp_post_norm", y) if self.config.post_norms else y)
        return (x, cache), None

    def _attention(self, x: jax.Array, cache: Cache | None, layer: PerLayer, places: Places, seen: Places) -> Any:
        config, (num_rows, num_tokens, _) = self.config, x.shape

        def heads(name: str, count: int) -> jax.Array:
            y = self._project(name, x, count * config.head_dim, bias=config.qkv_bias)
            shape = (num_rows, num_tokens, count, config.head_dim)
            y = y if config.joint_qk_norm else y.reshape(shape)
            y = self._norm(f"{name}_norm", y) if config.qk_norm and name != "v" else y
            return y.reshape(shape)

        q = heads("q", config.num_heads)  # [B, S, H, C]
        k, v = (heads(name, config.num_kv_heads) for name in "kv")  # [B, S, K, C]
        angles = places.positions[..., None] * layer.frequencies[None, None]  # [B, S, C/2]
        q, k = rotate(q, angles), rotate(k, angles)
        own = k, v
        if cache is not None:
            cache, k, v = cache.write(layer.index, k, v)  # [B, T, K, C]
        sinks = self.param("sinks", KERNEL_INIT, (config.num_heads,)) if config.sinks else None
        if cache is not None and num_tokens > 1 and self.attention != "plain":  # a prompt sees itself alone
            itself = places._replace(segments=jnp.where(places.positions < 0, -1, 0))
            y = self._by_window(layer.kind, q, *own, itself, itself, sinks)
        elif cache is not None or (self.attention == "plain" and self.context is None):
            y = attend_plainly(q, k, v, places, seen, self._scores(layer.window, sinks))
        else:
            y = self._by_window(layer.kind, q, k, v, places, seen, sinks)
        y = y.reshape(num_rows, num_tokens, -1)  # [B, S, H C]
        return self._project("o", y, config.d_model, bias=config.o_bias), cache

    def _by_window(self, kind: jax.Array, *operands: Any) -> jax.Array:
        """Returns attention with the layer's window, on which a kernel's program and what devices exchange depend."""

        def of(window: int | None) -> Any:
            return lambda *operands: attend_in_parts(
                self.attention, *operands[:-1], self._scores(window, operands[-1]), self.context
            )

        ways = [of(window) for window in windows_of(self.config)]
        return ways[0](*operands) if len(ways) == 1 else jax.lax.switch(kind, ways, *operands)

    def _scores(self, window: Any, sinks: jax.Array | None) -> Scores:
        return Scores(window, self.config.attn_softcap, sinks, self.config.attn_scale)

    def _mlp(self, x: jax.Array) -> jax.Array:
        config = self.config
        if config.experts is None:
            return self._gated(x)
        logits = self._project("router", x, config.experts.count, bias=config.experts.router_bias)  # [B, S, E]
        self.sow("router", "logits", logits)
        flat = x.reshape(-1, config.d_model)
        sort = WAYS[self.product].of if self.mesh is None else functools.partial(Apart.of, self.mesh, self.product)
        experts = sort(logits.reshape(len(flat), -1), config.experts)
        return experts.collect(self._gated(experts.spread(flat), experts)).reshape(x.shape)

    def _gated(self, x: jax.Array, experts: Any = None) -> jax.Array:
        config, kind = self.config, self.config.experts
        how = {"bias": config.mlp_bias, "experts": experts}
        if kind is not None and kind.packed:
            both = self._project("gate_up", x, 2 * config.d_hidden, **how)
            gate, up = both[..., ::2], both[..., 1::2]  # [..., F]
        else:
            gate, up = (self._project(name, x, config.d_hidden, **how) for name in ("gate", "up"))
        if kind is not None and kind.clamp is not None:
            gate, up = jnp.minimum(gate, kind.clamp), jnp.clip(up, -kind.clamp, kind.clamp) + 1
            gate *= nn.sigmoid(kind.gate_factor * gate)
        else:
            gate = nn.gelu(gate, approximate=True) if config.gelu else nn.silu(gate)
        return self._project("down", gate * up, config.d_model, **how)

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return Norm(self.config, name=name)(x)

    def _project(self, name: str, x: jax.Array, features: int, *, bias: bool = False, experts: Any = None) -> jax.Array:
        adapted = self.lora is not None and name in self.lora.names
        return Projection(features, bias, self.lora if adapted else None, name=name)(x, experts)


class Decoder(nn.Module):
    """Maps tokens [B, S] to the logits of the token after each, fp32 [B, S, V].

    Positions [B, S] count from 0 in each example: by default, each row is one. With segments [B, S], tokens see only
    those of their own. With a cache, tokens follow those in it, and padding before a row has negative positions; the
    result is the logits after the last token, [B, 1, V], and the new cache.

    `product` is a key of `experts.WAYS`. `apply(..., mutable=["router"])` adds the routers' logits, [L, B, S, E].

    With targets [B, S] the result is the cross entropy of each, fp32 [B, S]; the logits of one of `loss_chunks` parts
    of the tokens exist at a time. With `context`, devices along that mesh axis have S tokens each of the same rows.

    With a `mesh`, devices along its axis `experts` have different ones (`expert_parallel.py`).

    `attention` is "plain" or a key of `jzero.attention.KERNELS`. With a cache, that is how prompts are read, with which
    it begins; of one token, attention is plain.
    """

    config: ModelConfig
    lora: Lora | None = None
    product: str = "blocks"
    context: str | None = None
    loss_chunks: int = 1
    mesh: Mesh | None = None
    attention: str = "plain"

    @nn.compact
    def __call__(
        self, tokens: jax.Array, positions: Any = None, segments: Any = None, cache: Any = None, targets: Any = None
    ) -> Any:
        config = self.config
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        places = Places(positions, jnp.zeros_like(positions) if segments is None else segments)
        seen = Places(*(whole_rows(x, self.context) for x in places))  # [B, T]
        if cache is not None:
            seen_positions = jnp.arange(cache.keys.shape[2])[None] + positions[:, :1] - cache.used
            seen = Places(seen_positions, jnp.zeros_like(seen_positions))

        embed = nn.Embed(config.vocab_size, config.d_model, embedding_init=KERNEL_INIT, name="embed")
        x = embed(tokens)  # [B, S, D]
        x *= jnp.asarray(config.embed_scale, x.dtype)
        windows = jnp.array([NO_WINDOW if window is None else window for window in config.windows])
        kinds = jnp.array([windows_of(config).index(window) for window in config.windows])
        frequencies = jnp.array(config.inverse_frequencies, jnp.float32)
        layers = PerLayer(jnp.arange(config.num_layers), windows, kinds, frequencies)
        policy = save_attention if self.context is None else None  # devices share rows where memory is short
        body = nn.remat(Layer, prevent_cse=False, policy=policy) if cache is None else Layer
        axes = {
            "variable_axes": {"params": 0, "router": 0},
            "split_rngs": {"params": True},
            "length": config.num_layers,
        }
        scan = nn.scan(body, in_axes=(0, nn.broadcast, nn.broadcast), **axes)
        scanned = scan(config, self.lora, self.product, self.context, self.mesh, self.attention, name="layers")
        (x, cache), _ = scanned((x, cache), layers, places, seen)
        x = x if cache is None else x[:, -1:]
        x = Norm(config, name="norm")(x)
        head = embed if config.tied else Projection(config.vocab_size, False, None, name="head")
        if targets is not None:
            return self._losses(head, x, targets)
        logits = self._logits(head, x)
        return logits if cache is None else (logits, cache._replace(used=cache.used + tokens.shape[1]))

    def _logits(self, head: nn.Embed | Projection, x: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, V]
        logits = head.attend(x) if isinstance(head, nn.Embed) else head(x)
        return cap(logits.astype(jnp.float32), self.config.final_softcap)

    def _losses(self, head: nn.Embed | Projection, x: jax.Array, targets: jax.Array) -> jax.Array:  # [B, S]
        def of_part(head: Any, none: None, part: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            return none, optax.softmax_cross_entropy_with_integer_labels(self._logits(head, part[0]), part[1])

        if self.loss_chunks == 1:
            return of_part(head, None, (x, targets))[1]
        parts = divide((x, targets), self.loss_chunks)
        axes = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return join(nn.scan(nn.remat(of_part, prevent_cse=False), **axes)(head, None, parts)[1])
