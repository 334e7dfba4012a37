"""Attention and a norm as kernels of Pallas, in interpret mode, and models that use them.

Shapes: B rows, S tokens, H heads, C size of a head.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jzero.core.base import compat
from jzero.core.jaxpr.kernels import kernel_name

Tree = Any


def _forward_kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, stat_ref: Any) -> None:
    q, k, v = q_ref[...], k_ref[...], v_ref[...]  # [S, C]
    scores = jnp.where(_is_seen(q), q @ k.T, -1e30)
    stat = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    out_ref[...] = jnp.exp(scores - stat) @ v
    stat_ref[...] = stat


def _backward_kernel(*refs: Any) -> None:
    q, k, v, out, stat, ct = (x[...] for x in refs[:6])
    shares = jnp.exp(jnp.where(_is_seen(q), q @ k.T, -1e30) - stat)
    of_scores = shares * (ct @ v.T - (ct * out).sum(-1, keepdims=True))
    refs[6][...], refs[7][...], refs[8][...] = of_scores @ k, of_scores.T @ q, shares.T @ ct


def _is_seen(x: jax.Array) -> jax.Array:
    return jnp.arange(len(x))[:, None] >= jnp.arange(len(x))[None]


def _call(kernel: Callable[..., None], name: str, widths: list[int], *args: jax.Array) -> Any:
    """Runs a kernel on each row and head."""
    rows, heads, size, _ = args[0].shape

    def specs(widths: list[int]) -> list[pl.BlockSpec]:
        return [pl.BlockSpec((None, None, size, width), lambda b, h: (b, h, 0, 0)) for width in widths]

    return pl.pallas_call(
        kernel,
        grid=(rows, heads),
        in_specs=specs([x.shape[-1] for x in args]),
        out_specs=specs(widths),
        out_shape=[jax.ShapeDtypeStruct((rows, heads, size, width), args[0].dtype) for width in widths],
        interpret=True,
        name=name,
    )(*args)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention; [B, H, S, C]."""
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    out, stat = _call(_forward_kernel, "attention_forward", [v.shape[-1], 1], q, k, v)
    return out, (q, k, v, out, stat)


def _backward(saved: Any, ct: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_call(_backward_kernel, "attention_backward", [x.shape[-1] for x in saved[:3]], *saved, ct))


attention.defvjp(_forward, _backward)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same in plain operations."""
    scores = jnp.where(_is_seen(q[0, 0]), jnp.einsum("bhsc,bhtc->bhst", q, k), -1e30)
    return jnp.einsum("bhst,bhtc->bhsc", jax.nn.softmax(scores), v)


@jax.custom_vjp
def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x * scale` as a kernel that reads a parameter; [N, D], [D]."""
    (out,) = pl.pallas_call(
        _scale_kernel, out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)], interpret=True, name="scaled"
    )(x, scale)
    return out


def _scale_kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * scale_ref[...][None]


scaled.defvjp(
    lambda x, scale: (scaled(x, scale), (x, scale)),
    lambda saved, ct: (scaled(ct, saved[1]), (ct * saved[0]).sum(0)),
)

HEADS, SIZE, WIDTH = 3, 5, 15


def params(layers: int, *, scan: bool) -> Tree:
    """Parameters of a decoder of odd sizes."""
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"scale": (WIDTH,), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    stacks = {n: 0.2 * jax.random.normal(key, (layers, *shapes[n])) for n, key in zip(shapes, keys, strict=True)}
    return stacks if scan else [jax.tree.map(lambda x, i=i: x[i], stacks) for i in range(layers)]


def layer(x: jax.Array, p: Tree, attend: Callable[..., jax.Array] = attention) -> jax.Array:
    """One layer; [B, S, D]."""
    y = scaled(x.reshape(-1, WIDTH), p["scale"]).reshape(x.shape)
    q, k, v = ((y @ p[n]).reshape(*x.shape[:2], HEADS, SIZE).swapaxes(1, 2) for n in "qkv")
    q, k = jnp.sin(q), jnp.sin(k)  # as angles do: elementwise, between product and kernel
    x = x + attend(q, k, v).swapaxes(1, 2).reshape(x.shape) @ p["o"]
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def loss_of(attend: Callable[..., jax.Array] = attention) -> Callable[[Tree, jax.Array], jax.Array]:
    """Returns the loss of the decoder, scanned or unrolled as the parameters are."""

    def loss(params: Tree, batch: jax.Array) -> jax.Array:
        if isinstance(params, dict):
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p, attend), None), batch, params)
        else:
            x = functools.reduce(lambda x, p: layer(x, p, attend), params, batch)
        return jnp.square(x).mean()

    return loss


def calls_of(jaxpr: compat.AnyJaxpr, times: int = 1) -> collections.Counter[str]:
    """Returns how often a program runs each kernel, by its name."""
    count: collections.Counter[str] = collections.Counter()
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "pallas_call":
            count[kernel_name(eqn)] += times
            continue
        for inner in compat.contained_jaxprs(eqn):
            count += calls_of(inner, times * eqn.params.get("length", 1))
    return count
