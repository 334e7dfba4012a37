"""Attention by plain products, a part of the scores at a time; with long contexts each device has a part of every row.

Keys and values are small beside scores, so each device gathers those of whole rows, and attends with its own queries.
A part is two pieces of a row of 2 N: the first and the last go to one device, the second and the last but one to
another, and so on. So all see as many tokens: late ones see many, early ones few.

Shapes: B rows, S tokens of this device, T places that are attended to, H heads, K heads of keys and values, C size of a
head.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")

MOST_SCORES = 2**28
"""Scores that exist at a time: 1 GiB in fp32."""


class Places(NamedTuple):
    """Where tokens are. A token sees those of its segment whose positions are not behind its own.

    Attributes:
      positions: [B, S], from 0 in each example; negative for padding, which is not seen.
      segments: [B, S], the examples of a row by number.
    """

    positions: jax.Array
    segments: jax.Array


class Scores(NamedTuple):
    """How scores are made of products of queries and keys.

    Attributes:
      window: How many tokens a token sees, itself included, perhaps traced; `None` for all.
      softcap: Bounds scores smoothly.
      sinks: Scores beside those of the keys, [H], which take a share of each query, and have no values.
      scale: Products are multiplied by it.
    """

    window: Any
    softcap: float | None
    sinks: jax.Array | None
    scale: float


def own_part(x: jax.Array, axis: str | None) -> jax.Array:
    """Returns this device's part of whole rows, if devices along a mesh axis share them. [B, T, ...] -> [B, S, ...]."""
    if axis is None:
        return x
    count, index = 2 * lax.axis_size(axis), lax.axis_index(axis)
    if x.shape[1] % count:
        raise ValueError(
            f"Rows must have a multiple of {count} tokens, two pieces for each device along {axis!r}: got {x.shape[1]}."
        )
    size = x.shape[1] // count
    pieces = [lax.dynamic_slice_in_dim(x, number * size, size, axis=1) for number in (index, count - 1 - index)]
    return jnp.concatenate(pieces, axis=1)


def whole_rows(x: jax.Array, axis: str | None) -> jax.Array:
    """Returns rows of which each device along a mesh axis has a part. [B, S, ...] -> [B, T, ...]."""
    if axis is None:
        return x
    early, late = jnp.split(x, 2, axis=1)
    early, late = (lax.all_gather(piece, axis, axis=1) for piece in (early, late))  # [B, N, S/2, ...]
    return jnp.concatenate([early, late[:, ::-1]], axis=1).reshape(len(x), -1, *x.shape[2:])


def attend_plainly(  # what attention has
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: Places,
    seen: Places,
    how: Scores,
) -> jax.Array:
    """Returns the mean of the values that each query sees, weighted by its scores. [B, S, H, C].

    Args:
      q: Queries [B, S, H, C].
      k: Keys [B, T, K, C].
      v: Values [B, T, K, C].
      places: Those of the queries.
      seen: Those of the keys.
      how: How scores are made.
    """
    num_rows, size, num_heads, _ = q.shape
    wide = [x.astype(jnp.float32) for x in (k, v)]  # in which the gradients of all parts are added

    def of_part(part: tuple[jax.Array, Places]) -> jax.Array:
        q, places = part  # [B, s, H, C]
        k, v = (x.astype(q.dtype) for x in wide)
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])  # [B, s, K, H/K, C]
        scores = jnp.einsum("bskgc,btkc->bkgst", q, k, preferred_element_type=jnp.float32) * how.scale
        scores = cap(scores, how.softcap)
        distances = places.positions[:, :, None] - seen.positions[:, None]  # [B, s, T]
        visible = (distances >= 0) & (seen.positions >= 0)[:, None]
        visible &= True if how.window is None else distances < how.window
        visible &= places.segments[:, :, None] == seen.segments[:, None]
        scores = jnp.where(visible[:, None, None], scores, -1e30)  # [B, K, H/K, s, T]
        if how.sinks is not None:
            beside = how.sinks.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(beside, (*scores.shape[:-1], 1))], axis=-1)
        shares = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(q.dtype)
        return jnp.einsum("bkgst,btkc->bskgc", shares, v).reshape(*q.shape[:2], num_heads, -1)

    count = num_parts(size, at_most=MOST_SCORES // (num_rows * num_heads * k.shape[1]))
    if count == 1:
        return of_part((q, places))
    return join(lax.map(jax.checkpoint(of_part), divide((q, places), count)))


def cap(x: jax.Array, limit: float | None) -> jax.Array:
    """Bounds numbers smoothly, if there is a limit."""
    return x if limit is None else limit * jnp.tanh(x / limit)


def num_parts(size: int, *, at_most: int) -> int:
    """Returns the least number of equal parts of so many tokens that have `at_most` each, or one."""
    return next(n for n in range(1, size + 1) if size % n == 0 and size // n <= max(1, at_most))


def divide(tree: T, count: int) -> T:
    """Divides rows into parts of as many tokens. [B, S, ...] -> [count, B, S/count, ...]."""
    size = jax.tree.leaves(tree)[0].shape[1]
    if size % count:
        raise ValueError(f"Rows of {size} tokens have no {count} equal parts: choose a number that divides them.")
    parts: T = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), count, -1, *x.shape[2:]), 1, 0), tree)
    return parts


def join(parts: jax.Array) -> jax.Array:
    """Joins parts of rows. [count, B, s, ...] -> [B, S, ...]."""
    return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1, *parts.shape[3:])
