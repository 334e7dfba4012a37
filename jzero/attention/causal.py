"""Causal attention by a kernel that has what is asked for, or by plain products.

Shapes: B rows, S tokens of this device, T tokens of a row, H heads, K heads of keys and values, C size of a head.
"""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
from jax import lax

from jzero.attention.exchange import Exchange
from jzero.attention.kernels import attend_by, choose, traced_platform
from jzero.attention.plain import Places, Scores, attend_plainly, own_part, whole_rows


def attend(  # noqa: PLR0913  # what attention has
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segments: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    context: str | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """Returns causal attention, `[B, S, H, C]`: the mean of the values that each query sees, weighted by its scores.

    By default it is computed by a kernel, if there is one for the devices that has what is asked for, and by plain
    products otherwise. The logger `jzero` says which, and why: as a warning where an accelerator gets plain products.

    Args:
      q: Queries, `[B, S, H, C]`.
      k: Keys, `[B, S, K, C]`; K divides H.
      v: Values, `[B, S, K, C]`.
      window: How many tokens a token sees, itself included; all before it by default.
      segments: `[B, S]`, integers: tokens see those of their own segment alone, whose tokens are together.
      softcap: Bounds scores to it, smoothly: `softcap · tanh(score / softcap)`.
      sinks: Scores beside those of the keys, `[H]`, which take a share of each query, and have no values.
      scale: Scores are multiplied by it; `C ** -0.5` by default.
      context: The mesh axis along which devices have parts of the same rows, as `own_part` makes them.
      kernel: `"auto"`, `"plain"`, `"fused"` for a kernel or an error, or a key of `KERNELS`.

    Raises:
      ValueError: No kernel suffices, and `kernel` is neither `"auto"` nor `"plain"`; or `window` or heads do not fit.

    Example:
      >>> from jzero.attention import attend
      >>> q, k = jnp.ones((2, 128, 4, 64)), jnp.ones((2, 128, 2, 64))
      >>> attend(q, k, k, window=32).shape
      (2, 128, 4, 64)
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"The heads of `k` must divide those of `q`, {q.shape[2]}: got {k.shape[2]}.")
    if window is not None and window < 1:
        raise ValueError(f"`window` must be at least 1, since a token sees itself, or None: got {window}.")
    whole = functools.partial(whole_rows, axis=context)
    size, pieces = (1, 1) if context is None else (lax.axis_size(context), 2 * lax.axis_size(context))
    tokens = size * k.shape[1]
    given = {"windows": window, "segments": segments, "soft cap": softcap, "sinks": sinks, "parts of rows": context}
    needs = [name for name, x in given.items() if x is not None]
    wide = q.dtype == jnp.float32
    choice = choose(kernel, needs, platform=traced_platform(), tokens=tokens, pieces=pieces, wide=wide)
    falls_back = kernel == "auto" and choice.kernel == "plain" and traced_platform() != "cpu"
    logging.getLogger("jzero").log(logging.WARNING if falls_back else logging.INFO, "%s", choice)
    own = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else segments
    how = Scores(window, softcap, sinks, q.shape[-1] ** -0.5 if scale is None else scale)
    row = jnp.broadcast_to(jnp.arange(tokens)[None], (len(q), tokens))
    places, seen = Places(own_part(row, context), own), Places(row, whole(own))
    return attend_in_parts(choice.kernel, q, k, v, places, seen, how, context)


def attend_in_parts(  # noqa: PLR0913  # what attention has
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: Places,
    seen: Places,
    how: Scores,
    context: str | None,
) -> jax.Array:
    """Returns attention by a chosen kernel, or "plain", to the keys and values of all devices along an axis.

    Args:
      kernel: A key of `KERNELS`, or "plain".
      q: Queries, `[B, S, H, C]`.
      k: Keys, `[B, S, K, C]`.
      v: Values, `[B, S, K, C]`.
      places: Those of the device's tokens, `[B, S]`.
      seen: Those of whole rows, `[B, T]`.
      how: How scores are made.
      context: The mesh axis along which devices have parts of the same rows, if any.
    """
    exchange = Exchange.of(how.window, q.shape[1], context)
    if exchange is None:
        k, v = whole_rows(k, context), whole_rows(v, context)
    else:
        context, q, k, v = None, exchange.pieces(q), exchange.behind_others(k), exchange.behind_others(v)
        places, seen = Places(*map(exchange.pieces, places)), Places(*map(exchange.seen, seen))
    if kernel == "plain":
        y = attend_plainly(q, k, v, places, seen, how)
    else:
        y = attend_by(kernel, q, k, v, (places.segments, seen.segments), how, context)
    return y if exchange is None else exchange.join(y)
