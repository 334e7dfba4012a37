"""Models of `benchmarks.families` written after jzero chose by itself what a step keeps.

Letters of shapes beside those of `family_models`: R rays, P points on a ray.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.family_models import (
    Constrain,
    Family,
    LlamaSize,
    cross_entropy,
    heads,
    layer_norm,
    rms_norm,
    rotated,
    routed,
    run,
    stacked,
    swiglu_block,
    tokens,
)


def mmdit(*, layers: int = 8, width: int = 1024, image: int = 64, seq_len: int = 154) -> Family:
    """The MMDiT of Stable Diffusion 3: 8 unrolled layers in which text and image have weights of their own and attend
    to both."""
    count, size, head = (image // 2) ** 2, 2 * 2 * 16, 64
    half = {"modulation": (width, 6 * width), "qkv": (width, 3 * width), "q_norm": (head,), "k_norm": (head,)}
    half |= {"out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    shapes = {"patch": (size, width), "text": (4096, width), "positions": (count, width), "time": (256, width)}
    shapes |= {"layers": [{"text": half, "image": half}] * layers, "last": (width, 2 * width), "head": (width, size)}

    def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        x = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6).astype(x.dtype)
        return x * (1 + scale[:, None]) + shift[:, None]

    def patches(x: jax.Array) -> jax.Array:  # [B, 64, 64, 16] to [B, S, 64]
        return x.reshape(-1, image // 2, 2, image // 2, 2, 16).swapaxes(2, 3).reshape(-1, count, size)

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        dtype = params["head"].dtype
        angles = batch["time"][:, None] * jnp.exp(-jnp.linspace(0, 9, 128))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype) @ params["time"]
        condition = jax.nn.silu(time + (batch["text"].mean(1) @ params["text"]).astype(dtype))

        def block(both: tuple[jax.Array, jax.Array], layer: Any) -> tuple[jax.Array, jax.Array]:  # [B, S, D] each
            parts, qkv = [], []
            for x, p in zip(both, (layer["text"], layer["image"]), strict=True):
                parts.append(jnp.split(condition @ p["modulation"], 6, axis=-1))
                q, k, v = (heads(y, head) for y in jnp.split(modulated(x, *parts[-1][:2]) @ p["qkv"], 3, axis=-1))
                qkv.append((rms_norm(q, p["q_norm"]), rms_norm(k, p["k_norm"]), v))
            y = jax.nn.dot_product_attention(*(jnp.concatenate(z, 1) for z in zip(*qkv, strict=True)))
            y = y.reshape(*y.shape[:2], width)
            attended, results = (y[:, :seq_len], y[:, seq_len:]), []
            for x, y, (_, _, gate, shift, scale, last), p in zip(
                both, attended, parts, (layer["text"], layer["image"]), strict=True
            ):
                mixed = x + gate[:, None] * (y @ p["out"])
                hidden = jax.nn.gelu(modulated(mixed, shift, scale) @ p["up"])
                results.append(mixed + last[:, None] * (hidden @ p["down"]))
            return results[0], results[1]

        share = batch["time"][:, None, None, None]
        noisy = (1 - share) * batch["image"] + share * batch["noise"]
        both = batch["text"].astype(dtype) @ params["text"], patches(noisy).astype(dtype) @ params["patch"]
        both = both[0], both[1] + params["positions"]
        _, x = run(block, both, params["layers"], lambda both: (constrain(both[0]), constrain(both[1])))
        x = modulated(constrain(x), *jnp.split(condition @ params["last"], 2, axis=-1)) @ params["head"]
        return jnp.square(x.astype(jnp.float32) - patches(batch["noise"] - batch["image"])).mean()

    def batch_of(rows: int) -> Any:
        images = jax.ShapeDtypeStruct((rows, image, image, 16), jnp.float32)
        text = jax.ShapeDtypeStruct((rows, seq_len, 4096), jnp.bfloat16)
        return {"image": images, "noise": images, "text": text, "time": jax.ShapeDtypeStruct((rows,), jnp.float32)}

    return Family(shapes, loss, batch_of)


def slstm(x: jax.Array, p: Any) -> jax.Array:
    """Returns `x` and what a loop over time, with exponential gates and memories in fp32, makes of it."""

    def step(carry: Any, gates: jax.Array) -> Any:
        y, cell, norm, most = carry  # [B, H, D/H]
        gates = heads(gates, 4 * y.shape[-1]) + jnp.einsum("bhd,hde->bhe", y, p["again"])
        new, enter, forget, out = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
        kept = jax.nn.log_sigmoid(forget) + most
        most = jnp.maximum(kept, enter)
        enter, kept = jnp.exp(enter - most), jnp.exp(kept - most)
        cell, norm = kept * cell + enter * jnp.tanh(new), kept * norm + enter
        y = (jax.nn.sigmoid(out) * cell / norm).astype(y.dtype)
        return (y, cell, norm, most), y

    gates = jnp.moveaxis(rms_norm(x, p["norm"]) @ p["gates"], 1, 0)  # [S, B, 4D]
    start = jnp.zeros((x.shape[0], *p["again"].shape[:2]), jnp.float32)
    y = lax.scan(step, (start.astype(x.dtype), start, start + 1, start), gates)[1]
    return x + jnp.moveaxis(y, 0, 1).reshape(x.shape) @ p["down"]


def xlstm(*, groups: int = 3, width: int = 768, head: int = 384, vocab: int = 50304, seq_len: int = 1024) -> Family:
    """An xLSTM of unrolled groups of three mLSTM blocks and an sLSTM; of the former the parallel form, in which
    exponential gates in fp32 decide who is seen."""
    inner, taps = 2 * width, 4
    last = {"norm": (width,), "gates": (width, 4 * width), "again": (4, width // 4, width), "down": (width, width)}
    shape = {"norm": (width,), "up": (width, 2 * inner), "conv": (taps, inner), "skip": (inner,), "scale": (inner,)}
    shape |= {**dict.fromkeys("qkv", (inner, inner)), "gates": (inner, 2 * inner // head), "down": (inner, width)}
    shape["gate_bias"] = shape["gates"][1:]
    group = {"first": [shape] * 3, "last": last}
    shapes = {"embed": (vocab, width), "layers": [group] * groups, "norm": (width,), "head": (width, vocab)}

    def remembered(q: jax.Array, k: jax.Array, v: jax.Array, enter: jax.Array, forget: jax.Array) -> jax.Array:
        """Returns what each of [B, S, H, D/H] reads of the memory; gates are [B, S, H], fp32."""
        sums = jnp.cumsum(jax.nn.log_sigmoid(forget), axis=1)
        weights = (sums[:, :, None] - sums[:, None] + enter[:, None]).transpose(0, 3, 1, 2)  # [B, H, S, S]
        weights = jnp.where(jnp.tril(jnp.ones((q.shape[1],) * 2, bool)), weights, -jnp.inf)
        most = weights.max(-1, keepdims=True)
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / math.sqrt(head) * jnp.exp(weights - most)
        total = jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), jnp.exp(-most))
        return jnp.einsum("bhst,bthd->bshd", (scores / (total + 1e-6)).astype(v.dtype), v)

    def block(x: jax.Array, p: Any) -> jax.Array:  # [B, S, D]
        u, z = jnp.split(rms_norm(x, p["norm"]) @ p["up"], 2, axis=-1)
        padded = jnp.pad(u, ((0, 0), (taps - 1, 0), (0, 0)))
        c = jax.nn.silu(sum(padded[:, i : i + u.shape[1]] * p["conv"][i] for i in range(taps)))
        q, k, v = heads(c @ p["q"], head), heads(c @ p["k"], head), heads(u @ p["v"], head)
        gates = jnp.split((c @ p["gates"] + p["gate_bias"]).astype(jnp.float32), 2, axis=-1)
        y = rms_norm(remembered(q, k, v, *gates), jnp.ones((), x.dtype)).reshape(u.shape) * p["scale"]
        return x + ((y + p["skip"] * c) * jax.nn.silu(z)) @ p["down"]

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = params["embed"][batch[:, :-1]]
        for p in params["layers"]:
            x = slstm(run(block, x, p["first"], constrain), p["last"])
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["head"], batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def nerf(*, layers: int = 8, width: int = 512, points: int = 128) -> Family:
    """A NeRF: perceptrons of 512 at 128 points on each ray, whose colors are summed as they are seen."""
    of_point, of_view = 60, 24
    hidden = [{"w": (width + of_point * (i == 4), width), "b": (width,)} for i in range(1, layers)]
    shapes = {"first": {"w": (of_point, width), "b": (width,)}, "layers": hidden, "density": (width, 1)}
    shapes |= {"features": (width, width), "view": (width + of_view, width // 2), "color": (width // 2, 3)}

    def waves(x: jax.Array, count: int) -> jax.Array:  # [..., 3] to [..., 6 * count]
        angles = (x[..., None] * 2.0 ** jnp.arange(count)).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        dtype, far = params["color"].dtype, jnp.linspace(2.0, 6.0, points)
        places = batch["origin"][:, None] + batch["toward"][:, None] * far[:, None]  # [R, P, 3]
        place = constrain(waves(places, of_point // 6).astype(dtype))
        x = jax.nn.relu(place @ params["first"]["w"] + params["first"]["b"])
        for i, p in enumerate(params["layers"], 1):
            x = jnp.concatenate([place, x], -1) if i == 4 else x
            x = jax.nn.relu(constrain(x) @ p["w"] + p["b"])
        density = jax.nn.relu((x @ params["density"])[..., 0].astype(jnp.float32))
        view = jnp.repeat(waves(batch["toward"], of_view // 6).astype(dtype)[:, None], points, 1)
        x = jax.nn.relu(jnp.concatenate([x @ params["features"], view], -1) @ params["view"])
        color = jax.nn.sigmoid((x @ params["color"]).astype(jnp.float32))
        passed = density * (far[1] - far[0])
        seen = jnp.exp(passed - jnp.cumsum(passed, axis=1)) * (1 - jnp.exp(-passed))
        return jnp.square((seen[..., None] * color).sum(1) - batch["color"]).mean()

    def batch_of(rows: int) -> Any:
        return {name: jax.ShapeDtypeStruct((rows, 3), jnp.float32) for name in ("origin", "toward", "color")}

    return Family(shapes, loss, batch_of, rows=4096)


def deepseek(*, layers: int = 6, width: int = 1024, vocab: int = 32000, seq_len: int = 1024) -> Family:
    """A small DeepSeek-V2: latent attention, in which keys and values are made of 256 numbers a token, and beside the
    routed experts one that all tokens see; 6 unrolled layers."""
    head, turned, latent, experts, hidden = 64, 32, 256, 16, 512
    num_heads, slots = width // head, math.ceil(1.25 * 2 * seq_len / experts)
    matrices = {"gate": (experts, width, hidden), "up": (experts, width, hidden), "down": (experts, hidden, width)}
    layer = {"norm1": (width,), "norm2": (width,), "kv_norm": (latent,), "q": (width, num_heads * (head + turned))}
    layer |= {"to_latent": (width, latent + turned), "kv": (latent, 2 * width), "out": (width, width)}
    layer |= {"router": (width, experts), **matrices, **{f"shared_{k}": v[1:] for k, v in matrices.items()}}
    shapes = {"embed": (vocab, width), "layers": [layer] * layers, "norm": (width,), "head": (width, vocab)}

    def attended(x: jax.Array, p: Any) -> jax.Array:
        y = rms_norm(x, p["norm1"])
        q, q_turned = jnp.split(heads(y @ p["q"], head + turned), [head], axis=-1)
        kv, k_turned = jnp.split(y @ p["to_latent"], [latent], axis=-1)
        k, v = jnp.split(heads(rms_norm(kv, p["kv_norm"]) @ p["kv"], 2 * head), 2, axis=-1)
        k_turned = jnp.broadcast_to(rotated(k_turned[:, :, None]), (*k.shape[:3], turned))
        q, k = jnp.concatenate([q, rotated(q_turned)], -1), jnp.concatenate([k, k_turned], -1)
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / math.sqrt(head + turned)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        y = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(x.dtype), v)
        return x + y.reshape(x.shape) @ p["out"]

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x, uneven = params["embed"][batch[:, :-1]], 0.0
        for p in params["layers"]:
            x = attended(constrain(x), p)
            y = rms_norm(x, p["norm2"])
            some, more = routed(y, p, slots)
            every = (jax.nn.silu(y @ p["shared_gate"]) * (y @ p["shared_up"])) @ p["shared_down"]
            x, uneven = x + some + every, uneven + more
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["head"], batch[:, 1:]) + 0.01 * uneven

    return Family(shapes, loss, tokens(seq_len))


def llama_in_pieces(size: LlamaSize, *, pieces: int = 8, seq_len: int = 2048) -> Family:
    """A scanned Llama whose loss takes the words of a piece of each row at a time, and makes its logits again."""
    block, layer = swiglu_block(size)
    shapes = {"embed": (size.vocab, size.width), "norm": (size.width,), "head": (size.width, size.vocab)}
    shapes |= {"stack": stacked(layer, size.layers)}

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, params["embed"][batch[:, :-1]], params["stack"], constrain)
        x = rms_norm(constrain(x), params["norm"])
        cut = lambda y: jnp.moveaxis(y.reshape(y.shape[0], pieces, -1, *y.shape[2:]), 1, 0)

        @jax.checkpoint
        def piece(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + cross_entropy(part[0] @ params["head"], part[1]), None

        return lax.scan(piece, 0.0, (cut(x), cut(batch[:, 1:])))[0] / pieces

    return Family(shapes, loss, tokens(seq_len))


def convnext(
    *, depths: tuple[int, ...] = (3, 3, 9, 3), width: int = 96, image: int = 224, classes: int = 1000
) -> Family:
    """ConvNeXt-T: in four stages a convolution of 7 x 7 within each channel, then a perceptron of every place."""
    widths = [width << i for i in range(len(depths))]
    layer = lambda d: {"taps": (7, 7, 1, d), "norm_scale": (d,), "norm_bias": (d,), "up": (d, 4 * d),
                       "up_bias": (4 * d,), "down": (4 * d, d), "down_bias": (d,), "gamma": (d,)}  # fmt: skip
    shrink = lambda n, c, d: {"kernel": (n, n, c, d), "scale": (d,), "bias": (d,)}
    stages = [[layer(d)] * n for n, d in zip(depths, widths, strict=True)]
    shapes = {"stages": stages, "shrink": [shrink(4, 3, width)], "scale": widths[-1:], "head": (widths[-1], classes)}
    shapes["shrink"] += [shrink(2, c, d) for c, d in itertools.pairwise(widths)]
    shapes["scale"] = shapes["bias"] = (widths[-1],)
    how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def block(x: jax.Array, p: Any) -> jax.Array:  # [B, height, width, channels]
        y = lax.conv_general_dilated(x, p["taps"], (1, 1), "SAME", **how, feature_group_count=x.shape[-1])
        y = layer_norm(y, p["norm_scale"], p["norm_bias"])
        return x + p["gamma"] * (jax.nn.gelu(y @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"])

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = batch["image"].astype(params["head"].dtype)
        for p, layers in zip(params["shrink"], params["stages"], strict=True):
            size = p["kernel"].shape[0]
            x = lax.conv_general_dilated(constrain(x), p["kernel"], (size, size), "VALID", **how)
            x = run(block, layer_norm(x, p["scale"], p["bias"]), layers, constrain)
        x = layer_norm(x.mean((1, 2)), params["scale"], params["bias"])
        return cross_entropy(x @ params["head"], batch["label"])

    def batch_of(rows: int) -> Any:
        images = jax.ShapeDtypeStruct((rows, image, image, 3), jnp.float32)
        return {"image": images, "label": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    return Family(shapes, loss, batch_of, rows=32)
