"""What devices with pieces of the same rows exchange for attention with a window: the tokens before each piece.

    exchange = Exchange.of(window, tokens, axis)
    keys = exchange.behind_others(keys)  # [B, S, ...] -> [2 B, W + S/2, ...], from the devices that have these tokens

Where a window is long, whole rows are less: `plain.whole_rows`. Packed rows exchange as much as others, since shapes of
a program do not depend on data.

Shapes: B rows, S tokens of this device in two pieces, T tokens of a row, W tokens before a piece.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NOWHERE = -2
"""The position and the segment of what is before a row; padding in it may be -1."""


class Exchange(NamedTuple):
    """How devices see what is in a window: pieces are rows, behind the tokens before them.

    Attributes:
      axis: The mesh axis along which devices have parts of the same rows, as `plain.own_part` makes them.
      before: How many tokens before a piece its first token sees.
    """

    axis: str
    before: int

    @classmethod
    def of(cls, window: int | None, tokens: int, axis: str | None) -> Exchange | None:
        """Returns the exchange of devices with so many tokens each; `None` if they receive less of whole rows."""
        if axis is None or window is None or 2 * (window - 1) >= (lax.axis_size(axis) - 1) * tokens:
            return None
        return cls(axis, window - 1)

    def pieces(self, x: jax.Array) -> jax.Array:
        """Returns this device's pieces as rows. [B, S, ...] -> [2 B, S/2, ...]."""
        return jnp.concatenate(jnp.split(x, 2, axis=1))

    def join(self, x: jax.Array) -> jax.Array:
        """Undoes `pieces`. [2 B, S/2, ...] -> [B, S, ...]."""
        return jnp.concatenate(jnp.split(x, 2), axis=1)

    def behind_others(self, x: jax.Array) -> jax.Array:
        """Returns pieces behind the tokens before them, zeros before a row. [B, S, ...] -> [2 B, W + S/2, ...]."""
        count, (early, late) = lax.axis_size(self.axis), jnp.split(x, 2, axis=1)
        parts, size, left = [self.pieces(x)], early.shape[1], self.before
        for hop in range(1, -(-self.before // size) + 1):  # from the piece that is so many before
            ends = [piece[:, max(0, size - left) :] for piece in (early, late)]
            onward = lax.ppermute(ends[0], self.axis, [(i, i + hop) for i in range(count - hop)])
            back = lax.ppermute(ends[1], self.axis, [(i, i - hop) for i in range(hop, count)])
            turn = [(i, 2 * count - 1 - i - hop) for i in range(count - hop, count)]  # from the early half to the late
            parts.insert(0, jnp.concatenate([onward, back + lax.ppermute(ends[0], self.axis, turn)]))
            left -= size
        return jnp.concatenate(parts, axis=1)

    def seen(self, row: jax.Array) -> jax.Array:
        """Returns the integers of `behind_others`, cut from those of whole rows. [B, T] -> [2 B, W + S/2]."""
        count, index = 2 * lax.axis_size(self.axis), lax.axis_index(self.axis)
        size = row.shape[1] // count
        row = jnp.pad(row, ((0, 0), (self.before, 0)), constant_values=NOWHERE)
        starts = [number * size for number in (index, count - 1 - index)]
        return jnp.concatenate([lax.dynamic_slice_in_dim(row, start, self.before + size, axis=1) for start in starts])
