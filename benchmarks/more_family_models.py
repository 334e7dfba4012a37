"""Further models of `benchmarks.families`, whose memory depends on what compilers do beside products of matrices.

Letters of shapes beside those of `family_models`: N nodes, E edges, L latents, T inputs of a Perceiver.
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


def perceptron(inputs: int, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of two layers and the norm of what they make."""
    return {"up": (inputs, width), "up_bias": (width,), "down": (width, width), "scale": (width,), "bias": (width,)}


def perceived(x: jax.Array, p: Any) -> jax.Array:
    return layer_norm(jax.nn.silu(x @ p["up"] + p["up_bias"]) @ p["down"], p["scale"], p["bias"])


def gnn(*, steps: int = 16, width: int = 512, nodes: int = 2048, edges: int = 16384) -> Family:
    """A graph network that passes 16 messages, unrolled, and recomputes each: edges read both of their ends.

    Of an edge and its ends, or of a node and the sum of its edges, the features are concatenated, as in MeshGraphNets.
    """
    step = {"edge": perceptron(3 * width, width), "node": perceptron(2 * width, width)}
    shapes: Any = {"nodes": perceptron(16, width), "edges": perceptron(8, width), "layers": [step] * steps}
    shapes["head"] = (width, 3)

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        at = jax.vmap(lambda x, index: x[index])
        into = jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=nodes))

        @jax.checkpoint
        def block(x: jax.Array, e: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:  # [B, N, D], [B, E, D]
            ends = [at(x, batch["from"]), at(x, batch["to"])]
            e = e + perceived(jnp.concatenate([e, *ends], -1), p["edge"])
            return x + perceived(jnp.concatenate([x, into(e, batch["to"])], -1), p["node"]), e

        dtype = params["head"].dtype
        x, e = (perceived(batch[name].astype(dtype), params[name]) for name in ("nodes", "edges"))
        for p in params["layers"]:
            x, e = block(constrain(x), constrain(e), p)
        return jnp.square((constrain(x) @ params["head"]).astype(jnp.float32) - batch["target"]).mean()

    def batch_of(rows: int) -> Any:
        numbers = {"nodes": (nodes, 16), "edges": (edges, 8), "target": (nodes, 3)}
        ends = {name: jax.ShapeDtypeStruct((rows, edges), jnp.int32) for name in ("from", "to")}
        return {**ends, **{name: jax.ShapeDtypeStruct((rows, *x), jnp.float32) for name, x in numbers.items()}}

    return Family(shapes, loss, batch_of)


def dit(*, layers: int = 24, width: int = 1024, patch: int = 2, image: int = 32, classes: int = 1000) -> Family:
    """DiT-L/2 on latents of 32 x 32 x 4, scanned: time and class scale, shift and gate each half of a layer (adaLN)."""
    count, size = (image // patch) ** 2, patch * patch * 4
    layer = {k: v for k, v in biased_layer(width).items() if not k.startswith("norm")}
    layer |= {"modulation": (width, 6 * width), "modulation_bias": (6 * width,)}
    shapes: Any = {"patch": (size, width), "positions": (count, width), "classes": (classes, width)}
    shapes |= {"time": [(256, width), (width, width)], "stack": stacked(layer, layers)}
    shapes |= {"last": (width, 2 * width), "head": (width, size)}

    def plain_norm(x: jax.Array) -> jax.Array:
        return jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6).astype(x.dtype)

    def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        return plain_norm(x) * (1 + scale[:, None]) + shift[:, None]

    def patches(x: jax.Array) -> jax.Array:  # [B, 32, 32, 4] to [B, S, 16]
        return x.reshape(-1, image // patch, patch, image // patch, patch, 4).swapaxes(2, 3).reshape(-1, count, size)

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        angles = batch["time"][:, None] * jnp.exp(-jnp.linspace(0, 9, 128))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(params["head"].dtype)
        time = jax.nn.silu(time @ params["time"][0]) @ params["time"][1]
        condition = jax.nn.silu(time + params["classes"][batch["class"]])

        def block(x: jax.Array, p: Any) -> jax.Array:  # [B, S, D]
            parts = jnp.split(condition @ p["modulation"] + p["modulation_bias"], 6, axis=-1)
            y = modulated(x, *parts[:2])
            q, k, v = (heads(part, 64) for part in jnp.split(y @ p["qkv"] + p["qkv_bias"], 3, axis=-1))
            y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"] + p["out_bias"]
            x = x + parts[2][:, None] * y
            y = jax.nn.gelu(modulated(x, *parts[3:5]) @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
            return x + parts[5][:, None] * y

        share = jnp.cos(batch["time"])[:, None, None, None]
        noisy = share * batch["image"] + jnp.sqrt(1 - share**2) * batch["noise"]
        x = patches(noisy).astype(condition.dtype) @ params["patch"] + params["positions"]
        x = run(block, x, params["stack"], constrain)
        x = modulated(constrain(x), *jnp.split(condition @ params["last"], 2, axis=-1)) @ params["head"]
        return jnp.square(x.astype(jnp.float32) - patches(batch["noise"])).mean()

    def batch_of(rows: int) -> Any:
        images = jax.ShapeDtypeStruct((rows, image, image, 4), jnp.float32)
        named = {"time": jnp.float32, "class": jnp.int32}
        return {"image": images, "noise": images, **{k: jax.ShapeDtypeStruct((rows,), v) for k, v in named.items()}}

    return Family(shapes, loss, batch_of, rows=16)


def recurrent(x: jax.Array, p: Any) -> jax.Array:
    """Returns `x` and a gated linear recurrence of it (RG-LRU), by an associative scan in fp32."""
    y = rms_norm(x, p["norm1"])
    u, gate = y @ p["in"], jax.nn.gelu(y @ p["gate_in"])
    padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
    u = sum(padded[:, i : i + u.shape[1]] * p["conv"][i] for i in range(4))
    forget, enter = (jax.nn.sigmoid((u @ p[name]).astype(jnp.float32)) for name in ("forget", "enter"))
    log_decay = -8.0 * forget * jax.nn.softplus(p["decay"].astype(jnp.float32))
    added = jnp.sqrt(-jnp.expm1(2 * log_decay) + 1e-6) * enter * u.astype(jnp.float32)
    combined = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
    states = lax.associative_scan(combined, (jnp.exp(log_decay), added), axis=1)[1]
    return x + (states.astype(x.dtype) * gate) @ p["out"]


def hybrid(*, groups: int = 8, width: int = 1024, vocab: int = 32000, seq_len: int = 1024) -> Family:
    """Griffin: 8 scanned groups of two recurrent layers and one of attention, each with a GEGLU."""
    mlp = {"norm2": (width,), "gate": (width, 3 * width), "up": (width, 3 * width), "down": (3 * width, width)}
    square = dict.fromkeys(("in", "gate_in", "forget", "enter", "out"), (width, width))
    layer = {"norm1": (width,), **square, "conv": (4, width), "decay": (width,), **mlp}
    group = {"first": layer, "second": layer, "attention": {**gqa_layer(width, width // 4), **mlp}}
    shapes: Any = {"embed": (vocab, width), "norm": (width,)}
    shapes["stack"] = {name: stacked(shape, groups) for name, shape in group.items()}

    def mlp_of(x: jax.Array, p: Any) -> jax.Array:
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.gelu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def block(x: jax.Array, p: Any) -> jax.Array:
        for name in ("first", "second"):
            x = mlp_of(recurrent(x, p[name]), p[name])
        return mlp_of(attended(x, p["attention"], 64), p["attention"])

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, params["embed"][batch[:, :-1]], params["stack"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["embed"].T, batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


def perceiver(
    *, times: int = 4, layers: int = 6, width: int = 1024, latents: int = 512, image: int = 224, classes: int = 1000
) -> Family:
    """A Perceiver on images: 4 blocks with the same weights, of one cross-attention and 6 layers on 512 latents."""
    count, size, places = (image // 2) ** 2, 12, 256
    cross = {"inputs_scale": (size + places,), "inputs_bias": (size + places,), "q": (width, width)}
    cross |= {"k": (size + places, width), "v": (size + places, width)}
    cross |= {k: v for k, v in biased_layer(width).items() if not k.startswith("qkv")}
    shapes = {"latents": (latents, width), "positions": (count, places), "cross": cross, "scale": (width,)}
    shapes |= {"layers": [biased_layer(width)] * layers, "bias": (width,), "head": (width, classes)}

    def looked(x: jax.Array, inputs: jax.Array, p: Any) -> jax.Array:  # [B, L, D], [B, T, C]; one head
        y = layer_norm(x, p["norm1_scale"], p["norm1_bias"]) @ p["q"]
        other = layer_norm(inputs, p["inputs_scale"], p["inputs_bias"])
        scores = jnp.einsum("bld,btd->blt", y, other @ p["k"]).astype(jnp.float32) / math.sqrt(width)
        shares = jax.nn.softmax(scores).astype(x.dtype)
        x = x + jnp.einsum("blt,btd->bld", shares, other @ p["v"]) @ p["out"] + p["out_bias"]
        y = layer_norm(x, p["norm2_scale"], p["norm2_bias"])
        return x + jax.nn.gelu(y @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = batch["image"].astype(params["head"].dtype)
        x = x.reshape(-1, image // 2, 2, image // 2, 2, 3).swapaxes(2, 3).reshape(-1, count, size)
        inputs = jnp.concatenate([x, jnp.broadcast_to(params["positions"], (len(x), count, places))], -1)
        x = jnp.broadcast_to(params["latents"], (len(x), latents, width))
        for _ in range(times):
            x = looked(constrain(x), constrain(inputs), params["cross"])
            x = run(functools.partial(biased_block, causal=False), x, params["layers"], constrain)
        x = layer_norm(constrain(x), params["scale"], params["bias"]).mean(1)
        return cross_entropy(x @ params["head"], batch["label"])

    def batch_of(rows: int) -> Any:
        images = jax.ShapeDtypeStruct((rows, image, image, 3), jnp.float32)
        return {"image": images, "label": jax.ShapeDtypeStruct((rows,), jnp.int32)}

    return Family(shapes, loss, batch_of, rows=8)


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    groups = x.reshape(*x.shape[:3], 32, -1).astype(jnp.float32)
    return jax.nn.standardize(groups, axis=(1, 2, 4), epsilon=1e-6).reshape(x.shape).astype(x.dtype) * scale + bias


def unet(*, widths: tuple[int, ...] = (128, 256, 384, 512), image: int = 64) -> Family:
    """A U-Net that finds the noise in images of 64 x 64: two residual blocks per level down, two up, no attention."""
    norms = lambda i, c: {f"norm{i}_scale": (c,), f"norm{i}_bias": (c,)}
    kernels = lambda c, d: {"conv1": (3, 3, c, d), "time": (512, d), "conv2": (3, 3, d, d), "skip": (c, d)}
    layer = lambda c, d: {**norms(1, c), **norms(2, d), **kernels(c, d)}
    down = [layer(*pair) for c, d in zip((widths[0], *widths), widths, strict=False) for pair in ((c, d), (d, d))]
    back = widths[::-1]
    up = [layer(*pair) for c, d in zip((back[0], *back), back, strict=False) for pair in ((c + d, d), (2 * d, d))]
    between = [(3, 3, c, c) for c in widths[:-1]]
    ends = {"first": (3, 3, 3, widths[0]), **norms(0, widths[0]), "last": (3, 3, widths[0], 3), "time": (128, 512)}
    shapes = {**ends, "down": down, "shrink": between, "middle": [layer(back[0], back[0])] * 2, "up": up}
    shapes["grow"] = [(3, 3, c, c) for c in back[:-1]]

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        angles = batch["time"][:, None] * jnp.exp(-jnp.linspace(0, 9, 64))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(params["time"].dtype)
        time = jax.nn.silu(time @ params["time"])

        def block(x: jax.Array, p: Any) -> jax.Array:  # [B, height, width, channels]
            y = convolved(jax.nn.silu(group_norm(x, p["norm1_scale"], p["norm1_bias"])), p["conv1"])
            y = y + (time @ p["time"])[:, None, None]
            y = convolved(jax.nn.silu(group_norm(y, p["norm2_scale"], p["norm2_bias"])), p["conv2"])
            return x @ p["skip"] + y

        share = jnp.cos(batch["time"])[:, None, None, None]
        noisy = share * batch["image"] + jnp.sqrt(1 - share**2) * batch["noise"]
        x = convolved(noisy.astype(time.dtype), params["first"])
        skips = []
        for i, p in enumerate(params["down"]):
            x = block(constrain(x), p)
            skips.append(x)
            if i % 2 and i // 2 < len(widths) - 1:
                x = convolved(x, params["shrink"][i // 2], 2)
        x = run(block, x, params["middle"], constrain)
        for i, p in enumerate(params["up"]):
            x = block(constrain(jnp.concatenate([x, skips.pop()], -1)), p)
            if i % 2 and i // 2 < len(widths) - 1:
                x = convolved(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), params["grow"][i // 2])
        x = jax.nn.silu(group_norm(constrain(x), params["norm0_scale"], params["norm0_bias"]))
        return jnp.square(convolved(x, params["last"]).astype(jnp.float32) - batch["noise"]).mean()

    def batch_of(rows: int) -> Any:
        images = jax.ShapeDtypeStruct((rows, image, image, 3), jnp.float32)
        return {"image": images, "noise": images, "time": jax.ShapeDtypeStruct((rows,), jnp.float32)}

    return Family(shapes, loss, batch_of, rows=8)
