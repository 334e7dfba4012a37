"""The layers that fuzzed models are drawn from: each a way to use parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

DEPTH, CLASSES, LEARNING_RATE = 3, 3, 1e-2


# Each kind: the shapes of its parameters by the widths of input and layer, and the layer itself.


class Kind(NamedTuple):
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    apply: Callable[[dict[str, Any], Any, dict[str, Any]], Any]


KINDS: dict[str, Kind] = {}


def kind(shapes: Callable[[int, int], dict[str, tuple[int, ...]]], *names: str) -> Callable[[Any], Any]:
    def register(apply: Any) -> Any:
        KINDS[names[0] if names else apply.__name__] = Kind(shapes, apply)
        return apply

    return register


def _dense(d: int, k: int) -> dict[str, tuple[int, ...]]:
    return {"w": (d, k), "b": (k,)}


def _block(p: dict[str, Any], h: Any) -> Any:
    return jnp.tanh(h @ p["w"] + p["b"][None])


for act in (jnp.tanh, jax.nn.gelu, jax.nn.silu, jax.nn.relu):
    kind(_dense, act.__name__)(lambda p, h, batch, act=act: act(h @ p["w"] + p["b"][None]))


@kind(lambda d, k: {"w": (d, k)})
def tied(p, h, batch):
    return h + jnp.tanh(h @ p["w"]) @ p["w"].T


@kind(lambda d, k: {"scale": (d,), "bias": (d,)})
def norm(p, h, batch):
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-2)
    return h * (1 + p["scale"][None]) + p["bias"][None]


@kind(lambda d, k: {"table": (k + 9, d)})
def embed_dense(p, h, batch):
    """An embedding that is also multiplied with, as tied vocabularies are."""
    ids = batch["ids"] % p["table"].shape[0]
    return h + jax.nn.softmax(h @ p["table"].T) @ p["table"] + jnp.take(p["table"], ids, axis=0)


@kind(lambda d, k: {"w": (3, 1, k), "v": (k, d)})
def conv(p, h, batch):
    x = h[:, :, None]
    y = lax.conv_general_dilated(x, p["w"].astype(x.dtype), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(y).mean(1) @ p["v"]


@kind(lambda d, k: {"w": (d, k)}, "complex_leaf")
def complex_leaf(p, h, batch):
    return jnp.tanh(jnp.square((h @ p["w"]).real) - (h @ p["w"]).imag)


@jax.custom_vjp
def _own_vjp(w, h):
    return jnp.sin(h @ w)


_own_vjp.defvjp(
    lambda w, h: (_own_vjp(w, h), (w, h)),  # a wrong gradient on purpose: it tells whether the rule is used
    lambda r, g: ((r[1].T @ g).astype(r[0].dtype), 2 * (g @ r[0].T.astype(g.dtype))),
)


@jax.custom_jvp
def _own_jvp(x):
    return x**3


_own_jvp.defjvp(lambda primals, tangents: (_own_jvp(primals[0]), 5 * primals[0] * tangents[0]))


@kind(lambda d, k: {"w": (d, k)})
def custom_vjp(p, h, batch):
    return _own_vjp(p["w"], h)


@kind(lambda d, k: {"w": (d, k), "b": (k,)})
def custom_jvp(p, h, batch):
    return jnp.tanh(h @ _own_jvp(p["w"]) + _own_jvp(p["b"])[None])


@kind(lambda d, k: {"w": (d, d), "b": (d,)})
def cond(p, h, batch):
    """A branch on what all devices share."""
    return lax.cond(batch["turn"] > 0, _block, lambda p, h: jnp.sin(h) * p["b"][None], p, h)


@kind(lambda d, k: {"w": (d, d), "b": (d,), "v": (d, d)})
def switch(p, h, batch):
    return lax.switch(batch["turn"], [lambda h: h, lambda h: _block(p, h), lambda h: jnp.sin(h @ p["v"])], h)


@kind(lambda d, k: {"w": (d, d), "b": (d,), "v": (d, d)})
def cond_each(p, h, batch):
    """A branch on what differs from device to device."""
    return lax.cond(batch["x"][0, 0] > 0, lambda: _block(p, h), lambda: jnp.sin(h @ p["v"]))


def _stack(d: int, k: int) -> dict[str, tuple[int, ...]]:
    return {"w": (DEPTH, d, d), "b": (DEPTH, d)}


def _body(h: Any, p: dict[str, Any]) -> tuple[Any, None]:
    return _block(p, h), None


DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

for name, body in {
    "scan": _body,
    "scan_remat": jax.checkpoint(_body),
    "scan_policy": jax.checkpoint(_body, policy=DOTS),
    "scan_jit": jax.jit(_body),
}.items():
    kind(_stack, name)(lambda p, h, batch, body=body: lax.scan(body, h, p)[0])


@kind(_stack)
def scan_reversed(p, h, batch):
    body = lambda h, layer: (_block(layer, h), layer["b"].sum())
    h, sums = lax.scan(body, h, p, reverse=True, unroll=2)
    return h + sums.mean()


@kind(lambda d, k: {"w": (d, d), "b": (d,)})
def scan_constant(p, h, batch):
    return lax.scan(lambda h, i: (_block(p, h) * (1 + i), None), h, jnp.arange(3))[0]


@kind(lambda d, k: {"w": (2, 2, d, d), "b": (2, 2, d)})
def scan_nested(p, h, batch):
    return lax.scan(lambda h, group: (lax.scan(_body, h, group)[0], None), h, p)[0]


@kind(_stack)
def fori(p, h, batch):
    return lax.fori_loop(0, DEPTH, lambda i, h: _block(jax.tree.map(lambda x: x[i], p), h), h)


def _unrolled(d: int, k: int) -> dict[str, tuple[int, ...]]:
    return {f"{x}{i}": s for i in range(DEPTH) for x, s in (("w", (d, d)), ("b", (d,)))}


for name, block in {
    "unrolled": _block,
    "unrolled_remat": jax.checkpoint(_block),
    "unrolled_policy": jax.checkpoint(_block, policy=DOTS),
    "unrolled_jit": jax.jit(_block),
}.items():

    @kind(_unrolled, name)
    def unrolled(p, h, batch, block=block):
        for i in range(DEPTH):
            h = block({"w": p[f"w{i}"], "b": p[f"b{i}"]}, h)
        return h


@kind(lambda d, k: {"w": (d, d), "b": (d,)})
def nested_jit(p, h, batch):
    """A jitted function that returns parameters, too."""
    h, q = jax.jit(lambda q, h: (jax.jit(_block)(q, h), {**q, "b": q["b"] * 2}))(p, h)
    return _block(q, h)


@kind(lambda d, k: {"w": (d, d), "b": (d,)})
def while_loop(p, h, batch):
    n = lax.while_loop(lambda c: c[1] * jnp.abs(p["b"]).max() < 3, lambda c: (c[0] + 1, c[1] * 2), (0, 1.0))[0]
    return _block(p, h) * (1 + lax.stop_gradient(n.astype(jnp.float32)) / 8)


@kind(lambda d, k: {"w": (d, 2 * k), "v": (k * d,)})
def sliced(p, h, batch):
    k = p["w"].shape[1] // 2
    gate = jnp.concatenate([p["w"][:, k:].T, -p["w"][:, :k].T]).T
    return (jnp.tanh(h @ gate[:, :k]) * jax.nn.sigmoid(h @ gate[:, k:])) @ p["v"].reshape(k, -1)


@kind(lambda d, k: {"e": (k,), "q": (k, k), "v": (k, 2)})
def attention(p, h, batch):
    x = h[:, :, None] * p["e"][None, None]
    scores = jnp.einsum("bik,kl,bjl->bij", x, p["q"].astype(x.dtype), x)
    return h + (jax.nn.softmax(scores) @ (x @ p["v"])).sum(-1)


@kind(lambda d, k: {"w": (d, k)})
def casts(p, h, batch):
    return jnp.tanh(h @ p["w"].astype(jnp.bfloat16).astype(jnp.float32))


@kind(lambda d, k: {"w": (d, k), "g": (k,)})
def weight_norm(p, h, batch):
    """The norm of a whole leaf, which a device's part of it would have another one of."""
    w = p["w"].astype(jnp.float32)
    return jnp.tanh(h @ (w / (0.5 + jnp.linalg.norm(w, axis=0, keepdims=True)))) * (1 + p["g"][None])


@kind(lambda d, k: {"w": (d, k)})
def stopped(p, h, batch):
    return jnp.tanh(h @ p["w"] + lax.stop_gradient(p["w"]).sum(0)[None])


@kind(lambda d, k: {"w": (d, k)})
def sorted_rows(p, h, batch):
    return jnp.tanh(h @ jnp.sort(p["w"], axis=0)) + jnp.cumsum(p["w"], axis=0)[-1][None] / 9


def apply(name: str, p: dict[str, Any], h: Any, batch: dict[str, Any]) -> Any:
    narrow = lambda x: x.astype(jnp.float32) if x.dtype.itemsize < 2 and jnp.issubdtype(x.dtype, jnp.floating) else x
    # Loops carry fp32 whatever the parameters are.
    return KINDS[name].apply(jax.tree.map(narrow, p), h, batch).astype(jnp.float32)
