"""The models of `benchmarks.families`: plain functions over trees of parameters, in the sizes of published models.

A model is a tree of shapes and `loss(params, batch, constrain)`. Scanned layers are under the key "stack", unrolled
ones in lists. A step by hand sets the sharding of activations by `constrain`, which is called where each block starts.

Letters of shapes: B batch, S sequence, D width, H heads, F hidden units, E experts, C slots of an expert, N states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

Constrain = Callable[[jax.Array], jax.Array]
Block = Callable[..., jax.Array]
Gather = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Returns the rows of all devices, and the numbers of the own rows among them."""


class Family(NamedTuple):
    """A model that can be trained.

    Attributes:
      shapes: Shapes of the parameters, as tuples in a tree.
      loss: `loss(params, batch, constrain)`.
      batch: Returns the shapes of a batch of that many rows.
      rows: Rows per device.
      gathers: Whether `loss` also takes a `Gather`, since it compares rows of all devices.
    """

    shapes: Any
    loss: Callable[..., jax.Array]
    batch: Callable[[int], Any]
    rows: int = 4
    gathers: bool = False

    def init(self, key: jax.Array) -> Any:
        """Returns parameters, fp32."""
        shapes, tree = jax.tree.flatten(self.shapes, is_leaf=lambda x: isinstance(x, tuple))
        keys = jax.random.split(key, len(shapes))
        return jax.tree.unflatten(tree, [0.02 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)])


