"""The decoder that DeepSpeed and FSDP2 trained for `tests/data/deepspeed_runs.json`: its weights, tokens and loss.

A pre-LN GPT with an untied head and no bias on queries, keys and values. Matrices multiply from the right. The loss
computes in the dtype of the parameters that it is handed; where PyTorch widens 16-bit numbers inside one operation
(layer norm, GELU, softmax, a quotient, cross-entropy), so does this.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, D_MODEL, D_FF, LAYERS, HEADS, SEQ = 512, 128, 512, 4, 4, 64
STEPS, ROWS = 30, 16
WEIGHT_SEED, TOKEN_SEED = 1234, 4321
WEIGHTS_SHA256 = "9cd21597be66536ad3367a3045b4d5a08e8d8d72f61702486e56b7905c131b9a"
TOKENS_SHA256 = "34d21436595bbddd8fcb38714041f544dfbf0f65c3708ba82f1d94c91124bda8"

PyTree = Any

DEPTH = np.sqrt(2 * LAYERS)  # matrices that write to the residual stream start smaller by this
# In the order in which the runs drew them: shape, mean, standard deviation, and what that is divided by.
BLOCK = {
    "ln1.g": ((D_MODEL,), 1, 0.05),
    "ln1.b": ((D_MODEL,), 0, 0.02),
    "attn.wqkv": ((D_MODEL, 3 * D_MODEL), 0, 0.04),
    "attn.wo": ((D_MODEL, D_MODEL), 0, 0.04, DEPTH),
    "attn.bo": ((D_MODEL,), 0, 0.02),
    "ln2.g": ((D_MODEL,), 1, 0.05),
    "ln2.b": ((D_MODEL,), 0, 0.02),
    "mlp.w1": ((D_MODEL, D_FF), 0, 0.04),
    "mlp.b1": ((D_FF,), 0, 0.02),
    "mlp.w2": ((D_FF, D_MODEL), 0, 0.04, DEPTH),
    "mlp.b2": ((D_MODEL,), 0, 0.02),
}
WEIGHTS = {
    "wte": ((VOCAB, D_MODEL), 0, 0.04),
    "wpe": ((SEQ, D_MODEL), 0, 0.04),
    **{f"blocks.{i}.{name}": leaf for i in range(LAYERS) for name, leaf in BLOCK.items()},
    "ln_f.g": ((D_MODEL,), 1, 0.05),
    "ln_f.b": ((D_MODEL,), 0, 0.02),
    "head.w": ((D_MODEL, VOCAB), 0, 0.06),
}


@functools.cache
def initial_params() -> PyTree:
    """Returns the float32 weights that every run starts from, those of the blocks stacked on a leading dimension."""
    rng = np.random.default_rng(WEIGHT_SEED)
    flat = {name: draw(rng, *leaf) for name, leaf in WEIGHTS.items()}
    check_sha256("weights", flat, WEIGHTS_SHA256)
    blocks = {f"blocks.{name}": np.stack([flat.pop(f"blocks.{i}.{name}") for i in range(LAYERS)]) for name in BLOCK}
    return nested(flat | blocks)


def nested(flat: Mapping[str, Any]) -> PyTree:
    """Returns a tree of dictionaries from names with dots."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def draw(rng: np.random.Generator, shape: tuple[int, ...], mean: float, std: float, divisor: float = 1) -> np.ndarray:
    return (mean + std * rng.standard_normal(shape) / divisor).astype(np.float32)


@functools.cache
def tokens() -> np.ndarray:
    """Returns the global batch of every step, `[STEPS, ROWS, SEQ + 1]`: an affine rule, broken one time in five."""
    rng = np.random.default_rng(TOKEN_SEED)
    rows = (STEPS, ROWS)
    columns = [rng.integers(0, VOCAB, rows)]
    broken = rng.random((*rows, SEQ)) < 0.2
    random = rng.integers(0, VOCAB, (*rows, SEQ))
    for i in range(SEQ):
        columns.append(np.where(broken[..., i], random[..., i], (5 * columns[-1] + 17) % VOCAB))
    result = np.stack(columns, axis=-1).astype(np.int32)
    check_sha256("tokens", {"tokens": result}, TOKENS_SHA256)
    return result


def check_sha256(what: str, arrays: Mapping[str, np.ndarray], expected: str) -> None:
    """Asserts that named arrays are, bit for bit, those of the recorded runs."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}|{array.shape}|{array.dtype}|".encode())
        digest.update(array.tobytes())
    assert digest.hexdigest() == expected, f"numpy {np.__version__} draws other {what} than the recorded runs had."


def loss_fn(params: PyTree, batch: jax.Array, heads: int = HEADS) -> jax.Array:
    """Returns the mean cross-entropy of predicting each token of `batch` `[rows, SEQ + 1]` from those before it."""
    x = params["wte"][batch[:, :-1]] + params["wpe"][None]  # [rows, SEQ, D_MODEL]
    x, _ = jax.lax.scan(lambda x, p: (block(p, x, heads), None), x, params["blocks"])
    logits = layer_norm(params["ln_f"], x) @ params["head"]["w"]
    log_probs = jax.nn.log_softmax(wide(logits))
    return -jnp.take_along_axis(log_probs, batch[:, 1:, None], axis=-1).mean()


def block(p: PyTree, x: jax.Array, heads: int) -> jax.Array:
    x = x + attention(p["attn"], layer_norm(p["ln1"], x), heads)
    h = affine(layer_norm(p["ln2"], x), p["mlp"]["w1"], p["mlp"]["b1"])
    h = jax.nn.gelu(wide(h), approximate=True).astype(x.dtype)
    return x + affine(h, p["mlp"]["w2"], p["mlp"]["b2"])


def attention(p: PyTree, x: jax.Array, heads: int) -> jax.Array:
    split = lambda y: y.reshape(*y.shape[:2], heads, -1)
    q, k, v = map(split, jnp.split(x @ p["wqkv"], 3, axis=-1))  # each [rows, SEQ, heads, D_MODEL / heads]
    scores = (wide(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / math.sqrt(q.shape[-1])).astype(x.dtype)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, wide(scores), -jnp.inf)).astype(x.dtype)
    return affine(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), p["wo"], p["bo"])


def layer_norm(p: PyTree, x: jax.Array) -> jax.Array:
    y = wide(x)
    y = y - y.mean(-1, keepdims=True)
    y = y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
    return (y * wide(p["g"])[None, None] + wide(p["b"])[None, None]).astype(x.dtype)


def affine(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return x @ w + b[None, None]


def wide(x: jax.Array) -> jax.Array:
    """Returns 16-bit numbers in float32, others as they are."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
