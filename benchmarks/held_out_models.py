"""Models of `benchmarks.families` that no rule of jzero was made from.

Letters of shapes beside those of `family_models`: T steps in time, L steps of a piece, K classes of a latent.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.family_models import (
    Constrain,
    Family,
    Gather,
    attended,
    biased_block,
    biased_layer,
    cross_entropy,
    gqa_layer,
    heads,
    layer_norm,
    rms_norm,
    run,
    stacked,
    tokens,
)
from benchmarks.more_family_models import convolved, perceived, perceptron


def rssm(*, width: int = 1024, observed: int = 4096, actions: int = 16, latents: int = 32, steps: int = 64) -> Family:
    """The world model of Dreamer: a loop over 64 steps in time whose weights are the same in each, 32 latents of 32."""
    kinds = latents * latents
    shapes = {
        "encoder": perceptron(observed, width),
        "gru": {"mix": (kinds + actions, width), "gates": (2 * width, 3 * width)},
        "prior": {**perceptron(width, width), "latent": (width, kinds)},
        "posterior": {**perceptron(2 * width, width), "latent": (width, kinds)},
        "decoder": {**perceptron(width + kinds, width), "image": (width, observed)},
    }
    latent = lambda x, p: heads(perceived(x, p) @ p["latent"], latents).astype(jnp.float32)  # [..., latents, K]

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        seen = perceived(constrain(batch["image"]), params["encoder"])  # [B, T, D]

        def step(carry: Any, x: Any) -> Any:
            state, last = carry  # [B, D], [B, latents * K]
            seen, action = x
            mixed = jax.nn.silu(jnp.concatenate([last, action], -1) @ params["gru"]["mix"])
            reset, update, new = jnp.split(jnp.concatenate([mixed, state], -1) @ params["gru"]["gates"], 3, axis=-1)
            update = jax.nn.sigmoid(update - 1)
            state = update * jnp.tanh(jax.nn.sigmoid(reset) * new) + (1 - update) * state
            posterior = latent(jnp.concatenate([state, seen], -1), params["posterior"])
            shares = jax.nn.softmax(posterior)
            drawn = jax.nn.one_hot(jnp.argmax(shares, -1), latents) + shares - lax.stop_gradient(shares)
            drawn = drawn.reshape(*state.shape[:-1], -1).astype(state.dtype)
            return (state, drawn), (state, drawn, posterior)

        start = tuple(jnp.zeros((seen.shape[0], n), seen.dtype) for n in (width, kinds))
        in_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (seen, batch["action"]))
        _, (states, drawn, posterior) = lax.scan(step, start, in_time)  # [T, B, ...]
        prior = latent(states, params["prior"])
        made = perceived(jnp.concatenate([states, drawn], -1), params["decoder"]) @ params["decoder"]["image"]
        shares = jax.nn.softmax(posterior)
        far = (shares * (jax.nn.log_softmax(posterior) - jax.nn.log_softmax(prior))).sum((-1, -2)).mean()
        return jnp.square((made - jnp.moveaxis(batch["image"], 1, 0)).astype(jnp.float32)).mean() + far

    def batch_of(rows: int) -> Any:
        part = lambda size: jax.ShapeDtypeStruct((rows, steps, size), jnp.bfloat16)
        return {"image": part(observed), "action": part(actions)}

    return Family(shapes, loss, batch_of, rows=16)


def in_pieces(x: jax.Array, decay: jax.Array, b: jax.Array, c: jax.Array, length: int = 64) -> jax.Array:
    """Returns the outputs [B, S, H, P] of Mamba-2's state-space model, in pieces as its authors write them.

    Args:
      x: Inputs times step sizes, [B, S, H, P].
      decay: Logarithms of decays, [B, S, H], fp32.
      b: What enters the states, [B, S, N].
      c: What leaves them, likewise.
      length: The steps of a piece.
    """
    batch, _, num_heads, size = x.shape
    x = x.reshape(batch, -1, length, num_heads, size)
    b, c = (y.reshape(batch, -1, length, y.shape[-1]) for y in (b, c))
    sums = jnp.cumsum(decay.reshape(batch, -1, length, num_heads), axis=2)  # [B, pieces, L, H]
    between = sums[:, :, :, None] - sums[:, :, None]  # [B, pieces, L, L, H]
    causal = jnp.tril(jnp.ones((length, length), bool))[..., None]
    inside = jnp.exp(jnp.where(causal, between, -jnp.inf)).astype(x.dtype)
    y = jnp.einsum("zpln,zpmn,zplmh,zpmhd->zplhd", c, b, inside, x)
    to_end = jnp.exp(sums[:, :, -1:] - sums).astype(x.dtype)
    added = jnp.einsum("zpmn,zpmh,zpmhd->zphnd", b, to_end, x)  # the states [B, pieces, H, N, P] that pieces add
    last = jnp.exp(sums[:, :, -1]).astype(x.dtype)  # [B, pieces, H]
    step = lambda state, piece: (piece[0][..., None, None] * state + piece[1], state)
    pieces = jnp.moveaxis(last, 1, 0), jnp.moveaxis(added, 1, 0)
    _, states = lax.scan(step, jnp.zeros_like(added[:, 0]), pieces)
    y = y + jnp.einsum("zpln,zplh,pzhnd->zplhd", c, jnp.exp(sums).astype(x.dtype), states)
    return y.reshape(batch, -1, num_heads, size)


def mamba_2(*, layers: int = 12, width: int = 768, vocab: int = 50280, seq_len: int = 1024) -> Family:
    """A Mamba-2 of 12 unrolled layers, in heads of 64, with states of 64."""
    inner, states, head, taps = 2 * width, 64, 64, 4
    mixed, num_heads = inner + 2 * states, inner // head
    layer = {
        "norm": (width,),
        "in": (width, inner + mixed + num_heads),
        "taps": (taps, mixed),
        "step_bias": (num_heads,),
        "decay": (num_heads,),
        "skip": (num_heads,),
        "gate_norm": (inner,),
        "out": (inner, width),
    }
    shapes = {"embed": (vocab, width), "layers": [layer] * layers, "norm": (width,)}

    def block(x: jax.Array, p: Any) -> jax.Array:  # [B, S, D]
        gate, y, dt = jnp.split(rms_norm(x, p["norm"]) @ p["in"], [inner, inner + mixed], axis=-1)
        before = jnp.pad(y, ((0, 0), (taps - 1, 0), (0, 0)))
        y = jax.nn.silu(sum(before[:, i : i + y.shape[1]] * p["taps"][i] for i in range(taps)))
        y, b, c = jnp.split(y, [inner, inner + states], axis=-1)
        dt = jax.nn.softplus((dt + p["step_bias"]).astype(jnp.float32))  # [B, S, H]
        parts = heads(y, head)
        out = in_pieces(parts * dt[..., None].astype(x.dtype), -dt * jnp.exp(p["decay"].astype(jnp.float32)), b, c)
        out = (out + p["skip"][:, None] * parts).reshape(y.shape)
        return x + rms_norm(out * jax.nn.silu(gate), p["gate_norm"]) @ p["out"]

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, params["embed"][batch[:, :-1]], params["layers"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["embed"].T, batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def conformer(
    *, layers: int = 16, width: int = 512, frames: int = 1024, bands: int = 80, classes: int = 1024
) -> Family:
    """A Conformer L of 16 scanned layers: attention and a convolution over time between two halves of a perceptron."""
    norms = {
        f"{n}_{part}": (width,) for n in ("first", "norm1", "conv", "inner", "second") for part in ("scale", "bias")
    }
    halves = {f"{n}_{part}": s for n in ("first", "second") for part, s in
              (("up", (width, 4 * width)), ("down", (4 * width, width)))}  # fmt: skip
    conv = {"pointwise": (width, 2 * width), "taps": (31, 1, width), "back": (width, width)}
    layer = {**norms, **halves, **conv, "qkv": (width, 3 * width), "out": (width, width)}
    ends = {"in": (bands, width), "scale": (width,), "bias": (width,), "head": (width, classes)}
    shapes = {**ends, "stack": stacked(layer, layers)}
    norm = lambda x, p, name: layer_norm(x, p[f"{name}_scale"], p[f"{name}_bias"])
    half = lambda x, p, name: x + 0.5 * jax.nn.silu(norm(x, p, name) @ p[f"{name}_up"]) @ p[f"{name}_down"]

    def block(x: jax.Array, p: Any) -> jax.Array:  # [B, T, D]
        x = half(x, p, "first")
        q, k, v = (heads(y, 64) for y in jnp.split(norm(x, p, "norm1") @ p["qkv"], 3, axis=-1))
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]
        y = jax.nn.glu(norm(x, p, "conv") @ p["pointwise"])
        how = {"dimension_numbers": ("NTC", "TIO", "NTC"), "feature_group_count": width}
        y = lax.conv_general_dilated(y, p["taps"], (1,), "SAME", **how)
        return half(x + jax.nn.silu(norm(y, p, "inner")) @ p["back"], p, "second")

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = run(block, batch["audio"].astype(params["in"].dtype) @ params["in"], params["stack"], constrain)
        x = layer_norm(constrain(x), params["scale"], params["bias"])
        return cross_entropy(x @ params["head"], batch["label"])

    def batch_of(rows: int) -> Any:
        audio = jax.ShapeDtypeStruct((rows, frames, bands), jnp.float32)
        return {"audio": audio, "label": jax.ShapeDtypeStruct((rows, frames), jnp.int32)}

    return Family(shapes, loss, batch_of, rows=8)


def mixture_of_depths(*, layers: int = 12, width: int = 768, seq_len: int = 1024, share: int = 8) -> Family:
    """A Llama of 12 unrolled layers, of which every other one sees an eighth of the tokens, those it chooses."""
    vocab, chosen = 32000, seq_len // share
    layer = {**gqa_layer(width, width // 4), "gate": (width, 2048), "up": (width, 2048), "down": (2048, width)}
    pair = {"all": layer, "some": {**layer, "router": (width, 1)}}
    shapes = {"embed": (vocab, width), "layers": [pair] * (layers // 2), "norm": (width,), "head": (width, vocab)}

    def block(x: jax.Array, p: Any) -> jax.Array:
        x = attended(x, p, 64)
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def both(x: jax.Array, p: Any) -> jax.Array:
        x = block(x, p["all"])
        weights, places = lax.top_k((x @ p["some"]["router"])[..., 0], chosen)  # [B, S/8]
        order = jnp.argsort(places, axis=-1)
        weights, places = (jnp.take_along_axis(y, order, axis=-1) for y in (weights, places))
        some = jnp.take_along_axis(x, places[..., None], axis=1)
        added = jax.nn.sigmoid(weights)[..., None] * (block(some, p["some"]) - some)
        return jax.vmap(lambda x, i, y: x.at[i].add(y))(x, places, added)

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(both, params["embed"][batch[:, :-1]], params["layers"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["head"], batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def unet_attention(*, widths: tuple[int, ...] = (128, 256, 512), image: int = 64) -> Family:
    """A U-Net for images of 64 x 64: per level two convolutions and, below the first, attention among all places."""
    level = lambda c, d: {"conv1": (3, 3, c, d), "conv2": (3, 3, d, d), "skip": (c, d), "scale": (d,), "bias": (d,),
                          "qkv": (d, 3 * d), "out": (d, d)}  # fmt: skip
    down = [level(c, d) for c, d in zip((widths[0], *widths), widths, strict=False)]
    back = widths[::-1]
    up = [level(c + d, d) for c, d in zip((back[0], *back), back, strict=False)]
    shapes = {"first": (3, 3, 3, widths[0]), "last": (3, 3, widths[0], 3), "down": down, "up": up}

    def block(x: jax.Array, p: Any) -> jax.Array:  # [B, height, width, channels]
        y = convolved(jax.nn.silu(x), p["conv1"])
        x = x @ p["skip"] + convolved(jax.nn.silu(layer_norm(y, p["scale"], p["bias"])), p["conv2"])
        if x.shape[1] == image:
            return x
        places = x.reshape(x.shape[0], -1, x.shape[-1])
        q, k, v = (heads(y, 64) for y in jnp.split(layer_norm(places, p["scale"], p["bias"]) @ p["qkv"], 3, axis=-1))
        return x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = convolved((batch["image"] + batch["noise"]).astype(params["first"].dtype), params["first"])
        skips = []
        for i, p in enumerate(params["down"]):
            x = block(constrain(x), p)
            skips.append(x)
            if i < len(widths) - 1:
                x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
        for i, p in enumerate(params["up"]):
            x = block(constrain(jnp.concatenate([x, skips.pop()], -1)), p)
            if i < len(widths) - 1:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        return jnp.square(convolved(x, params["last"]).astype(jnp.float32) - batch["noise"]).mean()

    def batch_of(rows: int) -> Any:
        images = jax.ShapeDtypeStruct((rows, image, image, 3), jnp.float32)
        return {"image": images, "noise": images}

    return Family(shapes, loss, batch_of, rows=8)


def clip(*, layers: int = 12, width: int = 768, patch: int = 32, image: int = 224, seq_len: int = 77) -> Family:
    """CLIP ViT-B/32: two towers of 12 scanned layers; each device compares its features with those of all devices."""
    inputs, num_patches, vocab, text_width = 3 * patch**2, (image // patch) ** 2, 49408, 512
    tower = lambda n: {"scale": (n,), "bias": (n,), "out": (n, text_width), "stack": stacked(biased_layer(n), layers)}
    shapes = {
        "image": {**tower(width), "patches": (inputs, width), "positions": (num_patches, width)},
        "text": {**tower(text_width), "embed": (vocab, text_width), "positions": (seq_len, text_width)},
    }

    def features(x: jax.Array, p: Any, constrain: Constrain, *, causal: bool) -> jax.Array:
        x = run(functools.partial(biased_block, causal=causal), x + p["positions"], p["stack"], constrain)
        x = layer_norm(constrain(x), p["scale"], p["bias"])
        x = ((x[:, -1] if causal else x.mean(1)) @ p["out"]).astype(jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params: Any, batch: Any, constrain: Constrain, gather: Gather) -> jax.Array:
        images, side = batch["image"], image // patch
        x = images.reshape(images.shape[0], side, patch, side, patch, 3).swapaxes(2, 3)
        x = x.reshape(images.shape[0], num_patches, inputs).astype(params["image"]["patches"].dtype)
        of_image = features(x @ params["image"]["patches"], params["image"], constrain, causal=False)
        of_text = features(params["text"]["embed"][batch["text"]], params["text"], constrain, causal=True)
        pairs = (of_image, of_text), (of_text, of_image)
        return sum(cross_entropy(a @ every.T / 0.07, own) for a, b in pairs for every, own in [gather(b)]) / 2

    def batch_of(rows: int) -> Any:
        text = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32)
        return {"image": jax.ShapeDtypeStruct((rows, image, image, 3), jnp.float32), "text": text}

    return Family(shapes, loss, batch_of, rows=32, gathers=True)
