"""Models of `benchmarks.families` with tables of which a step looks up few rows.

Letters of shapes beside those of `family_models`: T tables, V rows of one, K values of a head.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.family_models import Constrain, Family, Gather, cross_entropy, heads, rms_norm, run, stacked, tokens


def layers_of(*widths: int) -> list[dict[str, tuple[int, ...]]]:
    """Returns the shapes of a perceptron."""
    return [{"w": (a, b), "b": (b,)} for a, b in itertools.pairwise(widths)]


def mlp_of(x: jax.Array, layers: Any) -> jax.Array:
    """Returns what a perceptron makes of `x`."""
    for i, p in enumerate(layers):
        x = x @ p["w"] + p["b"]
        x = jax.nn.relu(x) if i < len(layers) - 1 else x
    return x


def dlrm(*, rows: int, tables: int = 8, width: int = 64, dense: int = 13, batch: int = 16384) -> Family:
    """A DLRM: 8 features that are rows of tables and 13 numbers meet in products, and a perceptron tells clicks."""
    pairs = [(i, j) for i in range(tables + 1) for j in range(i)]
    shapes: Any = {"tables": [(rows, width)] * tables, "bottom": layers_of(dense, 512, 256, width)}
    shapes["top"] = layers_of(width + len(pairs), 1024, 1024, 512, 256, 1)

    def loss(params: Any, batch: Any, constrain: Constrain) -> jax.Array:
        x = mlp_of(constrain(batch["dense"]).astype(params["top"][0]["w"].dtype), params["bottom"])
        found = [table[batch["sparse"][:, i]] for i, table in enumerate(params["tables"])]
        every = constrain(jnp.stack([x, *found], axis=1))  # [B, T + 1, D]
        products = jnp.einsum("bid,bjd->bij", every, every)
        chosen = products[:, [i for i, _ in pairs], [j for _, j in pairs]]
        logits = mlp_of(jnp.concatenate([x, chosen], axis=1), params["top"])[:, 0].astype(jnp.float32)
        return (jax.nn.softplus(logits) - logits * batch["click"]).mean()

    def batch_of(rows: int) -> Any:
        part = lambda dtype, *shape: jax.ShapeDtypeStruct((rows, *shape), dtype)
        return {"dense": part(jnp.float32, dense), "sparse": part(jnp.int32, tables), "click": part(jnp.float32)}

    return Family(shapes, loss, batch_of, rows=batch)


def two_tower(*, users: int = 2**20, items: int = 2**19, width: int = 128, seen: int = 20) -> Family:
    """Two-tower retrieval: users with the last 20 items they saw, against the items of all devices' rows."""
    shapes: Any = {"users": (users, width), "items": (items, width)}
    shapes |= {"user": layers_of(2 * width, 512, 256, width), "item": layers_of(width, 512, 256, width)}

    def loss(params: Any, batch: Any, constrain: Constrain, gather: Gather) -> jax.Array:
        mean = params["items"][constrain(batch["seen"])].mean(1)  # [B, 20, D] to [B, D]
        user = mlp_of(jnp.concatenate([params["users"][batch["user"]], mean], axis=-1), params["user"])
        item, own = gather(mlp_of(params["items"][batch["item"]], params["item"]))
        return cross_entropy(constrain(user) @ item.T, own)

    def batch_of(rows: int) -> Any:
        ids = lambda *shape: jax.ShapeDtypeStruct((rows, *shape), jnp.int32)
        return {"user": ids(), "item": ids(), "seen": ids(seen)}

    return Family(shapes, loss, batch_of, rows=1024, gathers=True)


def wkv(r: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, bonus: jax.Array, length: int = 16) -> jax.Array:
    """Returns the outputs [B, S, H, K] of RWKV-6's recurrence, in pieces of 16 steps; `decay` are logarithms, fp32."""
    r, k, v, decay = (jnp.moveaxis(x.reshape(x.shape[0], -1, length, *x.shape[2:]), 1, 0) for x in (r, k, v, decay))
    causal = jnp.tril(jnp.ones((length, length), r.dtype), -1)

    def piece(state: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:  # [B, H, K, K], each [B, L, H, K]
        r, k, v, decay = xs
        after = jnp.cumsum(decay, axis=1)
        into, out = (r * jnp.exp(after - decay).astype(r.dtype), k * jnp.exp(-after).astype(k.dtype))
        y = jnp.einsum("blhk,bmhk,lm,bmhv->blhv", into, out, causal, v) + jnp.einsum("blhk,bhkv->blhv", into, state)
        y = y + jnp.einsum("blhk,hk,blhk->blh", r, bonus, k)[..., None] * v
        last = jnp.exp(after[:, -1]).astype(k.dtype)[..., None]
        return last * (state + jnp.einsum("blhk,blhv->bhkv", out, v)), y

    start = jnp.zeros((r.shape[1], *r.shape[3:], v.shape[-1]), r.dtype)
    return jnp.moveaxis(lax.scan(piece, start, (r, k, v, decay))[1], 0, 1).reshape(r.shape[1], -1, *v.shape[3:])


def rwkv_6(*, layers: int = 12, width: int = 768, vocab: int = 65536, rank: int = 64, seq_len: int = 1024) -> Family:
    """RWKV-6 of 12 scanned layers in heads of 64, whose decays depend on the data; embedding and head are not tied."""
    mixes = {f"mix_{name}": (width,) for name in "rkvgwcd"}
    layer = {**mixes, **dict.fromkeys("rkvgo", (width, width)), "bonus": (width,), "decay": (width,)}
    layer |= {"decay_in": (width, rank), "decay_out": (rank, width), "norm1": (width,), "norm2": (width,)}
    layer |= {"norm": (width,), "up": (width, 7 * width // 2), "down": (7 * width // 2, width), "gate": (width, width)}
    shapes: Any = {"embed": (vocab, width), "scale": (width,), "norm": (width,), "head": (width, vocab)}
    shapes["stack"] = stacked(layer, layers)

    def mixed(y: jax.Array, share: jax.Array) -> jax.Array:
        return y + (jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1] - y) * share  # with the step before

    def block(x: jax.Array, p: Any) -> jax.Array:  # [B, S, D]
        y = rms_norm(x, p["norm1"])
        r, k, v, gate = (mixed(y, p[f"mix_{name}"]) @ p[name] for name in "rkvg")
        decay = (p["decay"] + jnp.tanh(mixed(y, p["mix_w"]) @ p["decay_in"]) @ p["decay_out"]).astype(jnp.float32)
        parts = (heads(z, 64) for z in (r, k, v, -jnp.exp(decay)))
        seen = wkv(*parts, heads(p["bonus"], 64)).reshape(x.shape)
        x = x + (rms_norm(seen, p["norm"]) * jax.nn.silu(gate)) @ p["o"]
        y = rms_norm(x, p["norm2"])
        hidden = jnp.square(jax.nn.relu(mixed(y, p["mix_c"]) @ p["up"])) @ p["down"]
        return x + jax.nn.sigmoid(mixed(y, p["mix_d"]) @ p["gate"]) * hidden

    def loss(params: Any, batch: jax.Array, constrain: Constrain) -> jax.Array:
        x = run(block, rms_norm(params["embed"][batch[:, :-1]], params["scale"]), params["stack"], constrain)
        return cross_entropy(rms_norm(constrain(x), params["norm"]) @ params["head"], batch[:, 1:])

    return Family(shapes, loss, tokens(seq_len))


small_dlrm, large_dlrm = functools.partial(dlrm, rows=2**18), functools.partial(dlrm, rows=2**22)
