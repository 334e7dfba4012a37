"""Models of `tests.accuracy.estimates` that no rule of the estimate was made from.

They are as those of `family_models`, whose letters of shapes they use; P is the width of a head, K chunks of C steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.family_models import (
    Constrain,
    Family,
    LlamaSize,
    attended,
    biased_block,
    biased_layer,
    cross_entropy,
    gqa_layer,
    heads,
    layer_norm,
    llama,
    rms_norm,
    run,
    stacked,
    tokens,
)
from tests.accuracy.unseen_grids import adm, clip_b16, evoformer, mixer, resnet


def dreamer(*, width: int = 1536, states: int = 32, classes: int = 32, seq_len: int = 64) -> Family:
    """DreamerV3's world model on vectors: a GRU over 64 steps of categorical states, scanned over time."""
    size = states * classes
    dense = lambda i, o: {"w": (i, o), "scale": (o,)}
    shapes: Any = {
        "encoder": [dense(1024, width), dense(width, width)],
        "into": dense(size + 32, width),
        "gru": dense(2 * width, 3 * width),
        "prior": [dense(width, width), {"w": (width, size)}],
        "posterior": [dense(2 * width, width), {"w": (width, size)}],
        "decoder": [dense(width + size, width), dense(width, width), {"w": (width, 1024)}],
        "reward": [dense(width + size, width), {"w": (width, 1)}],
    }

    def dense_of(x: jax.Array, p: Any) -> jax.Array:
        y = x @ p["w"]
        return jax.nn.silu(rms_norm(y, p["scale"])) if "scale" in p else y

    def mlp(x: jax.Array, layers: Any) -> jax.Array:
        return functools.reduce(dense_of, layers, x)

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        dtype = params["into"]["w"].dtype
        seen = mlp(constrain(batch["seen"].astype(dtype)), params["encoder"])

        def step(carry: Any, x: Any) -> Any:
            h, z = carry
            seen, action, noise = x
            y = dense_of(jnp.concatenate([z, action.astype(dtype)], -1), params["into"])
            reset, new, update = jnp.split(
                rms_norm(jnp.concatenate([y, h], -1) @ params["gru"]["w"], params["gru"]["scale"]), 3, -1
            )
            new, update = jnp.tanh(jax.nn.sigmoid(reset) * new), jax.nn.sigmoid(update - 1)
            h = update * new + (1 - update) * h
            logits = mlp(jnp.concatenate([h, seen], -1), params["posterior"]).astype(jnp.float32)
            logits = logits.reshape(-1, states, classes)
            drawn = jax.nn.one_hot(jnp.argmax(logits + noise, -1), classes)
            share = jax.nn.softmax(logits)
            z = (drawn + share - lax.stop_gradient(share)).reshape(-1, size).astype(dtype)
            return (h, z), (h, z, logits)

        rows = batch["seen"].shape[0]
        start = jnp.zeros((rows, width), dtype), jnp.zeros((rows, size), dtype)
        by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (seen, batch["action"], batch["noise"]))
        _, (h, z, posterior) = lax.scan(step, start, by_time)
        prior = mlp(h, params["prior"]).astype(jnp.float32).reshape(posterior.shape)
        log_p, log_q = jax.nn.log_softmax(posterior), jax.nn.log_softmax(prior)
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum((-1, -2)).mean()
        features = jnp.concatenate([h, z], -1)
        seen_again = mlp(features, params["decoder"]).astype(jnp.float32)
        reward = mlp(features, params["reward"])[..., 0].astype(jnp.float32)
        error = jnp.square(seen_again - jnp.moveaxis(batch["seen"], 1, 0)).sum(-1).mean()
        return error + jnp.square(reward - jnp.moveaxis(batch["reward"], 1, 0)).mean() + kl

    def batch_of(rows: int) -> Any:
        shapes = {"seen": (1024,), "action": (32,), "noise": (states, classes), "reward": ()}
        return {k: jax.ShapeDtypeStruct((rows, seq_len, *s), jnp.float32) for k, s in shapes.items()}

    return Family(shapes, loss, batch_of, rows=16)


