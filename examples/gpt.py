"""Sizes and loss, shared by the Linen and the NNX model.

Shapes: B batch, S sequence, D model width, V vocabulary (256 bytes).
"""

import dataclasses

import jax
import optax

VOCAB_SIZE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a pre-LN decoder over bytes.

    Attributes:
      d_model: Width of the residual stream.
      num_layers: Number of blocks.
      num_heads: Attention heads per block; divides `d_model`.
      seq_len: Longest sequence that has a learned position.
      scan: One `scan` over stacked blocks in place of a Python loop.
      remat: Recompute each block in the backward pass.
    """

    d_model: int
    num_layers: int
    num_heads: int
    seq_len: int
    scan: bool
    remat: bool

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads:
            raise ValueError(f"`num_heads` must divide `d_model`: got {self.num_heads} heads and width {self.d_model}.")


def next_byte_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats per byte of logits [B, S, V] against targets [B, S]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