def stacked(layer: dict[str, tuple[int, ...]], layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of that many scanned layers."""
    return {name: (layers, *shape) for name, shape in layer.items()}


def run(block: Block, x: jax.Array, layers: Any, constrain: Constrain, *, remat: bool = False) -> jax.Array:
    """Returns what `block(x, layer)` makes of `x`, layer by layer, scanned if the layers are a stack."""
    scanned = isinstance(layers, dict)
    step = lambda x, layer: block(constrain(x), layer)
    if remat:
        step = jax.checkpoint(step, prevent_cse=not scanned)
    if scanned:
        return lax.scan(lambda x, layer: (step(x, layer), None), x, layers)[0]
    for layer in layers:
        x = step(x, layer)
    return x


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6).astype(x.dtype) * scale + bias


def heads(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, size)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def tokens(seq_len: int) -> Callable[[int], jax.ShapeDtypeStruct]:
    return lambda rows: jax.ShapeDtypeStruct((rows, seq_len + 1), jnp.int32)


def biased_layer(width: int) -> dict[str, tuple[int, ...]]:
    norms = {f"norm{i}_{name}": (width,) for i in (1, 2) for name in ("scale", "bias")}
    weights = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    return {**norms, **weights, **{f"{name}_bias": shape[1:] for name, shape in weights.items()}}


def biased_block(x: jax.Array, p: Any, *, causal: bool, head: int = 64) -> jax.Array:  # [B, S, D]
    y = layer_norm(x, p["norm1_scale"], p["norm1_bias"])
    q, k, v = (heads(part, head) for part in jnp.split(y @ p["qkv"] + p["qkv_bias"], 3, axis=-1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape)
    x = x + y @ p["out"] + p["out_bias"]
    y = layer_norm(x, p["norm2_scale"], p["norm2_bias"])
    return x + jax.nn.gelu(y @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def gpt(  # noqa: PLR0913  # what a GPT is made of
    *,
    layers: int = 12,
    scanned: bool,
    seq_len: int = 1024,
    vocab: int = 50304,
    width: int = 768,
    head: int = 64,
    tied: bool = True,
    remat: bool = False,
) -> Family:
    """GPT-2 with learned positions and a tied embedding: 124M with 12 layers; with `remat` it recomputes each block."""
    layer = biased_layer(width)
    blocks = {"stack": stacked(layer, layers)} if scanned else {"layers": [layer] * layers}
    shapes = {"embed": (vocab, width), "positions": (seq_len, width), "scale": (width,), "bias": (width,), **blocks}
    if not tied:
        shapes["head"] = (width, vocab)

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = params["embed"][batch[:, :-1]] + params["positions"]
        block = functools.partial(biased_block, causal=True, head=head)
        x = run(block, x, params["stack" if scanned else "layers"], constrain, remat=remat)
        x = layer_norm(constrain(x), params["scale"], params["bias"])
        return cross_entropy(x @ (params["embed"].T if tied else params["head"]), batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def vit(*, layers: int = 24, width: int = 1024, patch: int = 16, image: int = 224, classes: int = 1000) -> Family:
    """ViT-L/16 with 24 layers of 1024, scanned; the mean over patches is classified."""
    count = (image // patch) ** 2
    shapes: Any = {"patch": (patch * patch * 3, width), "positions": (count, width), "scale": (width,)}
    shapes |= {"stack": stacked(biased_layer(width), layers), "bias": (width,), "head": (width, classes)}

    def batch_of(rows: int) -> Any:
        images = jax.ShapeDtypeStruct((rows, image, image, 3), jnp.float32)
        return {"image": images, "label": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = batch["image"].astype(params["patch"].dtype)
        x = x.reshape(-1, image // patch, patch, image // patch, patch, 3).swapaxes(2, 3)
        x = x.reshape(-1, count, patch * patch * 3) @ params["patch"] + params["positions"]
        x = run(functools.partial(biased_block, causal=False), x, params["stack"], constrain)
        x = layer_norm(constrain(x), params["scale"], params["bias"]).mean(1)
        return cross_entropy(x @ params["head"], batch["label"])

    return Family(shapes, loss, batch_of, rows=32)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [B, S, H, D/H]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gqa_layer(width: int, kv_width: int) -> dict[str, tuple[int, ...]]:
    kv = {"k": (width, kv_width), "v": (width, kv_width)}
    return {"norm1": (width,), "norm2": (width,), "q": (width, width), "out": (width, width), **kv}


def attended(x: jax.Array, p: Any, head: int) -> jax.Array:
    """Returns `x` and its causal attention, of fewer heads of keys and values than of queries."""
    y = rms_norm(x, p["norm1"])
    q, k = rotated(heads(y @ p["q"], head)), rotated(heads(y @ p["k"], head))
    y = jax.nn.dot_product_attention(q, k, heads(y @ p["v"], head), is_causal=True)
    return x + y.reshape(x.shape) @ p["out"]


class LlamaSize(NamedTuple):
    """What a Llama is made of."""

    width: int
    layers: int
    kv_heads: int
    hidden: int
    vocab: int
    tied: bool
    head: int = 64


LLAMA_125M = LlamaSize(768, 12, 4, 2048, 32000, tied=False)
LLAMA_1B = LlamaSize(2048, 16, 8, 8192, 128256, tied=True)  # Llama 3.2
LLAMA_128K = LLAMA_125M._replace(vocab=128256)
LLAMA_8B = LlamaSize(4096, 32, 8, 14336, 128256, tied=False, head=128)  # Llama 3


def swiglu_block(size: LlamaSize) -> tuple[Block, dict[str, tuple[int, ...]]]:
    """Returns a layer of a Llama, and its shapes."""
    layer = gqa_layer(size.width, size.head * size.kv_heads)
    layer |= dict.fromkeys(("gate", "up"), (size.width, size.hidden)) | {"down": (size.hidden, size.width)}

    def block(x: jax.Array, p: Any) -> jax.Array:
        x = attended(x, p, size.head)
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    return block, layer


def llama(size: LlamaSize, *, scanned: bool, remat: bool, seq_len: int = 1024) -> Family:
    """Llama: grouped queries, rotary positions, SwiGLU; with `remat` it recomputes each block."""
    width, (block, layer) = size.width, swiglu_block(size)
    blocks = {"stack": stacked(layer, size.layers)} if scanned else {"layers": [layer] * size.layers}
    shapes = {"embed": (size.vocab, width), "norm": (width,), **blocks}
    if not size.tied:
        shapes["head"] = (width, size.vocab)

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = params["embed"][batch[:, :-1]]
        x = run(block, x, params["stack" if scanned else "layers"], constrain, remat=remat)
        head = params["embed"].T if size.tied else params["head"]
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ head, batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def routed(x: jax.Array, p: Any, slots: int) -> tuple[jax.Array, jax.Array]:
    """Returns the two best of the experts' SwiGLUs for each token, and how unevenly tokens are spread.

    Each sequence is routed by itself; an expert has as many slots in it, and tokens beyond them are dropped.
    """
    gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))  # [B, S, E]
    count = gates.shape[-1]
    weights, chosen = lax.top_k(gates, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    chosen = jax.nn.one_hot(chosen, count)  # [B, S, 2, E]
    by_choice = chosen.swapaxes(1, 2).reshape(x.shape[0], -1, count)  # all first choices come before all second ones
    place = (jnp.cumsum(by_choice, axis=1) * by_choice).reshape(x.shape[0], 2, -1, count).swapaxes(1, 2) - 1
    places = jax.nn.one_hot(place, slots, dtype=x.dtype)  # [B, S, 2, E, C]
    combine = jnp.einsum("bsk,bskec->bsec", weights.astype(x.dtype), places)
    y = jnp.einsum("bsec,bsd->becd", places.sum(2), x)
    up = jax.nn.silu(jnp.einsum("becd,edf->becf", y, p["gate"])) * jnp.einsum("becd,edf->becf", y, p["up"])
    y = jnp.einsum("bsec,becd->bsd", combine, jnp.einsum("becf,efd->becd", up, p["down"]))
    return y, count * (chosen[:, :, 0].mean(1) * gates.mean(1)).sum(-1).mean()


def moe(*, layers: int = 6, width: int = 768, hidden: int = 2048, experts: int = 8, seq_len: int = 1024) -> Family:
    """A small Mixtral: two of 8 experts per token by one-hot dispatch; 6 unrolled layers in place of 32."""
    vocab, slots = 32000, math.ceil(1.25 * 2 * seq_len / experts)
    matrices = {"gate": (experts, width, hidden), "up": (experts, width, hidden), "down": (experts, hidden, width)}
    layer = {**gqa_layer(width, width // 4), "router": (width, experts), **matrices}
    shapes = {"embed": (vocab, width), "layers": [layer] * layers, "norm": (width,), "head": (width, vocab)}

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x, uneven = params["embed"][batch[:, :-1]], 0.0
        for p in params["layers"]:
            x = attended(constrain(x), p, 64)
            y, more = routed(rms_norm(x, p["norm2"]), p, slots)
            x, uneven = x + y, uneven + more
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["head"], batch[:, 1:]) + 0.01 * uneven

    return Family(shapes, loss, tokens(seq_len))


def distances(queries: int, keys: int, *, both: bool, buckets: int = 32, farthest: int = 128) -> jax.Array:
    """Returns the bucket of each distance [S, S], as T5 numbers them."""
    distance = jnp.arange(keys)[None] - jnp.arange(queries)[:, None]
    start = 0
    if both:
        buckets //= 2
        start = (distance > 0) * buckets
    distance = jnp.abs(distance) if both else -jnp.minimum(distance, 0)
    exact = buckets // 2
    far = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(farthest / exact) * (buckets - exact)
    far = jnp.minimum(exact + far.astype(jnp.int32), buckets - 1)
    return start + jnp.where(distance < exact, distance, far)


def t5(*, layers: int = 12, width: int = 768, hidden: int = 3072, vocab: int = 32128, seq_len: int = 512) -> Family:
    """T5 base, unrolled: 512 tokens in and 512 out.

    One embedding is used three times, one table of relative positions by all layers of the encoder, one by those of
    the decoder.
    """
    attention = lambda name: {f"{name}_{part}": (width, width) for part in ("q", "k", "v", "out")}
    mlp = {"up": (width, hidden), "down": (hidden, width), "self_norm": (width,), "mlp_norm": (width,)}
    encoder_layer = {**attention("self"), **mlp}
    decoder_layer = {**encoder_layer, **attention("cross"), "cross_norm": (width,)}
    side = lambda layer: {"bias": (32, width // 64), "norm": (width,), "layers": [layer] * layers}
    shapes = {"embed": (vocab, width), "encoder": side(encoder_layer), "decoder": side(decoder_layer)}

    def attend(x: jax.Array, p: Any, name: str, memory: jax.Array | None = None, **how: Any) -> jax.Array:
        y = rms_norm(x, p[f"{name}_norm"])
        other = y if memory is None else memory
        q, k, v = (heads(a @ p[f"{name}_{part}"], 64) for a, part in ((y, "q"), (other, "k"), (other, "v")))
        y = jax.nn.dot_product_attention(q, k, v, scale=1.0, **how)
        return x + y.reshape(x.shape) @ p[f"{name}_out"]

    def mlp_of(x: jax.Array, p: Any) -> jax.Array:
        return x + jax.nn.relu(rms_norm(x, p["mlp_norm"]) @ p["up"]) @ p["down"]

    def bias_of(p: Any, *, both: bool) -> jax.Array:
        return jnp.moveaxis(p["bias"][distances(seq_len, seq_len, both=both)], -1, 0)[None]  # [1, H, S, S]

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        embed, encoder, decoder = params["embed"], params["encoder"], params["decoder"]
        bias = bias_of(encoder, both=True)
        block = lambda x, p: mlp_of(attend(x, p, "self", bias=bias), p)
        memory = rms_norm(run(block, embed[batch["in"]], encoder["layers"], constrain), encoder["norm"])
        causal = bias_of(decoder, both=False)
        after = lambda x, p: attend(attend(x, p, "self", bias=causal, is_causal=True), p, "cross", memory)
        x = run(lambda x, p: mlp_of(after(x, p), p), embed[batch["out"][:, :-1]], decoder["layers"], constrain)
        x = rms_norm(constrain(x), decoder["norm"]) * width**-0.5
        return cross_entropy(x @ embed.T, batch["out"][:, 1:])

    both = lambda rows: {"in": jax.ShapeDtypeStruct((rows, seq_len), jnp.int32), "out": tokens(seq_len)(rows)}
    return Family(shapes, loss, both)


def selective_scan(u: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Returns the outputs [B, S, D] of D state-space models of N states each, 64 steps at a time.

    Each piece is an associative scan that is recomputed in the backward pass: its states take N times its memory.
    """

    def piece(state: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:  # [B, D, N], each [B, 64, ·]
        u, dt, b, c = xs
        decay = jnp.exp(dt[..., None] * a)
        added = (dt * u)[..., None] * b[:, :, None]
        combined = lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1])
        decay, states = lax.associative_scan(combined, (decay, added), axis=1)
        states = states + decay * state[:, None]
        return states[:, -1], jnp.einsum("bsdn,bsn->bsd", states, c)

    pieces = [jnp.moveaxis(x.reshape(x.shape[0], -1, 64, x.shape[-1]), 1, 0) for x in (u, dt, b, c)]
    start = jnp.zeros((u.shape[0], *a.shape), jnp.float32)
    _, y = lax.scan(jax.checkpoint(piece, prevent_cse=False), start, pieces)
    return jnp.moveaxis(y, 0, 1).reshape(u.shape)


