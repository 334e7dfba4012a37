"""The models of `unseen_models` on images and on pairs.

Letters of shapes beside those of `family_models`: P patches, R rows of an alignment, I and J both ends of a pair.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.family_models import (
    Constrain,
    Family,
    biased_block,
    biased_layer,
    cross_entropy,
    heads,
    layer_norm,
    rms_norm,
    run,
    stacked,
)

images = lambda rows, size: jax.ShapeDtypeStruct((rows, size, size, 3), jnp.float32)
labels = lambda rows: jax.ShapeDtypeStruct((rows,), jnp.int32)


def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int = 32) -> jax.Array:
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    wide = jax.nn.standardize(wide, axis=(1, 2, 4), epsilon=1e-5)
    return wide.reshape(x.shape).astype(x.dtype) * scale + bias


def adm_shapes(width: int) -> Any:
    """Returns the parameters of `adm`, the pieces of each side in their order."""
    widths = [width * i for i in (1, 2, 3, 4)]

    def res(i: int, o: int) -> Any:
        p: Any = {"scale1": (i,), "bias1": (i,), "conv1": (3, 3, i, o), "time": (4 * width, 2 * o)}
        p |= {"scale2": (o,), "bias2": (o,), "conv2": (3, 3, o, o)}
        return p | ({"skip": (i, o)} if i != o else {})

    attention = lambda d: {"scale": (d,), "bias": (d,), "qkv": (d, 3 * d), "out": (d, d)}
    shapes: Any = {"in": (3, 3, 3, width), "time": [(width, 4 * width), (4 * width, 4 * width)], "down": [], "up": []}
    skips, at = [width], width
    for level, d in enumerate(widths):
        for _ in range(2):
            shapes["down"].append({"res": res(at, d)} | ({"attention": attention(d)} if level else {}))
            at = d
            skips.append(at)
        if level < 3:
            shapes["down"].append({"pool": (3, 3, at, at)})
            skips.append(at)
    shapes["middle"] = [{"res": res(at, at), "attention": attention(at)}, {"res": res(at, at)}]
    for level, d in reversed(list(enumerate(widths))):
        for j in range(3):
            p = {"res": res(at + skips.pop(), d)} | ({"attention": attention(d)} if level else {})
            at = d
            shapes["up"].append(p | ({"grow": (3, 3, at, at)} if level and j == 2 else {}))
    shapes |= {"scale": (width,), "bias": (width,), "last": (3, 3, width, 3)}
    return shapes


def res_of(x: jax.Array, time: jax.Array, p: Any) -> jax.Array:  # [B, I, I, D]
    y = conv(jax.nn.silu(group_norm(x, p["scale1"], p["bias1"])), p["conv1"])
    scale, shift = jnp.split((jax.nn.silu(time) @ p["time"])[:, None, None], 2, -1)
    y = group_norm(y, p["scale2"], p["bias2"]) * (1 + scale) + shift
    return (x @ p["skip"] if "skip" in p else x) + conv(jax.nn.silu(y), p["conv2"])


def attention_of(x: jax.Array, p: Any) -> jax.Array:
    y = group_norm(x, p["scale"], p["bias"]).reshape(x.shape[0], -1, x.shape[-1])
    q, k, v = (heads(a, 64) for a in jnp.split(y @ p["qkv"], 3, -1))
    y = jax.nn.dot_product_attention(q, k, v).reshape(y.shape) @ p["out"]
    return x + y.reshape(x.shape)


def adm(*, width: int = 192, image: int = 64) -> Family:
    """ADM's U-Net at 64 x 64: widths 1, 2, 3, 4; two residual blocks a level, attention at 32, 16 and 8."""
    shapes = adm_shapes(width)

    def piece(x: jax.Array, time: jax.Array, p: Any) -> jax.Array:
        if "pool" in p:
            return conv(x, p["pool"], 2)
        x = res_of(x, time, p["res"])
        return attention_of(x, p["attention"]) if "attention" in p else x

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        dtype = params["in"].dtype
        angles = batch["time"][:, None] * jnp.exp(-jnp.linspace(0, 9, width // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
        time = jax.nn.silu(time @ params["time"][0]) @ params["time"][1]
        share = jnp.cos(batch["time"])[:, None, None, None]
        x = conv((share * batch["image"] + jnp.sqrt(1 - share**2) * batch["noise"]).astype(dtype), params["in"])
        kept = [x]
        for p in params["down"]:
            x = piece(constrain(x), time, p)
            kept.append(x)
        for p in params["middle"]:
            x = piece(constrain(x), time, p)
        for p in params["up"]:
            x = piece(jnp.concatenate([constrain(x), kept.pop()], -1), time, p)
            if "grow" in p:
                x = conv(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), p["grow"])
        x = conv(jax.nn.silu(group_norm(x, params["scale"], params["bias"])), params["last"])
        return jnp.square(x.astype(jnp.float32) - batch["noise"]).mean()

    def batch_of(rows: int) -> Any:
        time = jax.ShapeDtypeStruct((rows,), jnp.float32)
        return {"image": images(rows, image), "noise": images(rows, image), "time": time}

    return Family(shapes, loss, batch_of, rows=8)


def patches_of(x: jax.Array, patch: int) -> jax.Array:  # [B, I, I, 3] to [B, P, D]
    b, size, _, c = x.shape
    x = x.reshape(b, size // patch, patch, size // patch, patch, c).swapaxes(2, 3)
    return x.reshape(b, (size // patch) ** 2, patch * patch * c)


def clip_b16(*, layers: int = 12, image_width: int = 768, text_width: int = 512, vocab: int = 49408) -> Family:
    """CLIP ViT-B/16, scanned towers: each device compares its rows with the features of the whole batch."""
    tower = lambda d: {"stack": stacked(biased_layer(d), layers), "scale": (d,), "bias": (d,), "head": (d, 512)}
    shapes: Any = {"image": tower(image_width), "text": tower(text_width), "temperature": (1,)}
    shapes["image"] |= {"patch": (768, image_width), "positions": (196, image_width)}
    shapes["text"] |= {"embed": (vocab, text_width), "positions": (77, text_width)}

    def features(x: jax.Array, p: Any, constrain: Constrain, *, causal: bool) -> jax.Array:
        x = run(functools.partial(biased_block, causal=causal), x, p["stack"], constrain)
        x = layer_norm(constrain(x), p["scale"], p["bias"])
        x = ((x[:, -1] if causal else x.mean(1)) @ p["head"]).astype(jnp.float32)
        return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True))

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        p = params["image"]
        x = patches_of(batch["image"].astype(p["patch"].dtype), 16) @ p["patch"] + p["positions"]
        image = features(x, p, constrain, causal=False)
        p = params["text"]
        text = features(p["embed"][batch["text"]] + p["positions"], p, constrain, causal=True)
        images, texts = (lax.all_gather(x, "data", tiled=True) for x in (image, text))
        start = lax.axis_index("data") * image.shape[0]
        scale = jnp.exp(params["temperature"].astype(jnp.float32))
        own = start + jnp.arange(image.shape[0])
        return (cross_entropy(scale * image @ texts.T, own) + cross_entropy(scale * text @ images.T, own)) / 2

    def batch_of(rows: int) -> Any:
        return {"image": images(rows, 224), "text": jax.ShapeDtypeStruct((rows, 77), jnp.int32)}

    return Family(shapes, loss, batch_of, rows=32)


def resnet(*, classes: int = 1000, image: int = 224) -> Family:
    """ResNet-50 with the batch's statistics, over this device's rows."""
    shapes: Any = {"stem": (7, 7, 3, 64), "stem_norm": (2, 64), "head": (2048, classes), "layers": []}
    at = 64
    for count, d in zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True):
        for i in range(count):
            p: Any = {"c1": (1, 1, at, d), "c2": (3, 3, d, d), "c3": (1, 1, d, 4 * d)}
            p |= {"n1": (2, d), "n2": (2, d), "n3": (2, 4 * d)}
            shapes["layers"].append(p | ({"skip": (1, 1, at, 4 * d), "n4": (2, 4 * d)} if i == 0 else {}))
            at = 4 * d

    def norm(x: jax.Array, p: jax.Array) -> jax.Array:
        wide = jax.nn.standardize(x.astype(jnp.float32), axis=(0, 1, 2), epsilon=1e-5)
        return wide.astype(x.dtype) * (1 + p[0]) + p[1]

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = batch["image"].astype(params["stem"].dtype)
        x = jax.nn.relu(norm(conv(x, params["stem"], 2), params["stem_norm"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for i, p in enumerate(params["layers"]):
            stride = 2 if "skip" in p and i else 1
            y = jax.nn.relu(norm(conv(constrain(x), p["c1"]), p["n1"]))
            y = norm(conv(jax.nn.relu(norm(conv(y, p["c2"], stride), p["n2"])), p["c3"]), p["n3"])
            x = jax.nn.relu(y + (norm(conv(x, p["skip"], stride), p["n4"]) if "skip" in p else x))
        return cross_entropy(constrain(x).mean((1, 2)) @ params["head"], batch["label"])

    return Family(shapes, loss, lambda rows: {"image": images(rows, image), "label": labels(rows)}, rows=32)


def mixer(*, layers: int = 24, width: int = 1024, patch: int = 16, classes: int = 1000) -> Family:
    """MLP-Mixer-L/16, scanned."""
    count = (224 // patch) ** 2
    layer = {"norm1": (width,), "norm2": (width,), "t1": (count, 512), "t1_bias": (512,), "t2": (512, count)}
    layer |= {"c1": (width, 4 * width), "c1_bias": (4 * width,), "c2": (4 * width, width), "c2_bias": (width,)}
    shapes: Any = {"patch": (patch * patch * 3, width), "stack": stacked(layer, layers), "norm": (width,)}
    shapes |= {"head": (width, classes)}

    def block(x: jax.Array, p: Any) -> jax.Array:
        y = rms_norm(x, p["norm1"]).swapaxes(1, 2)
        x = x + (jax.nn.gelu(y @ p["t1"] + p["t1_bias"]) @ p["t2"]).swapaxes(1, 2)
        y = rms_norm(x, p["norm2"])
        return x + jax.nn.gelu(y @ p["c1"] + p["c1_bias"]) @ p["c2"] + p["c2_bias"]

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = patches_of(batch["image"].astype(params["patch"].dtype), patch) @ params["patch"]
        x = run(block, x, params["stack"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]).mean(1) @ params["head"], batch["label"])

    return Family(shapes, loss, lambda rows: {"image": images(rows, 224), "label": labels(rows)}, rows=32)


def triangle(z: jax.Array, p: Any, how: str) -> jax.Array:  # [B, I, J, D]
    width = z.shape[-1]
    y = rms_norm(z, p["norm"])
    gates = jax.nn.sigmoid(y @ p["gates"])
    a, b = jnp.split((y @ p["ab"]) * gates[..., :-width], 2, -1)
    y = rms_norm(jnp.einsum(how, a, b), p["norm2"]) @ p["out"]
    return z + gates[..., -width:] * y


def evoformer(*, layers: int = 4, pair: int = 128, single: int = 256, size: int = 256, rows_msa: int = 64) -> Family:
    """Blocks of AlphaFold's Evoformer, unrolled: rows and columns of an alignment, triangles of pairs."""
    att = lambda d: {"norm": (d,), "qkv": (d, 3 * d), "gate": (d, d), "out": (d, d)}
    tri = {"norm": (pair,), "ab": (pair, 2 * pair), "gates": (pair, 3 * pair), "norm2": (pair,), "out": (pair, pair)}
    mlp = lambda d: {"norm": (d,), "up": (d, 4 * d), "down": (4 * d, d)}
    layer: Any = {
        "row": att(single) | {"bias": (pair, 8)},
        "column": att(single),
        "msa": mlp(single),
        "pair": mlp(pair),
    }
    layer |= {"mean": {"norm": (single,), "ab": (single, 64), "out": (1024, pair)}, "outgoing": tri, "incoming": tri}
    layer |= {"start": att(pair) | {"bias": (pair, 4)}}
    shapes: Any = {"msa": (23, single), "left": (23, pair), "right": (23, pair), "layers": [layer] * layers}
    shapes |= {"head": (pair, 64)}

    def attend(x: jax.Array, p: Any, bias: jax.Array | None = None) -> jax.Array:  # [B, R, S, D]
        y = rms_norm(x, p["norm"])
        q, k, v = (heads(a, 32) for a in jnp.split(y @ p["qkv"], 3, -1))
        scores = jnp.einsum("brshd,brthd->brhst", q, k).astype(jnp.float32) / math.sqrt(32)
        if bias is not None:
            scores = scores + jnp.moveaxis(bias, -1, 1)[:, None]
        y = jnp.einsum("brhst,brthd->brshd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(x.shape)
        return x + (y * jax.nn.sigmoid(y_gate(x, p))) @ p["out"]

    y_gate = lambda x, p: rms_norm(x, p["norm"]) @ p["gate"]
    mlp_of = lambda x, p: x + jax.nn.relu(rms_norm(x, p["norm"]) @ p["up"]) @ p["down"]

    def block(m: jax.Array, z: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
        m = attend(m, p["row"], z @ p["row"]["bias"])
        m = attend(m.swapaxes(1, 2), p["column"]).swapaxes(1, 2)
        m = mlp_of(m, p["msa"])
        a, b = jnp.split(rms_norm(m, p["mean"]["norm"]) @ p["mean"]["ab"], 2, -1)
        y = jnp.einsum("brsi,brtj->bstij", a, b) / rows_msa
        z = z + y.reshape(*y.shape[:3], -1) @ p["mean"]["out"]
        z = triangle(z, p["outgoing"], "bikc,bjkc->bijc")
        z = triangle(z, p["incoming"], "bkic,bkjc->bijc")
        z = attend(z, p["start"], z @ p["start"]["bias"])
        return m, mlp_of(z, p["pair"])

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        dtype = params["head"].dtype
        one_hot = jax.nn.one_hot(batch["msa"], 23, dtype=dtype)
        m, first = one_hot @ params["msa"], one_hot[:, 0]
        z = (first @ params["left"])[:, :, None] + (first @ params["right"])[:, None]
        for p in params["layers"]:
            m, z = block(constrain(m), constrain(z), p)
        return cross_entropy(constrain(z) @ params["head"], batch["distance"])

    def batch_of(rows: int) -> Any:
        sizes = {"msa": (rows_msa, size), "distance": (size, size)}
        return {k: jax.ShapeDtypeStruct((rows, *s), jnp.int32) for k, s in sizes.items()}

    return Family(shapes, loss, batch_of, rows=1)