def chunked_ssd(x: jax.Array, log_decay: jax.Array, b: jax.Array, c: jax.Array, chunk: int = 128) -> jax.Array:
    """Mamba-2's state-space duality: `x` [B, S, H, P], `log_decay` [B, S, H], `b` and `c` [B, S, N]."""
    split = lambda a: a.reshape(a.shape[0], -1, chunk, *a.shape[2:])
    x, log_decay, b, c = (split(a) for a in (x, log_decay, b, c))
    summed = jnp.cumsum(log_decay, 2)  # [B, K, C, H]
    gap = summed[:, :, :, None] - summed[:, :, None]  # [B, K, C, C, H]
    mask = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None, :, :, None]
    decay = jnp.exp(jnp.where(mask, gap, -jnp.inf))
    scores = jnp.einsum("bkin,bkjn->bkij", c, b)
    y = jnp.einsum("bkij,bkijh,bkjhp->bkihp", scores, decay.astype(x.dtype), x)
    to_end = jnp.exp(summed[:, :, -1:] - summed).astype(x.dtype)
    states = jnp.einsum("bkjn,bkjh,bkjhp->bkhpn", b, to_end, x)
    whole = jnp.exp(summed[:, :, -1])  # [B, K, H]

    def carry(s: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        new, w = inputs
        return s * w[..., None, None].astype(s.dtype) + new, s

    first = jnp.zeros_like(states[:, 0])
    _, before = lax.scan(carry, first, (jnp.moveaxis(states, 1, 0), jnp.moveaxis(whole, 1, 0)))
    before = jnp.moveaxis(before, 0, 1)
    y = y + jnp.einsum("bkin,bkhpn,bkih->bkihp", c, before, jnp.exp(summed).astype(x.dtype))
    return y.reshape(y.shape[0], -1, *y.shape[3:])


def mamba2(*, layers: int = 12, width: int = 768, vocab: int = 50288, states: int = 128, seq_len: int = 1024) -> Family:
    """The first half of Mamba-2 130M, unrolled: heads of 64, chunks of 128, a tied embedding."""
    inner, head = 2 * width, 64
    count = inner // head
    layer = {"norm": (width,), "in": (width, 2 * inner + 2 * states + count), "conv": (4, inner + 2 * states)}
    layer |= {"a": (count,), "dt_bias": (count,), "skip": (count,), "norm2": (inner,), "out": (inner, width)}
    shapes = {"embed": (vocab, width), "norm": (width,), "layers": [layer] * layers}

    def block(x: jax.Array, p: Any) -> jax.Array:
        y = rms_norm(x, p["norm"]) @ p["in"]
        z, u, dt = jnp.split(y, (inner, 2 * inner + 2 * states), -1)
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = jax.nn.silu(sum(padded[:, i : i + u.shape[1]] * p["conv"][i] for i in range(4)))
        u, b, c = jnp.split(u, (inner, inner + states), -1)
        dt = jax.nn.softplus((dt + p["dt_bias"]).astype(jnp.float32))
        u = heads(u, head)
        y = chunked_ssd(u * dt[..., None].astype(u.dtype), -jnp.exp(p["a"].astype(jnp.float32)) * dt, b, c)
        y = (y + u * p["skip"][:, None]).reshape(z.shape)
        return x + rms_norm(y * jax.nn.silu(z), p["norm2"]) @ p["out"]

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, params["embed"][batch[:, :-1]], params["layers"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["embed"].T, batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def conformer_l(*, layers: int = 17, width: int = 512, frames: int = 1024, mels: int = 80, vocab: int = 1024) -> Family:
    """Conformer-L, scanned: two half steps of an MLP around attention and a depthwise convolution over time."""
    mlp = lambda i: {f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width), f"mlp{i}": (width,)}
    layer = {**mlp(1), **mlp(2), "norm": (width,), "qkv": (width, 3 * width), "out": (width, width)}
    layer |= {
        "conv_norm": (width,),
        "gated": (width, 2 * width),
        "depthwise": (31, 1, width),
        "pointwise": (width, width),
    }
    layer |= {"last": (width,)}
    shapes: Any = {"into": (4 * mels, width), "stack": stacked(layer, layers), "head": (width, vocab)}

    def block(x: jax.Array, p: Any) -> jax.Array:
        half = lambda x, i: x + 0.5 * (jax.nn.silu(rms_norm(x, p[f"mlp{i}"]) @ p[f"up{i}"]) @ p[f"down{i}"])
        x = half(x, 1)
        q, k, v = (heads(a, 64) for a in jnp.split(rms_norm(x, p["norm"]) @ p["qkv"], 3, -1))
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]
        a, gate = jnp.split(rms_norm(x, p["conv_norm"]) @ p["gated"], 2, -1)
        y = lax.conv_general_dilated(
            a * jax.nn.sigmoid(gate), p["depthwise"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=width,
        )  # fmt: skip
        x = x + jax.nn.silu(y) @ p["pointwise"]
        return rms_norm(half(x, 2), p["last"])

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = batch["mels"].astype(params["into"].dtype) @ params["into"]
        x = run(block, x, params["stack"], constrain)
        return cross_entropy(constrain(x) @ params["head"], batch["label"])

    def batch_of(rows: int) -> Any:
        mel = jax.ShapeDtypeStruct((rows, frames, 4 * mels), jnp.float32)
        return {"mels": mel, "label": jax.ShapeDtypeStruct((rows, frames), jnp.int32)}

    return Family(shapes, loss, batch_of, rows=8)


def depths(*, layers: int = 12, width: int = 1024, vocab: int = 32000, seq_len: int = 1024) -> Family:
    """Every second layer sees only the eighth of the tokens that its router scores highest; unrolled."""
    layer = {
        **gqa_layer(width, width),
        "gate": (width, 3 * width),
        "up": (width, 3 * width),
        "down": (3 * width, width),
    }
    shapes = {"embed": (vocab, width), "norm": (width,), "head": (width, vocab)}
    shapes["layers"] = [layer | ({"router": (width, 1)} if i % 2 else {}) for i in range(layers)]

    def dense(x: jax.Array, p: Any) -> jax.Array:
        x = attended(x, p, 64)
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def block(x: jax.Array, p: Any) -> jax.Array:
        if "router" not in p:
            return dense(x, p)
        score = (x @ p["router"])[..., 0].astype(jnp.float32)
        _, chosen = lax.top_k(score, seq_len // 8)
        chosen = jnp.sort(chosen, -1)
        part = jnp.take_along_axis(x, chosen[..., None], 1)
        weight = jax.nn.sigmoid(jnp.take_along_axis(score, chosen, 1))[..., None].astype(x.dtype)
        new = weight * (dense(part, p) - part)
        return jax.vmap(lambda x, i, y: x.at[i].add(y))(x, chosen, new)

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, params["embed"][batch[:, :-1]], params["layers"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["head"], batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def bert(*, layers: int = 12, width: int = 768, vocab: int = 30522, seq_len: int = 512) -> Family:
    """BERT-base, unrolled, with norms after the residuals; 76 tokens of a row are predicted."""
    layer = biased_layer(width)
    shapes = {"embed": (vocab, width), "positions": (seq_len, width), "layers": [layer] * layers}
    shapes |= {"scale": (width,), "bias": (width,), "transform": (width, width), "out_bias": (vocab,)}

    def block(x: jax.Array, p: Any) -> jax.Array:
        q, k, v = (heads(a, 64) for a in jnp.split(x @ p["qkv"] + p["qkv_bias"], 3, -1))
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / 8
        y = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(x.shape)
        x = layer_norm(x + y @ p["out"] + p["out_bias"], p["norm1_scale"], p["norm1_bias"])
        y = jax.nn.gelu(x @ p["up"] + p["up_bias"], approximate=False) @ p["down"] + p["down_bias"]
        return layer_norm(x + y, p["norm2_scale"], p["norm2_bias"])

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = layer_norm(params["embed"][batch["in"]] + params["positions"], params["scale"], params["bias"])
        x = run(block, x, params["layers"], constrain)
        x = jnp.take_along_axis(constrain(x), batch["places"][..., None], 1)
        x = jax.nn.gelu(x @ params["transform"])
        return cross_entropy(x @ params["embed"].T + params["out_bias"], batch["out"])

    def batch_of(rows: int) -> Any:
        sizes = {"in": seq_len, "places": 76, "out": 76}
        return {k: jax.ShapeDtypeStruct((rows, s), jnp.int32) for k, s in sizes.items()}

    return Family(shapes, loss, batch_of, rows=8)


def whisper(*, layers: int = 6, width: int = 512, vocab: int = 51865, frames: int = 1500, seq_len: int = 448) -> Family:
    """Whisper base, unrolled: two convolutions and an encoder over 1500 frames, a decoder of 448 tokens."""
    layer = biased_layer(width)
    cross = {f"cross_{name}": (width, width) for name in ("q", "k", "v", "out")} | {"cross_norm": (width,)}
    shapes: Any = {"conv1": (3, 80, width), "conv2": (3, width, width), "positions": (frames, width)}
    shapes |= {"encoder": [layer] * layers, "decoder": [layer | cross] * layers, "embed": (vocab, width)}
    shapes |= {"tokens": (seq_len, width), "norm1": (width,), "norm2": (width,)}

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        over_time = functools.partial(lax.conv_general_dilated, padding="SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        x = jax.nn.gelu(over_time(batch["mels"].astype(params["conv1"].dtype), params["conv1"], (1,)))
        x = jax.nn.gelu(over_time(x, params["conv2"], (2,))) + params["positions"]
        x = run(functools.partial(biased_block, causal=False), x, params["encoder"], constrain)
        memory = rms_norm(constrain(x), params["norm1"])

        def block(x: jax.Array, p: Any) -> jax.Array:
            y = rms_norm(x, p["cross_norm"])
            q, k, v = (heads(a @ p[f"cross_{n}"], 64) for a, n in ((y, "q"), (memory, "k"), (memory, "v")))
            x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["cross_out"]
            return biased_block(x, p, causal=True)

        x = run(block, params["embed"][batch["text"][:, :-1]] + params["tokens"], params["decoder"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm2"]) @ params["embed"].T, batch["text"][:, 1:])

    def batch_of(rows: int) -> Any:
        return {"mels": jax.ShapeDtypeStruct((rows, 2 * frames, 80), jnp.float32), "text": tokens(seq_len)(rows)}

    return Family(shapes, loss, batch_of)


def lstm(*, layers: int = 3, width: int = 1536, vocab: int = 32000, seq_len: int = 256) -> Family:
    """AWD-LSTM's shape: three layers, each scanned over time."""
    layer = {"w": (width, 4 * width), "u": (width, 4 * width), "b": (4 * width,)}
    shapes: Any = {"embed": (vocab, width), "layers": [layer] * layers}

    def block(x: jax.Array, p: Any) -> jax.Array:
        def step(carry: Any, y: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(y + h @ p["u"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = (jnp.zeros_like(x[:, 0]),) * 2
        return jnp.moveaxis(lax.scan(step, start, jnp.moveaxis(x @ p["w"] + p["b"], 1, 0))[1], 0, 1)

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, params["embed"][batch[:, :-1]], params["layers"], constrain)
        return cross_entropy(constrain(x) @ params["embed"].T, batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len), rows=16)


UNSEEN: dict[str, Callable[[], Family]] = {
    "dreamer": dreamer,
    "mamba2": mamba2,
    "conformer_l": conformer_l,
    "depths": depths,
    "adm": adm,
    "clip_b16": clip_b16,
    "tinyllama": functools.partial(llama, LlamaSize(2048, 22, 4, 5632, 32000, tied=False), scanned=True, remat=False),
    "bert": bert,
    "resnet": resnet,
    "mixer": mixer,
    "whisper": whisper,
    "evoformer": evoformer,
    "lstm": lstm,
}
"""Thirteen; some are of the kinds of `held_out_models`, in other sizes and written apart."""