def mamba(*, layers: int = 24, width: int = 768, vocab: int = 50280, seq_len: int = 1024) -> Family:
    """Mamba 130M: scanned layers, a tied embedding."""
    inner, states, rank, taps = 2 * width, 16, width // 16, 4
    layer = {"norm": (width,), "in": (width, 2 * inner), "conv": (taps, inner), "conv_bias": (inner,)}
    layer |= {"to_dt_b_c": (inner, rank + 2 * states), "dt": (rank, inner), "dt_bias": (inner,)}
    layer |= {"a": (inner, states), "skip": (inner,), "out": (inner, width)}
    shapes = {"embed": (vocab, width), "norm": (width,), "stack": stacked(layer, layers)}

    def block(x: jax.Array, p: Any) -> jax.Array:
        u, z = jnp.split(rms_norm(x, p["norm"]) @ p["in"], 2, axis=-1)
        padded = jnp.pad(u, ((0, 0), (taps - 1, 0), (0, 0)))
        u = jax.nn.silu(sum(padded[:, i : i + u.shape[1]] * p["conv"][i] for i in range(taps)) + p["conv_bias"])
        dt, b, c = jnp.split(u @ p["to_dt_b_c"], (rank, rank + states), axis=-1)
        dt = jax.nn.softplus(dt @ p["dt"] + p["dt_bias"])
        wide = [v.astype(jnp.float32) for v in (u, dt, p["a"], b, c)]
        wide[2] = -jnp.exp(wide[2])
        y = selective_scan(*wide).astype(x.dtype) + u * p["skip"]
        return x + (y * jax.nn.silu(z)) @ p["out"]

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, params["embed"][batch[:, :-1]], params["stack"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["embed"].T, batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))
